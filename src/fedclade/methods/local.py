"""Local: every client trains alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedclade.core.federation import Federation, ModelAssignment
from fedclade.core.local_sgd import sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.method_state import State
from fedclade.core.program import Program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, stack
from fedclade.methods.base import Method, Needs


@serializable_program
def sgd_in_memory(local: LocalTraining) -> Program:
    """`sgd` from the model in the client's state. The result stays there; the reply is empty.

    Args:
        local: the objective and the settings of SGD.
    """
    train = sgd(local)

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return train.start(broadcast, memory, {})

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        weights, _ = train.finish(broadcast, const, carry)
        return {}, weights

    return replace(train, start=start, finish=finish, name="sgd_in_memory", rng_stream="sgd")


@dataclass(frozen=True)
class Local(Method[State]):
    """No exchange (SOLO): each client trains its own model on its own data, in the rounds in which
    it is sampled.

    All clients start from the same initial weights. It is the baseline that a federation must
    exceed.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.Local(), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> result.summary["bytes_up"]
        0
    """

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local training: each client trains alone"
    paper: ClassVar[str] = "the baseline called Local in FLT and SOLO in FLIS"
    client_disclosure: ClassVar[str] = "nothing"
    no_server_optimizer: ClassVar[str] = "has no model at the server"
    server_visibility: ClassVar[Needs] = "nothing"
    no_guarded_layer: ClassVar[str] = "gives each client its own model already"
    upload_cost: ClassVar[str] = "0"
    download_cost: ClassVar[str] = "0"

    def initial_client_state(self, params: Tree) -> Tree:
        return params

    def init(self, fed: Federation, params: Tree, key: int) -> State:
        return State(models=stack([params]), cluster_ids=torch.arange(len(fed.sizes)))

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        fed.map(sgd_in_memory(self.local), cohort, key=key)
        return state

    def add_clients(self, fed: Federation, state: State, ids: Tensor, key: int) -> State:
        state = state.with_num_clients(len(fed.sizes))
        return replace(state, cluster_ids=state.cluster_ids.index_copy(0, ids, ids))

    def local_params(self) -> tuple[str, ...]:
        return self.local.objective.names

    def assign_models(self, state: State, ids: Tensor) -> ModelAssignment:
        return ModelAssignment(state.models, torch.zeros_like(ids), self.local_params())
