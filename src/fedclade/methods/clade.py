"""Clade: groups from one look at the clients' gradients, then one model for each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.clustering.clade import assign_new, find_groups, whitening_matrix
from fedclade.clustering.noisy import effective_sizes, with_noise
from fedclade.core.federation import ClientResults, Federation, ModelAssignment, SegmentSum
from fedclade.core.pytree import Tree, stack, tree_index
from fedclade.core.rng import fold_in
from fedclade.core.state import UNKNOWN, Features, State
from fedclade.errors import require, require_int
from fedclade.methods._dp_signature import DPSignatureMethod
from fedclade.methods.base import Groups, Needs
from fedclade.methods.fedavg import fedavg_round
from fedclade.programs.evaluation import evaluate_losses
from fedclade.programs.gradient_signature import (
    SignatureKind,
    dimensions,
    private_signature,
    signature,
    symmetric,
)
from fedclade.programs.sgd import sgd


@dataclass(frozen=True)
class CladeState(State):
    """Beside the groups' models: what is needed to place a late client."""

    start: Tree  # (1, …) the model at which signatures are taken
    signature_key: Tensor  # () the randomness of their projection
    signature: Tensor  # (clients, e); zeros where not known
    whitener: Tensor  # (e, e)
    rounds: Tensor  # () how many there have been

    def with_num_clients(self, clients: int) -> Self:
        missing = max(0, clients - len(self.signature))
        return replace(
            super().with_num_clients(clients), signature=F.pad(self.signature, (0, 0, 0, missing))
        )

    def features(self) -> Features:
        return Features(
            "whitened signatures", self.signature @ self.whitener, self.signature.any(1)
        )


