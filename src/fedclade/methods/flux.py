"""FLUX: groups by means and deviations of features; new clients are assigned without labels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.aggregation.mean import weighted_mean
from fedclade.aggregation.server_optimizer import update_models
from fedclade.clustering.nearest_neighbor_knee import group_by_knee, scaled
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, Features, State
from fedclade.core.pytree import Tree, stack
from fedclade.core.rng import fold_in
from fedclade.errors import require, require_int
from fedclade.methods.base import Groups, Needs, require_class_labels
from fedclade.methods.fedavg import FedAvg, fedavg_round
from fedclade.programs.held_out import accuracy_then
from fedclade.programs.latent_descriptor import latent_descriptor


@dataclass(frozen=True)
class FLUXState(State):
    """One model, or after the search that of each group, and what assigns a new client."""

    rounds: Tensor  # () the number of rounds so far
    accuracy: Tensor  # () of the last round's model on training samples; -1 at first
    is_flat: Tensor  # () whether a round gained little
    descriptor: Tensor  # (clients, 2 C) the scaled part without labels; zeros if not known
    centers: Tensor  # (groups, 2 C) its means; (0, 2 C) before the search
    reach: Tensor  # (2, 2) the smallest and the largest mean and standard deviation
    encoder: Tree  # (1, …) the model that gave the features
    encoder_key: Tensor  # () the randomness of the projection

    def with_num_clients(self, clients: int) -> Self:
        missing = max(0, clients - len(self.descriptor))
        return replace(
            super().with_num_clients(clients), descriptor=F.pad(self.descriptor, (0, 0, 0, missing))
        )

    def features(self) -> Features:
        rows = self.descriptor
        return Features("means and deviations of features", rows, rows.any(1))


@dataclass(frozen=True)
class FLUX(FedAvg):
    """First the clients train one model by FedAvg. When its accuracy gains little, each client
    sends once the mean and the standard deviation of its features, projected to as many numbers as
    there are classes: over all samples, and over those of each label. The server scales each block
    of numbers to 0 … 1 and joins clients at a distance of at most ε, the knee of the distances of
    nearest neighbors; other clients are groups of their own. Then FedAvg runs inside each group.

    A client that comes later sends the part over all samples only, for which it needs no labels. It
    joins the group with the nearest mean.

    The accuracy is that of the received model on the clients' training samples, since test data
    are out of reach.

    Args:
        gain: the search is in the round after one whose accuracy is less than this above that of
            the round before.
        first_round: the first round after which the search may be.
        last_round: the round after which it is at the latest (in the authors' code 80 % of all
            rounds).

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> method = fc.FLUX(first_round=1, last_round=2)
        >>> result = fc.run(method, clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clusters)
        6
    """

    name: ClassVar[str] = "flux"
    title: ClassVar[str] = "FLUX: groups by means and deviations of features, of each label too"
    paper: ClassVar[str] = (
        "Fenoglio et al., FLUX: Efficient Descriptor-Driven Clustered Federated Learning under"
        " Arbitrary Distribution Shifts, NeurIPS 2025"
    )
    client_disclosure: ClassVar[str] = (
        "the trained weights, and until groups are found the accuracy, once a round, of which the"
        " server needs only weighted sums; once, in clear, means and standard deviations of C"
        " projected features for all samples and for each of the C labels, which show the labels"
        " that the client has"
    )
    server_visibility: ClassVar[Needs] = "signatures"
    groups: ClassVar[Groups] = "found"
    upload_cost: ClassVar[str] = "W + 4"
    extra_traffic: ClassVar[str] = (
        "4 bytes less up after groups are found; once, when they are searched, W down and 8 C (C +"
        " 1) bytes up for C classes"
    )
    state: ClassVar[type[State]] = FLUXState

    gain: float = 0.06
    first_round: int = 3
    last_round: int = 8

    def __post_init__(self) -> None:
        require(0 <= self.gain < 1, "method.gain", self.gain, "must be from 0 to below 1")
        require_int("method.first_round", self.first_round, 1)
        require_int("method.last_round", self.last_round, self.first_round)

    def init(self, fed: Federation, params: Tree, key: int) -> FLUXState:
        require_class_labels(self.local.objective, self.name, "compares features by class")
        base, width = super().init(fed, params, key), self.local.objective.head_layer().out_features
        return FLUXState(
            base.models,
            base.cluster_ids,
            rounds=torch.tensor(0),
            accuracy=torch.tensor(-1.0),
            is_flat=torch.tensor(False),
            descriptor=torch.zeros(len(fed.sizes), 2 * width),
            centers=torch.zeros(0, 2 * width),
            reach=torch.zeros(2, 2, dtype=torch.float64),
            encoder=stack([params]),
            encoder_key=torch.tensor(key),
        )

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> FLUXState:
        assert isinstance(state, FLUXState)
        is_time = int(state.rounds) >= self.first_round and bool(state.is_flat)
        if not len(state.centers) and (is_time or int(state.rounds) >= self.last_round):
            state = self._search(fed, state, fold_in(key, "search"))
            cohort = cohort[state.cluster_ids[cohort] != UNKNOWN]
        state = replace(state, rounds=state.rounds + 1)
        if len(state.centers):
            return fedavg_round(fed, sgd(self.local), state, cohort, key)
        results = fed.map(
            accuracy_then(self.local.objective, sgd(self.local)),
            cohort,
            per_client=ModelAssignment(state.models, state.cluster_ids[cohort]),
            key=key,
            reduce=SegmentSum(fed.sizes[cohort], 1, torch.zeros_like(cohort), robust_ok=True),
        )
        if not len(results.ids):
            return state
        means = weighted_mean(
            results.sums, results.total_weight, state.models | {"accuracy": torch.zeros(1)}
        )
        accuracy = means.pop("accuracy")[0].cpu()
        gained_little = accuracy - state.accuracy < self.gain  # False after the first round
        state = replace(state, accuracy=accuracy, is_flat=state.is_flat | gained_little)
        return update_models(fed, state, means)

    def _search(self, fed: Federation, state: FLUXState, key: int) -> FLUXState:
        """The state with groups of all clients that reply."""
        ids = torch.arange(len(fed.sizes))
        state = replace(state, encoder=state.models, encoder_key=torch.tensor(key))
        program = latent_descriptor(self.local.objective, key, labelled=True)
        results = fed.map(
            program, ids, per_client=ModelAssignment.all_same(state.models, len(ids)), key=key
        )
        if not len(results.ids):
            return state  # the search is tried again in the next round
        inputs, labels = (results.outputs[name].double().cpu() for name in ("inputs", "labels"))
        blocks = torch.cat([inputs, labels.flatten(1, 2)], 1).numpy()
        low, high = blocks.min((0, 2)), blocks.max((0, 2))
        points = scaled(blocks, low, high)
        groups = torch.from_numpy(group_by_knee(points.reshape(len(points), -1)))
        own = torch.from_numpy(points[:, :2]).flatten(1)
        members = F.one_hot(groups).T.double()
        state = state.at_rows(torch.zeros(int(groups.max()) + 1, dtype=torch.int64))
        unknown = torch.full_like(state.cluster_ids, UNKNOWN)
        return replace(
            state,
            cluster_ids=unknown.index_copy(0, results.ids, groups),
            descriptor=state.descriptor.index_copy(0, results.ids, own.float()),
            centers=(members @ own / members.sum(1, keepdim=True)).float(),
            reach=torch.from_numpy(np.stack([low[:2], high[:2]])),
        )

    def add_clients(self, fed: Federation, state: State, ids: Tensor, key: int) -> FLUXState:
        assert isinstance(state, FLUXState)
        state = state.with_num_clients(len(fed.sizes))
        if not len(state.centers):
            return replace(state, cluster_ids=state.cluster_ids.index_fill(0, ids, 0))
        program = latent_descriptor(self.local.objective, int(state.encoder_key), labelled=False)
        rows = ModelAssignment.all_same(state.encoder, len(ids))
        results = fed.map(program, ids.sort().values, per_client=rows, key=key)
        if not len(results.ids):
            return state
        blocks = results.outputs["inputs"].double().cpu().numpy()
        own = scaled(blocks, *state.reach.numpy()).reshape(len(blocks), -1)
        from scipy.spatial.distance import cdist  # a node's process imports no scipy

        nearest = cdist(own, state.centers.double().numpy()).argmin(1)
        return replace(
            state,
            cluster_ids=state.cluster_ids.index_copy(0, results.ids, torch.from_numpy(nearest)),
            descriptor=state.descriptor.index_copy(0, results.ids, torch.from_numpy(own).float()),
        )
