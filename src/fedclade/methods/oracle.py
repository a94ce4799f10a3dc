"""Oracle: FedAvg inside the true groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedclade.core.federation import Federation
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import State
from fedclade.core.pytree import Tree, stack, tree_index
from fedclade.errors import InvalidInputError
from fedclade.methods.base import Groups, Method, Needs
from fedclade.methods.fedavg import fedavg_round
from fedclade.methods.required_context import NeedsTrueGroups


@dataclass(frozen=True)
class Oracle(NeedsTrueGroups, Method[State]):
    """FedAvg inside each true group of a planted partition: what a method would reach that groups
    clients perfectly.

    It is a reference for planted partitions, not a method for use. Without true groups it is
    refused.
    """

    name: ClassVar[str] = "oracle"
    title: ClassVar[str] = (
        "The true groups, given away: a yardstick for methods that have to find them"
    )
    paper: ClassVar[str] = "none: the bound that clustered methods are measured against"
    client_disclosure: ClassVar[str] = (
        "the trained weights, once a round; only their weighted sum is needed"
    )
    server_visibility: ClassVar[Needs] = "sum"
    groups: ClassVar[Groups] = "known"

    def _groups(self, clients: int) -> Tensor:
        if self.truth is None or len(self.truth) != clients:
            raise InvalidInputError(
                "method 'oracle': it needs the true group of every client, and none is known here;"
                " use a planted partition."
            )
        numbered: Tensor = torch.unique(self.truth, return_inverse=True)[1]
        return numbered

    def init(self, fed: Federation, params: Tree, key: int) -> State:
        cluster = self._groups(len(fed.sizes))
        return State(
            models=tree_index(
                stack([params]), torch.zeros(int(cluster.max()) + 1, dtype=torch.int64)
            ),
            cluster_ids=cluster,
        )

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        return fedavg_round(fed, sgd(self.local), state, cohort, key)

    def add_clients(self, fed: Federation, state: State, ids: Tensor, key: int) -> State:
        state = state.with_num_clients(len(fed.sizes))
        return replace(
            state,
            cluster_ids=state.cluster_ids.index_copy(0, ids, self._groups(len(fed.sizes))[ids]),
        )
