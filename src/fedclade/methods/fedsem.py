"""FedSEM: several centers; each client belongs to the one nearest to its trained weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.aggregation.mean import segment_mean
from fedclade.aggregation.server_optimizer import update_models
from fedclade.clustering.fedsem import kmeans_labels, nearest_center
from fedclade.core.federation import Federation, ModelAssignment
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.pytree import Tree, flatten, stack, tree_index, tree_map
from fedclade.core.rng import fold_in
from fedclade.errors import require_int
from fedclade.methods.base import Groups, Method, Needs, check_choices


@dataclass(frozen=True)
class FedSEMState(State):
    """The current centers, and what is needed to assign a late client."""

    start: Tree  # (1, …) the initial model, from which all clients train in the one-off phase
    first: Tree  # (centers, …) the centers right after that phase


@dataclass(frozen=True)
class FedSEM(Method[FedSEMState]):
    """Stochastic expectation maximization finds K centers W̃_k (the state's `models`) and
    memberships r_ik (the state's `cluster_ids`) that minimize Σ_k Σ_i r_ik ‖W_i − W̃_k‖², where W_i
    are the weights of client i after local training.

    Once, all clients train from the initial model, and k-means on their weights gives the first
    memberships. Then, in each round, the clients of the cohort train, each from its own center.
    E-step: each client joins the center nearest to its trained weights, among the centers before
    the round. M-step: a center becomes the mean of its clients' weights by examples, as in FedAvg
    (for clients of one size that is the paper's plain mean); a center without clients does not
    change. A late client trains once from the initial model and joins the nearest of the first
    centers.

    Args:
        clusters: K.
        layers: the parameters that distances are computed on: "all", or those of the "last" linear
            layer. The mean is always of the whole model.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.FedSEM(clusters=2), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> result.summary["clusters"]
        2
    """

    name: ClassVar[str] = "fedsem"
    title: ClassVar[str] = (
        "FedSEM: several centers; each client belongs to the one nearest to its trained weights"
    )
    paper: ClassVar[str] = "Xie et al., Multi-Center Federated Learning, arXiv 2005.01026"
    client_disclosure: ClassVar[str] = (
        "the trained weights in clear, once before the first round and once a round"
    )
    server_visibility: ClassVar[Needs] = "updates"
    groups: ClassVar[Groups] = "given"
    extra_traffic: ClassVar[str] = (
        "once, before a client's first round: the initial model down and the trained weights up"
    )
    state: ClassVar[type[State]] = FedSEMState

    clusters: int = 5
    layers: Literal["all", "last"] = "all"

    def __post_init__(self) -> None:
        check_choices(self)
        require_int("method.clusters", self.clusters, 1)

    def init(self, fed: Federation, params: Tree, key: int) -> FedSEMState:
        everyone, models = torch.arange(len(fed.sizes)), stack([params])
        state = FedSEMState(
            models, torch.full_like(everyone, UNKNOWN), _copy(models), _copy(models)
        )
        return self.add_clients(fed, state, everyone, key)

    def round(self, fed: Federation, state: FedSEMState, cohort: Tensor, key: int) -> FedSEMState:
        cohort = cohort.sort().values  # the result must not depend on its order
        replies = fed.map(
            sgd(self.local),
            cohort,
            per_client=ModelAssignment(state.models, state.cluster_ids[cohort]),
            key=key,
        )
        if not len(replies.ids):
            return state
        nearest = nearest_center(self._points(replies.outputs), self._points(state.models))
        means = segment_mean(
            replies.outputs, nearest, fed.sizes[replies.ids], state.models, fed.aggregator
        )
        cluster = state.cluster_ids.index_copy(0, replies.ids, nearest)
        return update_models(fed, replace(state, cluster_ids=cluster), means)

    def add_clients(
        self, fed: Federation, state: FedSEMState, ids: Tensor, key: int
    ) -> FedSEMState:
        """A late client joins the nearest first center. If no client is assigned yet, those that
        reply are clustered.
        """
        state, ids = state.with_num_clients(len(fed.sizes)), ids.sort().values
        replies = fed.map(
            sgd(self.local),
            ids,
            per_client=ModelAssignment.all_same(state.start, len(ids)),
            key=key,
        )
        if not len(replies.ids):
            return state
        points = self._points(replies.outputs)
        if bool((state.cluster_ids != UNKNOWN).any()):
            cluster = nearest_center(points, self._points(state.first))
        else:
            cluster = kmeans_labels(points, self.clusters, seed=fold_in(key, "centres") % 2**32)
            fallback = tree_index(
                state.start, torch.zeros(int(cluster.max()) + 1, dtype=torch.int64)
            )
            models = segment_mean(
                replies.outputs, cluster, fed.sizes[replies.ids], fallback, fed.aggregator
            )
            state = replace(state, models=models, first=_copy(models))
        return replace(state, cluster_ids=state.cluster_ids.index_copy(0, replies.ids, cluster))

    def _points(self, models: Tree) -> Tensor:
        """(rows, P): the parameters that distances are computed on, in the model's order."""
        objective = self.local.objective
        names = objective.trained if self.layers == "all" else objective.head_param_names()
        return flatten({name: models[name] for name in names if name in models})


def _copy(models: Tree) -> Tree:
    """Copy the tensors: those of a checkpoint must not share memory."""
    return tree_map(torch.clone, models)
