"""FedSEM: several centres; a client belongs to the one that its trained weights are nearest to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.aggregation.mean import mean_by_row
from fedclade.clustering.kmeans import kmeans, nearest_centre
from fedclade.core.federation import Federation, ModelAssignment
from fedclade.core.pytree import Tree, flatten, stack, tree_index, tree_map
from fedclade.core.rng import fold_in
from fedclade.core.state import UNKNOWN, State
from fedclade.errors import require_int
from fedclade.methods.base import Groups, Method, Needs, check_choices
from fedclade.programs.sgd import sgd


@dataclass(frozen=True)
class FedSEMState(State):
    """Beside the centres as they are now: what places a late client."""

    start: Tree  # (1, …) the first model, from which all trained in the one-off phase
    first: Tree  # (centres, …) the centres right after it


@dataclass(frozen=True)
class FedSEM(Method[FedSEMState]):
    """Find K centres W̃_k (`clusters`, the state's `models`) and memberships r_ik (the state's
    `cluster`) that make Σ_k Σ_i r_ik ‖W_i − W̃_k‖² small, W_i the weights of client i after local
    training, by stochastic expectation maximisation.

    Once, all clients train from the first model, and k-means on their weights gives the first
    memberships. Then, every round: the cohort trains, each client from its own centre. E-step: each
    goes to the centre nearest to its trained weights, of those it could have begun with. M-step: a
    centre becomes the mean of the cohort's weights that went to it, by examples, as in FedAvg (the
    paper's plain mean is the same for clients of one size); a centre to which nobody went stays.

    layers: what distances are taken on: "all" parameters, or the "last" linear layer's. The mean is
    always of the whole model. A late client takes the same look as the others did: it trains once
    from the first model and joins the nearest of the first centres.
    """

    name: ClassVar[str] = "fedsem"
    title: ClassVar[str] = (
        "FedSEM: several centres, a client belongs to the one nearest to its trained weights"
    )
    paper: ClassVar[str] = "Xie et al., Multi-Center Federated Learning, arXiv 2005.01026"
    client_disclosure: ClassVar[str] = (
        "the trained weights, once a round and once before the first, each client's in clear"
    )
    server_visibility: ClassVar[Needs] = "updates"
    groups: ClassVar[Groups] = "given"
    extra_traffic: ClassVar[str] = (
        "once, before training and for a late client: the first model down and the trained weights"
        " up, all clients"
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
        cohort = cohort.sort().values  # so that its order decides nothing
        got = fed.map(
            sgd(self.local),
            cohort,
            per_client=ModelAssignment(state.models, state.cluster_ids[cohort]),
            key=key,
        )
        if not len(got.ids):
            return state
        nearest = nearest_centre(self._points(got.outputs), self._points(state.models))
        models = mean_by_row(got.outputs, nearest, fed.sizes[got.ids], state.models, fed.aggregator)
        return replace(
            state, models=models, cluster_ids=state.cluster_ids.index_copy(0, got.ids, nearest)
        )

    def add_clients(
        self, fed: Federation, state: FedSEMState, ids: Tensor, key: int
    ) -> FedSEMState:
        """Who comes late joins the nearest first centre. Where nobody is known yet, those who
        answer are clustered.
        """
        state, ids = state.with_num_clients(len(fed.sizes)), ids.sort().values
        got = fed.map(
            sgd(self.local),
            ids,
            per_client=ModelAssignment.all_same(state.start, len(ids)),
            key=key,
        )
        if not len(got.ids):
            return state
        points = self._points(got.outputs)
        if bool((state.cluster_ids != UNKNOWN).any()):
            cluster = nearest_centre(points, self._points(state.first))
        else:
            cluster = kmeans(points, self.clusters, seed=fold_in(key, "centres") % 2**32)
            begin = tree_index(state.start, torch.zeros(int(cluster.max()) + 1, dtype=torch.int64))
            models = mean_by_row(got.outputs, cluster, fed.sizes[got.ids], begin, fed.aggregator)
            state = replace(state, models=models, first=_copy(models))
        return replace(state, cluster_ids=state.cluster_ids.index_copy(0, got.ids, cluster))

    def _points(self, models: Tree) -> Tensor:
        """(rows, P): the parameters that distances are taken on, in one order whatever that of the
        tree.
        """
        objective = self.local.objective
        return flatten(
            {
                name: models[name]
                for name in (
                    objective.names if self.layers == "all" else objective.head_param_names()
                )
            }
        )


def _copy(models: Tree) -> Tree:
    """A checkpoint's tensors may not share their memory."""
    return tree_map(torch.clone, models)
