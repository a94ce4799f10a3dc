"""PACFL: clients whose data span similar subspaces share a model."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.clustering.principal_angles import (
    Angle,
    Linkage,
    angles_between,
    group_by_angles,
    place_new,
)
from fedclade.core.federation import Federation
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, Features, State
from fedclade.core.pytree import Tree, stack
from fedclade.errors import require, require_int
from fedclade.methods.base import Groups, Method, Needs, check_choices
from fedclade.methods.fedavg import fedavg_round
from fedclade.programs.data_subspace import data_subspace


@dataclass(frozen=True)
class PACFLState(State):
    """The groups' models, and the subspaces by which clients are compared."""

    basis: Tensor  # (clients, p, d) orthonormal rows; zeros if not known

    def with_num_clients(self, clients: int) -> Self:
        missing = max(0, clients - len(self.basis))
        return replace(
            super().with_num_clients(clients), basis=F.pad(self.basis, (0, 0, 0, 0, 0, missing))
        )

    def features(self) -> Features:
        first = self.basis[:, 0]
        sign = torch.where(first.sum(1, keepdim=True) < 0, -1.0, 1.0)  # a vector has no sign
        return Features("the first singular vector", first * sign, first.any(1), "cosine")


@dataclass(frozen=True)
class PACFL(Method[PACFLState]):
    """Once, before training, client k sends U_k: the first p left singular vectors of the matrix
    whose columns are its samples. The server computes the angle between U_i and U_j for all
    clients, in degrees, builds a tree by `linkage` and applies all merges below β. Then FedAvg runs
    inside each group.

    A client that missed the one-off phase joins the group at the smallest linkage distance. If that
    is β or more, it opens a new group, which starts with the nearest group's model. Groups of known
    clients stay.

    The samples are not centered, as in the paper, so that the first vector is near their mean.

    Args:
        p: the number of vectors of a client.
        threshold: β, in degrees.
        angle: "smallest": the smallest principal angle; "sum": Σ_q arccos |u_iq · u_jq|, the
            paper's other measure.
        linkage: the linkage of the tree.
        clusters: the number of groups, in place of β; None for β.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.PACFL(clusters=2), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> result.groups
        {0: [0, 1, 2], 1: [3, 4, 5]}
    """

    name: ClassVar[str] = "pacfl"
    title: ClassVar[str] = "PACFL: clients whose data span similar subspaces share a model"
    paper: ClassVar[str] = (
        "Vahidian et al., Efficient Distribution Similarity Identification in Clustered Federated"
        " Learning via Principal Angles Between Client Data Subspaces, AAAI 2023"
    )
    client_disclosure: ClassVar[str] = (
        "once, in clear, p singular vectors of its samples (3 by default), which have the size of a"
        " sample and may look like one; then once a round the trained weights, of which the server"
        " needs only weighted sums"
    )
    server_visibility: ClassVar[Needs] = "signatures"
    groups: ClassVar[Groups] = "found"
    extra_traffic: ClassVar[str] = "once, before the first round, p vectors of an input's size up"
    state: ClassVar[type[State]] = PACFLState

    p: int = 3
    threshold: float = 8.0
    angle: Angle = "smallest"
    linkage: Linkage = "average"
    clusters: int | None = None

    def __post_init__(self) -> None:
        check_choices(self)
        require_int("method.p", self.p, 1, 100)
        require(self.threshold > 0, "method.threshold", self.threshold, "must be above 0")
        if self.clusters is not None:
            require_int("method.clusters", self.clusters, 1)

    def init(self, fed: Federation, params: Tree, key: int) -> PACFLState:
        everyone = torch.arange(len(fed.sizes))
        unknown = torch.full_like(everyone, UNKNOWN)
        nothing = torch.zeros(len(everyone), self.p, 0)
        return self.add_clients(fed, PACFLState(stack([params]), unknown, nothing), everyone, key)

    def round(self, fed: Federation, state: PACFLState, cohort: Tensor, key: int) -> PACFLState:
        return fedavg_round(fed, sgd(self.local), state, cohort, key)

    def add_clients(self, fed: Federation, state: PACFLState, ids: Tensor, key: int) -> PACFLState:
        state = state.with_num_clients(len(fed.sizes))
        replies = fed.map(data_subspace(self.p), ids.sort().values, key=key)
        if not len(replies.ids):
            return state
        basis = replies.outputs["basis"].cpu()
        new = basis.double().numpy()
        known = (state.cluster_ids != UNKNOWN).nonzero().flatten()
        among_new = angles_between(new, new, self.angle)
        if len(known):
            to_known = angles_between(new, state.basis[known].double().numpy(), self.angle)
            threshold = self.threshold if self.clusters is None else math.inf
            groups, parents = place_new(
                to_known, among_new, state.cluster_ids[known].numpy(), self.linkage, threshold
            )
            rows = np.concatenate([np.arange(len(state)), parents])
        else:
            groups = group_by_angles(among_new, self.linkage, self.threshold, self.clusters)
            rows = np.zeros(int(groups.max()) + 1, np.int64)
            state = replace(state, basis=basis.new_zeros(len(fed.sizes), *basis.shape[1:]))
        return replace(
            state.at_rows(torch.from_numpy(rows)),
            cluster_ids=state.cluster_ids.index_copy(0, replies.ids, torch.from_numpy(groups)),
            basis=state.basis.index_copy(0, replies.ids, basis),
        )
