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
    """FedAvg inside each true group: the result of a method that groups clients perfectly.

    It is a reference for partitions with true groups, not a method for use. Without true groups it
    raises an error.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.Oracle(), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> result.groups
        {0: [0, 1, 2], 1: [3, 4, 5]}
    """

    name: ClassVar[str] = "oracle"
    title: ClassVar[str] = (
        "Oracle: FedAvg inside the true groups, a reference for methods that find groups"
    )
    paper: ClassVar[str] = "none: the reference with which clustered methods are compared"
    client_disclosure: ClassVar[str] = (
        "the trained weights, once a round; the server needs only their weighted sum"
    )
    server_visibility: ClassVar[Needs] = "sum"
    groups: ClassVar[Groups] = "known"

    def _groups(self, clients: int) -> Tensor:
        if self.truth is None or len(self.truth) != clients:
            raise InvalidInputError(
                "method 'oracle': it needs the true group of each client, and these clients have"
                " none. Use a partition with true groups, such as label_clusters.",
                "method",
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
