"""The public interface for authors of methods: programs and their pieces, the federation, the state
of a method, and trees of tensors.

    from fedclade.core import LocalTraining, Program, serializable_program, sgd_step

docs/extend.md builds a method from these names. Means of models are in `fedclade.aggregation`.
"""

from fedclade.core.batching import Batches
from fedclade.core.federation import (
    ClientResults,
    Failure,
    Federation,
    ModelAssignment,
    SegmentSum,
)
from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Batch, ClientStackedBatch, Objective
from fedclade.core.local_sgd import (
    chain_training,
    effective_steps,
    initial_optimizer_state,
    initial_velocity,
    optimizer_step,
    sgd,
    sgd_step,
)
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.losses import accuracy, cross_entropy
from fedclade.core.method_state import UNKNOWN, Features, State
from fedclade.core.program import AnyProgram, ChainedProgram, Program, chain, natively_batched
from fedclade.core.program_cache import cached_program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import (
    Tree,
    add_prefix,
    concatenate,
    flatten,
    nbytes,
    stack,
    strip_prefix,
    tree_index,
    tree_map,
    unflatten,
)
from fedclade.core.rng import client_keys, fold_in, uniform

__all__ = [
    "UNKNOWN",
    "AnyProgram",
    "Batch",
    "Batches",
    "ChainedProgram",
    "ClientResults",
    "ClientStackedBatch",
    "Encoder",
    "Failure",
    "Features",
    "Federation",
    "LocalTraining",
    "ModelAssignment",
    "Objective",
    "Program",
    "SegmentSum",
    "State",
    "Tree",
    "accuracy",
    "add_prefix",
    "cached_program",
    "chain",
    "chain_training",
    "client_keys",
    "concatenate",
    "cross_entropy",
    "effective_steps",
    "flatten",
    "fold_in",
    "initial_optimizer_state",
    "initial_velocity",
    "natively_batched",
    "nbytes",
    "optimizer_step",
    "serializable_program",
    "sgd",
    "sgd_step",
    "stack",
    "strip_prefix",
    "tree_index",
    "tree_map",
    "unflatten",
    "uniform",
]