@dataclass(frozen=True)
class Clade(DPSignatureMethod[CladeState]):
    """Once, before training, each client sends the mean of a random projection of its samples'
    last-layer gradients at the shared initial model: e numbers, beside its size n. Of the scatter
    within clients only the sum is formed. The means are whitened with it, merged by size-weighted
    Ward and compared with trees of noise clients of the same sizes; the tree is cut at the widest
    ratio, and each group is asked again with its own scatter. Then FedAvg runs inside each group.
    Neither an encoder nor a number of groups nor a threshold is given. A late client joins the
    group with which its merge costs least.

    signature: "gradient" sees p(x), p(y) and p(y | x); "features" sees p(x) alone and needs no
    labels; "joint" has class counts and class-conditional means.
    signature_dim: e.
    noise_ratio: the least ratio of the tree's top height to that of noise that counts as structure.
    recluster_every: after this number of rounds each client moves to the group whose model has the
        least training loss, and each group is searched again with signatures at its own trained
        model; 0 for never.
    signature_epsilon, signature_delta, signature_clip: (ε, δ)-private signatures; see
        docs/privacy.md.
    """

    name: ClassVar[str] = "clade"
    title: ClassVar[str] = "Clade: groups from one look at the clients' gradients"
    paper: ClassVar[str] = "fedclade's own method, docs/methods/clade.md"
    client_disclosure: ClassVar[str] = (
        "once, in clear, the mean sketch (128 numbers) and the number of examples; once a level of"
        " the search a scatter matrix (8,256 numbers), and once a round the trained weights, of"
        " both of which only the sum over a group is needed"
    )
    server_visibility: ClassVar[Needs] = "signatures"
    groups: ClassVar[Groups] = "found"
    extra_traffic: ClassVar[str] = (
        "once, before the first round, what all clients say of themselves"
    )
    state: ClassVar[type[State]] = CladeState

    signature: SignatureKind = "gradient"
    signature_dim: int = 128
    noise_ratio: float = 2.0
    recluster_every: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_int("method.signature_dim", self.signature_dim, 2)
        require(self.noise_ratio > 0, "method.noise_ratio", self.noise_ratio, "must be above 0")
        require_int("method.recluster_every", self.recluster_every, 0, note="0 for never")
        require(
            not (self.recluster_every and self.noise),
            "method.recluster_every",
            self.recluster_every,
            "must be 0 with signature_epsilon: it tells more than a signature",
        )

    def init(self, fed: Federation, params: Tree, key: int) -> CladeState:
        start, clients = stack([params]), len(fed.sizes)
        cluster = torch.full((clients,), UNKNOWN, dtype=torch.int64)
        known, white = (
            torch.zeros(clients, self._e, dtype=torch.float64),
            torch.eye(self._e, dtype=torch.float64),
        )
        got = self._signatures(
            fed,
            ModelAssignment.all_same(start, clients),
            torch.arange(clients),
            key,
        )
        if len(got.ids):
            known[got.ids] = got.outputs["mean"].double().cpu()
            cluster[got.ids] = self._groups(
                fed, ModelAssignment.all_same(start, len(got.ids)), got, key
            )
            size = fed.sizes[got.ids].double().numpy()
            white = torch.from_numpy(
                whitening_matrix(
                    with_noise(self._scatter(got), size, self.variance)[0],
                    max(1.0, size.sum() - len(size)),
                )
            )
        models = tree_index(start, torch.zeros(max(1, int(cluster.max()) + 1), dtype=torch.int64))
        return CladeState(models, cluster, start, torch.tensor(key), known, white, torch.tensor(0))

    def _groups(
        self, fed: Federation, rows: ModelAssignment, got: ClientResults, key: int
    ) -> Tensor:
        """The group of each client that answered, found level by level."""

        def scatter_of(label: np.ndarray) -> np.ndarray:
            told = (
                self._signatures(fed, rows, got.ids, key, torch.from_numpy(label))
                if label.any()
                else got
            )
            return with_noise(self._scatter(told), size, self.variance, label)

        size, means = (
            fed.sizes[got.ids].double().numpy(),
            got.outputs["mean"].double().cpu().numpy(),
        )
        weight = effective_sizes(size, self._scatter(got)[0], self.variance)
        return torch.from_numpy(
            find_groups(means, weight, scatter_of, fold_in(key, "noise"), self.noise_ratio)
        )

    def _signatures(
        self,
        fed: Federation,
        rows: ModelAssignment,
        ids: Tensor,
        key: int,
        group: Tensor | None = None,
    ) -> ClientResults:
        """Means of the sketches, client by client, and their scatter, summed over each group."""
        group = torch.zeros(len(ids), dtype=torch.int64) if group is None else group
        what = (
            self.local.objective,
            self.signature,
            self.signature_dim,
            fold_in(key, "projection"),
        )
        program = (
            private_signature(*what, self.signature_clip, self.noise, self.secret or 0)
            if self.noise
            else signature(*what)
        )
        add = SegmentSum(
            segment_ids=group,
            weights=torch.ones(len(ids)),
            num_segments=1 + int(group.max()) if len(group) else 1,
            keys=("scatter",),
        )
        return fed.map(program, ids, per_client=rows, key=key, reduce=add)

    def _scatter(self, got: ClientResults) -> np.ndarray:
        return symmetric(got.sums["scatter"].cpu(), self._e).numpy()

    @property
    def _e(self) -> int:
        return dimensions(self.local.objective, self.signature, self.signature_dim)

    def round(self, fed: Federation, state: CladeState, cohort: Tensor, key: int) -> CladeState:
        state = fedavg_round(
            fed, sgd(self.local), replace(state, rounds=state.rounds + 1), cohort, key
        )
        return (
            self._recluster(fed, state, key)
            if self.recluster_every and int(state.rounds) % self.recluster_every == 0
            else state
        )

    def _recluster(self, fed: Federation, state: CladeState, key: int) -> CladeState:
        """Let every client choose among the trained models, then split the groups whose clients
        disagree about theirs.
        """
        cluster, parent = state.cluster_ids.clone(), torch.arange(len(state))
        told = fed.map(
            evaluate_losses(self.local.objective),
            torch.nonzero(cluster != UNKNOWN).flatten(),
            broadcast=state.models,
            key=key,
        )
        cluster[told.ids] = told.outputs["loss"].argmin(1).cpu()
        for group in torch.unique(cluster[cluster != UNKNOWN]).tolist():
            ids = torch.nonzero(cluster == group).flatten()
            got = self._signatures(fed, ModelAssignment(state.models, cluster[ids]), ids, key)
            if len(got.ids):
                inner = self._groups(fed, ModelAssignment(state.models, cluster[got.ids]), got, key)
                names = torch.cat(
                    [torch.tensor([group]), len(parent) + torch.arange(int(inner.max()))]
                )
                cluster[got.ids], parent = (
                    names[inner],
                    torch.cat([parent, torch.full((int(inner.max()),), group)]),
                )
        return replace(state, models=tree_index(state.models, parent), cluster_ids=cluster)

    def add_clients(self, fed: Federation, state: CladeState, ids: Tensor, key: int) -> CladeState:
        state = state.with_num_clients(len(fed.sizes))
        got = self._signatures(
            fed, ModelAssignment.all_same(state.start, len(ids)), ids, int(state.signature_key)
        )
        if not len(got.ids):
            return state
        signatures = state.signature.index_copy(0, got.ids, got.outputs["mean"].double().cpu())
        z, n = (signatures @ state.whitener).numpy(), fed.sizes.double().numpy()
        old, new = np.flatnonzero(state.cluster_ids != UNKNOWN), got.ids.numpy()
        place = assign_new(
            z[new], n[new], z[old], n[old], state.cluster_ids.numpy()[old], len(state)
        )
        return replace(
            state,
            cluster_ids=state.cluster_ids.index_copy(0, got.ids, torch.from_numpy(place)),
            signature=signatures,
        )
