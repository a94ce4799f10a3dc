"""CladeGroups: groups from one signature of each client's gradients, then a model per group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from fedclade.clustering.clade import (
    effective_sizes,
    scatter_of_all,
    scatter_with_noise,
    split_groups,
)
from fedclade.clustering.graph import canonical_labels
from fedclade.core.federation import ClientResults, Federation, ModelAssignment, SegmentSum
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.pytree import Tree, stack, tree_index
from fedclade.core.rng import fold_in
from fedclade.errors import require, require_int
from fedclade.methods._clade_groups_state import CladeGroupsState as CladeGroupsState
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


@dataclass(frozen=True)
class CladeGroups(DPSignatureMethod[CladeGroupsState]):
    """Once, before training, each client sends the mean of a random projection of its samples'
    last-layer gradients at the shared initial model, e numbers, and its size n. Within-client
    scatter matrices are only ever summed. The means are whitened with the sum, merged by
    size-weighted Ward and compared with trees of noise clients of the same sizes. The tree is cut
    at the widest ratio of costs, and each group is split further by its own scatter. Then FedAvg
    runs inside each group. No encoder, number of groups or threshold is needed. A late client joins
    the group with the least merge cost.

    Args:
        signature: "gradient" depends on p(x), p(y) and p(y | x); "features" depends on p(x) only
            and needs no labels; "joint" has class counts and class-conditional means.
        signature_dim: e.
        noise_ratio: the least ratio of the tree's top height to that of noise that counts as
            structure.
        recluster_every: after this number of rounds each client moves to the group whose model has
            the least training loss, and each group is searched again with signatures at its own
            trained model; 0 for never.
        late: how a late client is assigned: by its "signature", or by its "features", for which it
            needs no labels. Then all clients also send a signature of kind "features" once.
        signature_epsilon: ε of (ε, δ)-private signatures; None for no noise. See docs/privacy.md.
        signature_delta: δ of the same.
        signature_clip: the largest norm of an example's contribution.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.CladeGroups(), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> result.groups
        {0: [0, 1, 2], 1: [3, 4, 5]}
    """

    name: ClassVar[str] = "clade_groups"
    title: ClassVar[str] = "CladeGroups: groups from one signature of each client's gradients"
    paper: ClassVar[str] = "fedclade's own method, docs/methods/clade.md"
    client_disclosure: ClassVar[str] = (
        "once, in clear, the mean sketch (128 numbers) and the number of examples; once for each"
        " level of the search a scatter matrix (8,256 numbers), and once a round the trained"
        " weights. The server needs only sums of both over a group"
    )
    server_visibility: ClassVar[Needs] = "signatures"
    groups: ClassVar[Groups] = "found"
    extra_traffic: ClassVar[str] = "once, before the first round, the signatures of all clients"
    state: ClassVar[type[State]] = CladeGroupsState

    signature: SignatureKind = "gradient"
    signature_dim: int = 128
    noise_ratio: float = 2.0
    recluster_every: int = 0
    late: Literal["signature", "features"] = "signature"

    def __post_init__(self) -> None:
        super().__post_init__()
        ok = self.late == "signature" or not (self.noise or self.recluster_every)
        allowed = "'features' needs signature_epsilon = none and recluster_every = 0"
        require(ok, "method.late", self.late, allowed)
        require_int("method.signature_dim", self.signature_dim, 2)
        require(self.noise_ratio > 0, "method.noise_ratio", self.noise_ratio, "must be above 0")
        require_int("method.recluster_every", self.recluster_every, 0, note="0 for never")
        require(
            not (self.recluster_every and self.noise),
            "method.recluster_every",
            self.recluster_every,
            "must be 0 with signature_epsilon: reclustering discloses more than a signature",
        )

    def why_no_client_privacy(self) -> str:
        return "" if self.noise else super().why_no_client_privacy()

    def init(self, fed: Federation, params: Tree, key: int) -> CladeGroupsState:
        start = stack([params])
        cluster = torch.full((len(fed.sizes),), UNKNOWN, dtype=torch.int64)
        own, replies = self._of_all(fed, start, key)
        if len(replies.ids):
            cluster[replies.ids] = self._groups(
                fed, ModelAssignment.all_same(start, len(replies.ids)), replies, key
            )
        models = tree_index(start, torch.zeros(max(1, int(cluster.max()) + 1), dtype=torch.int64))
        state = CladeGroupsState(
            models,
            cluster,
            start,
            torch.tensor(key),
            own["signature"],
            own["whitener"],
            torch.tensor(0),
        )
        if self.late == "signature":
            return state
        inputs, _ = self._by_features()._of_all(fed, start, fold_in(key, "late"))
        return replace(state, inputs=inputs)

    def _by_features(self) -> Self:
        return replace(self, signature="features", late="signature")

    def _of_all(self, fed: Federation, start: Tree, key: int) -> tuple[Tree, ClientResults]:
        """The `signature` of each client and their `whitener`, and the replies."""
        everyone = torch.arange(len(fed.sizes))
        replies = self._signatures(
            fed, ModelAssignment.all_same(start, len(everyone)), everyone, key
        )
        if len(replies.ids):
            scatter = self._scatter(replies)
            return CladeGroupsState.signatures_of(
                replies, scatter, fed.sizes, self._e, self.variance
            ), replies
        unknown = torch.zeros(len(everyone), self._e, dtype=torch.float64)
        return {"signature": unknown, "whitener": torch.eye(self._e).double()}, replies

    def _groups(
        self, fed: Federation, rows: ModelAssignment, replies: ClientResults, key: int
    ) -> Tensor:
        """The group of each client that replied. It works level by level: the clients of each new
        group send its scatter, and the group is split if it has structure. The other groups are
        final.
        """
        size = fed.sizes[replies.ids].double().numpy()
        means = replies.outputs["mean"].double().cpu().numpy()
        weight = effective_sizes(size, self._scatter(replies)[0], self.variance)
        labels, candidates = np.zeros(len(size), np.int64), [0]
        while candidates:
            level = replies  # the first level's scatter came with the means
            if labels.any():
                # Private scatter is corrected with that of all groups.
                asked = torch.from_numpy(np.isin(labels, candidates) | bool(self.noise))
                level = self._signatures(
                    fed, rows[asked], replies.ids[asked], key, torch.from_numpy(labels)[asked]
                )
                if not len(level.ids):
                    break
            scatter = scatter_with_noise(
                scatter_of_all(
                    self._scatter(level), size, labels, torch.isin(replies.ids, level.ids).numpy()
                ),
                size,
                self.variance,
                labels,
            )
            labels, candidates = split_groups(
                means,
                weight,
                scatter,
                labels,
                candidates,
                fold_in(key, "noise"),
                self.noise_ratio,
            )
        return torch.from_numpy(canonical_labels(labels))

    def _signatures(
        self,
        fed: Federation,
        rows: ModelAssignment,
        ids: Tensor,
        key: int,
        group: Tensor | None = None,
    ) -> ClientResults:
        """The mean sketch of each client, and the scatter summed over each group."""
        group = torch.zeros(len(ids), dtype=torch.int64) if group is None else group
        settings = (
            self.local.objective,
            self.signature,
            self.signature_dim,
            fold_in(key, "projection"),
        )
        program = (
            private_signature(*settings, self.signature_clip, self.noise, self.secret or 0)
            if self.noise
            else signature(*settings)
        )
        scatter_sum = SegmentSum(
            segment_ids=group,
            weights=torch.ones(len(ids)),
            num_segments=1 + int(group.max()) if len(group) else 1,
            keys=("scatter",),
        )
        return fed.map(program, ids, per_client=rows, key=key, reduce=scatter_sum)

    def _scatter(self, replies: ClientResults) -> np.ndarray:
        return symmetric(replies.sums["scatter"].cpu(), self._e).numpy()

    @property
    def _e(self) -> int:
        return dimensions(self.local.objective, self.signature, self.signature_dim)

    def round(
        self, fed: Federation, state: CladeGroupsState, cohort: Tensor, key: int
    ) -> CladeGroupsState:
        state = fedavg_round(
            fed, sgd(self.local), replace(state, rounds=state.rounds + 1), cohort, key
        )
        return (
            self._recluster(fed, state, key)
            if self.recluster_every and int(state.rounds) % self.recluster_every == 0
            else state
        )

    def _recluster(self, fed: Federation, state: CladeGroupsState, key: int) -> CladeGroupsState:
        """Let each client choose among the trained models, then split the groups whose clients
        differ under their model.
        """
        cluster, parent = state.cluster_ids.clone(), torch.arange(len(state))
        losses = fed.map(
            evaluate_losses(self.local.objective),
            torch.nonzero(cluster != UNKNOWN).flatten(),
            broadcast=state.models,
            key=key,
        )
        if len(losses.ids):
            cluster[losses.ids] = losses.outputs["loss"].argmin(1).cpu()
        for group in torch.unique(cluster[cluster != UNKNOWN]).tolist():
            ids = torch.nonzero(cluster == group).flatten()
            replies = self._signatures(fed, ModelAssignment(state.models, cluster[ids]), ids, key)
            if len(replies.ids):
                inner = self._groups(
                    fed, ModelAssignment(state.models, cluster[replies.ids]), replies, key
                )
                names = torch.cat(
                    [torch.tensor([group]), len(parent) + torch.arange(int(inner.max()))]
                )
                cluster[replies.ids], parent = (
                    names[inner],
                    torch.cat([parent, torch.full((int(inner.max()),), group)]),
                )
        return replace(state.at_rows(parent), cluster_ids=cluster)

    def add_clients(
        self, fed: Federation, state: CladeGroupsState, ids: Tensor, key: int
    ) -> CladeGroupsState:
        state, at = state.with_num_clients(len(fed.sizes)), int(state.signature_key)
        by_inputs = self.late == "features"
        method, at = (self._by_features(), fold_in(at, "late")) if by_inputs else (self, at)
        replies = method._signatures(fed, ModelAssignment.all_same(state.start, len(ids)), ids, at)
        return state.with_late(replies, fed.sizes, by_inputs) if len(replies.ids) else state
