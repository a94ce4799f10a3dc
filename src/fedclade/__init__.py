"""fedclade: clustered federated learning. Find which clients belong together, train one model per
group, give each client its own.

import fedclade as fc
clients = fc.data.partition(fc.data.load("digits"), fc.data.LabelClusters(clusters=5, classes=2),
clients=50, seed=0) result = fc.run(fc.FedAvg(), clients, model=fc.models.MLP(200), rounds=30)
result.summary; result.clusters; result.model_of(7)
"""

from fedclade import data, models
from fedclade.analysis.diagnose import diagnose
from fedclade.clustering.mode_connectivity import Curves, curve_losses
from fedclade.core.batching import Batches
from fedclade.core.federation import ClientResults, Federation, ModelAssignment, SegmentSum
from fedclade.core.functional_model import Batch, accuracy, cross_entropy
from fedclade.core.local_training import LocalTraining
from fedclade.core.program import Program, chain
from fedclade.core.program_serialization import serializable_program
from fedclade.core.state import State
from fedclade.engines.simulator import Simulator
from fedclade.errors import FedcladeError, InvalidInputError, VectorizationError, WriteError
from fedclade.methods import (
    CFL,
    FLIS,
    FLISDC,
    FLISHC,
    FLT,
    IFCA,
    PCAHC,
    SCAFFOLD,
    Clade,
    FedAvg,
    FedGMCC,
    FedNova,
    FedProx,
    FedSEM,
    LGFedAvg,
    Local,
    Method,
    Oracle,
    PerFedAvg,
)
from fedclade.programs.sgd import sgd
from fedclade.registry import register
from fedclade.training.encoder_pretraining import pretrain
from fedclade.training.result import Result, load
from fedclade.training.runner import run

__version__ = "0.1.0"

__all__ = [
    "CFL",
    "FLIS",
    "FLISDC",
    "FLISHC",
    "FLT",
    "IFCA",
    "PCAHC",
    "SCAFFOLD",
    "Batch",
    "Batches",
    "Clade",
    "ClientResults",
    "Curves",
    "FedAvg",
    "FedGMCC",
    "FedNova",
    "FedProx",
    "FedSEM",
    "FedcladeError",
    "Federation",
    "InvalidInputError",
    "LGFedAvg",
    "Local",
    "LocalTraining",
    "Method",
    "ModelAssignment",
    "Oracle",
    "PerFedAvg",
    "Program",
    "Result",
    "SegmentSum",
    "Simulator",
    "State",
    "VectorizationError",
    "WriteError",
    "accuracy",
    "chain",
    "cross_entropy",
    "curve_losses",
    "data",
    "diagnose",
    "load",
    "models",
    "pretrain",
    "register",
    "run",
    "serializable_program",
    "sgd",
]
