"""Methods: what the server does, one file each. A method does not depend on the engine."""

from fedclade.methods.apfl import APFL
from fedclade.methods.base import Method
from fedclade.methods.cfl import CFL
from fedclade.methods.clade import Clade
from fedclade.methods.clade_groups import CladeGroups
from fedclade.methods.ditto import Ditto
from fedclade.methods.fedala import FedALA
from fedclade.methods.fedavg import FedAvg
from fedclade.methods.fedavg_finetune import FedAvgFineTune
from fedclade.methods.fedbabu import FedBABU
from fedclade.methods.fedbn import FedBN
from fedclade.methods.feddbe import FedDBE
from fedclade.methods.feddrift import FedDrift
from fedclade.methods.fedem import FedEM
from fedclade.methods.fedgmcc import FedGMCC
from fedclade.methods.fednova import FedNova
from fedclade.methods.fedper import FedPer
from fedclade.methods.fedprox import FedProx
from fedclade.methods.fedrep import FedRep
from fedclade.methods.fedsem import FedSEM
from fedclade.methods.flis import FLISDC, FLISHC
from fedclade.methods.flt import FLT
from fedclade.methods.flux import FLUX
from fedclade.methods.ifca import IFCA
from fedclade.methods.knn_per import KNNPer
from fedclade.methods.lg_fedavg import LGFedAvg
from fedclade.methods.local import Local
from fedclade.methods.oracle import Oracle
from fedclade.methods.pacfl import PACFL
from fedclade.methods.pca_hc import PCAHC
from fedclade.methods.per_fedavg import PerFedAvg
from fedclade.methods.pfedgraph import PFedGraph
from fedclade.methods.scaffold import SCAFFOLD

_ALL: tuple[type[Method], ...] = (
    *(FedAvg, Local, FedProx, FedNova, SCAFFOLD, LGFedAvg, PerFedAvg, IFCA, FedSEM, PCAHC),
    *(FedAvgFineTune, FedPer, FedRep, FedBABU, FedBN, Ditto, APFL, FedALA, FedDBE),
    *(KNNPer, FedEM, PFedGraph),
    *(FLT, PACFL, FLUX, CFL, FLISDC, FLISHC, FedGMCC, FedDrift, CladeGroups, Clade, Oracle),
)
METHODS: dict[str, type[Method]] = {method.name: method for method in _ALL}

__all__ = [
    "APFL",
    "CFL",
    "FLISDC",
    "FLISHC",
    "FLT",
    "FLUX",
    "IFCA",
    "METHODS",
    "PACFL",
    "PCAHC",
    "SCAFFOLD",
    "Clade",
    "CladeGroups",
    "Ditto",
    "FedALA",
    "FedAvg",
    "FedAvgFineTune",
    "FedBABU",
    "FedBN",
    "FedDBE",
    "FedDrift",
    "FedEM",
    "FedGMCC",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSEM",
    "KNNPer",
    "LGFedAvg",
    "Local",
    "Method",
    "Oracle",
    "PFedGraph",
    "PerFedAvg",
]
