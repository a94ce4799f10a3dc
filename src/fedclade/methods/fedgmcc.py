"""FedGMCC: clients share a model if a low-loss path connects their weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.clustering.mode_connectivity import LR, Paths
from fedclade.core.federation import Federation, ModelAssignment
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.pytree import Tree, stack, tree_map
from fedclade.core.rng import client_keys, fold_in, uniform
from fedclade.errors import InvalidInputError, require, require_int
from fedclade.methods._loss_selection import LossSelectionMethod
from fedclade.methods.base import Groups, Method, Needs
from fedclade.methods.required_context import NeedsInputShape

LEAST, MOST = 5.0, 95.0  # where the schedule of the percentile ends


@dataclass(frozen=True)
class FedGMCCState(State):
    """Models and clusters, the key of the Monte Carlo inputs, and the schedule of the threshold."""

    inputs_key: Tensor  # ()
    percentile: Tensor  # () of the next round
    settled: Tensor  # () whether the percentile no longer changes
    seen: Tensor  # (clients,) the last partition into several clusters; UNKNOWN if absent

    def with_num_clients(self, clients: int) -> Self:
        grown, more = super().with_num_clients(clients), max(0, clients - len(self.seen))
        return replace(grown, seen=F.pad(self.seen, (0, more), value=UNKNOWN))


@dataclass(frozen=True)
class FedGMCC(NeedsInputShape, LossSelectionMethod[FedGMCCState]):
    """In each round the server fits, for each pair k < l of clients that replied with weights w_k
    and w_l, the bend θ of a path γ_θ between them: γ_θ(0) = w_k, γ_θ(½) = θ, γ_θ(1) = w_l. The loss
    at u is the distance of the outputs f(x; γ_θ(u)) from those of both ends, on Monte Carlo inputs
    x ~ U(0, 1) that are drawn once. The score of a pair is the mean loss over u. Pairs whose score
    is at most ε, a percentile of the scores of this round, are connected, and the connected
    components are the clusters. The new model of a cluster is the mean of E_u γ_θ(u) over its
    pairs; a client alone keeps its w_k. With straight paths and one cluster this is the plain mean
    of the clients' weights.

    Args:
        percentile: the initial percentile of ε.
        step: how much the percentile rises after a round with several clusters and falls after a
            round with one cluster, between 5 and 95, until a partition into several clusters
            repeats; then it stays. 0: it never changes.
        mc_samples: the number of inputs x. They are uniform in [0, 1), so the clients' inputs
            should be in that range, as pixels are.
        curve_steps: steps of Adam, from the midpoint, that fit the bends; 0 for straight paths.
        curve_lr: η, Adam's learning rate.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.FedGMCC(curve_steps=2), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clusters)
        6
    """

    name: ClassVar[str] = "fedgmcc"
    title: ClassVar[str] = (
        "FedGMCC: clients share a model if a low-loss path connects their weights"
    )
    paper: ClassVar[str] = (
        "Lucchetti et al., Federated Geometric Monte Carlo Clustering to Counter Non-IID Datasets,"
        " arXiv 2204.11017"
    )
    client_disclosure: ClassVar[str] = (
        "the trained weights in clear, once a round; a late client also sends the number of the"
        " model that it chose"
    )
    no_server_optimizer: ClassVar[str] = "makes new models in every round"
    server_visibility: ClassVar[Needs] = "updates"
    groups: ClassVar[Groups] = "found"
    custom_aggregation: ClassVar[str] = "the mean along paths between models"
    extra_traffic: ClassVar[str] = (
        "once for a late client: all models down, and the number of one up"
    )
    state: ClassVar[type[State]] = FedGMCCState

    percentile: float = 50.0
    step: float = 5.0
    mc_samples: int = 128
    curve_steps: int = 10
    curve_lr: float = LR

    prepare_cohort = Method.prepare_cohort  # unassigned clients choose before the round, not in it

    def __post_init__(self) -> None:
        require(
            0 <= self.percentile <= 100,
            "method.percentile",
            self.percentile,
            "must be from 0 to 100",
        )
        require(
            self.step >= 0,
            "method.step",
            self.step,
            "must be at least 0 (0: the percentile does not change)",
        )
        for name, value, least in (
            ("mc_samples", self.mc_samples, 1),
            ("curve_steps", self.curve_steps, 0),
        ):
            require_int(f"method.{name}", value, least)
        require(self.curve_lr > 0, "method.curve_lr", self.curve_lr, "must be above 0")

    def why_no_own_batch_norm(self) -> str:
        return "runs the clients' models at the server"

    def init(self, fed: Federation, params: Tree, key: int) -> FedGMCCState:
        if self.input_shape is None:
            raise InvalidInputError(
                "input_shape: fedgmcc draws inputs, uniform in [0, 1), and needs their shape. If"
                " the clients' inputs are integers, such as tokens, use another method. Without"
                " fc.run, set input_shape=….",
                "input_shape",
            )
        everyone = torch.zeros(len(fed.sizes), dtype=torch.int64)
        percentile = torch.tensor(self.percentile, dtype=torch.float64)
        settled, nothing = torch.tensor(self.step == 0), torch.full_like(everyone, UNKNOWN)
        return FedGMCCState(
            stack([params]),
            everyone,
            torch.tensor(fold_in(key, "inputs")),
            percentile,
            settled,
            nothing,
        )

    def round(self, fed: Federation, state: FedGMCCState, cohort: Tensor, key: int) -> FedGMCCState:
        cohort = cohort.sort().values  # the result does not depend on the order of the cohort
        results = fed.map(
            sgd(self.local),
            cohort,
            per_client=ModelAssignment(state.models, state.cluster_ids[cohort]),
            key=key,
        )
        if not len(results.ids):
            return state
        inputs = self.inputs(state).to(next(iter(results.outputs.values())).device)
        paths = Paths(
            self.local.objective.outputs,
            results.outputs,
            inputs,
            self.curve_steps,
            self.curve_lr,
            straight=self.local.objective.statistics,
        )
        label = paths.cluster(float(state.percentile))
        models = stack(
            [
                paths.mean(torch.nonzero(label == number).flatten())
                for number in range(int(label.max()) + 1)
            ]
        )
        state = self._replaced(state, results.ids, label, models)
        return self._scheduled(state, results.ids, label)

    def inputs(self, state: FedGMCCState) -> Tensor:
        """X, the same in every round."""
        assert self.input_shape is not None
        return uniform(
            client_keys(int(state.inputs_key), torch.tensor(0)),
            (self.mc_samples, *self.input_shape),
        )

    def _replaced(
        self, state: FedGMCCState, ids: Tensor, label: Tensor, models: Tree
    ) -> FedGMCCState:
        """The new models of the clients that replied, then the old ones that absent clients use."""
        absent = (state.cluster_ids != UNKNOWN).index_fill(0, ids, False)
        old, row = torch.unique(state.cluster_ids[absent], return_inverse=True)
        cluster = state.cluster_ids.masked_scatter(absent, row + int(label.max()) + 1).index_copy(
            0, ids, label
        )
        models = tree_map(
            lambda new, before: torch.cat([new, before[old].to(new.device)]), models, state.models
        )
        return replace(state, models=models, cluster_ids=cluster)

    def _scheduled(self, state: FedGMCCState, ids: Tensor, label: Tensor) -> FedGMCCState:
        """The percentile of the next round."""
        if state.settled or len(ids) < 2:
            return state
        if not label.any():
            return replace(state, percentile=(state.percentile - self.step).clamp_min(LEAST))
        partition = torch.full_like(state.seen, UNKNOWN).index_copy(0, ids, label)
        if torch.equal(partition, state.seen):
            return replace(state, settled=torch.tensor(True))
        return replace(
            state, percentile=(state.percentile + self.step).clamp_max(MOST), seen=partition
        )
