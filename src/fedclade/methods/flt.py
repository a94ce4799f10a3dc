"""FLT: clients are related if the centers of their embedded data are close."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.aggregation.mean import add_weighted_models, weighted_mean
from fedclade.aggregation.server_optimizer import update_models
from fedclade.clustering.flt import (
    DIMENSIONS,
    Cut,
    Distance,
    Manifold,
    cluster_signatures,
    extend_mixing,
    mixing_matrix,
    relate_newcomers,
)
from fedclade.clustering.set_distances import MAX_MATCHING_POINTS
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.functional_encoder import Encoder
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.pytree import Tree, add_prefix, stack
from fedclade.core.rng import fold_in
from fedclade.errors import is_int, require, require_int
from fedclade.methods._dp_signature import DPSignatureMethod
from fedclade.methods._flt_state import FLTState as FLTState
from fedclade.methods.base import Groups, Needs
from fedclade.methods.required_context import NeedsEncoder
from fedclade.programs.encoder_signature import Centres, autoencode, private_signature, signature


@dataclass(frozen=True)
class FLT(NeedsEncoder, DPSignatureMethod[FLTState]):
    """Once, before training, each client embeds its data with an encoder G and sends the k centers
    of the embeddings (k-means; e numbers each). The server embeds all centers in u dimensions,
    computes the distance A_ij between the centers of clients i and j, and relates i and j, Ã_ij =
    1, if A_ij < γ. After a round w_i = Σ_j Ã_ij n_j w_j / Σ_j Ã_ij n_j; p_m is n_m / Σ n. The
    one-off phase may have stages: the centers of a client that missed it join the others later, all
    are embedded again, and its relations are computed in the same way.

    Args:
        k: the number of centers of a client, or "auto".
        gamma: γ.
        distance: the distance of two sets of centers; "min" is the one printed in the paper.
        manifold: how the centers are embedded.
        manifold_dim: u, the dimensions of the embedding: 2 or 3 in the paper.
        cut: "threshold" uses γ. "gap" relates the members of a group: it cuts the tree of A
            (average linkage) at its widest gap.
        clusters: C, to relate the members of each of Ward's C groups; None to use `cut`.
        aggregation: "graph" (case I) mixes by Ã; "clusters" (case II) is FedAvg among the clients
            of a group (component of Ã) that replied.
        absent: with "graph", "last" includes the last models of absent clients, and "skip" omits
            them.
        fine_tune: "client" trains the autoencoder on each client; "federated" trains it by FedAvg;
            "auto" is "federated" for an encoder with random weights, else "none".
        fine_tune_epochs: F, the epochs or rounds of the fine-tuning.
        encoder: "default" (for 1 × 28 × 28 one trained on Fashion-MNIST, else random weights), or a
            file that `fedclade pretrain` wrote.
        signature_epsilon: ε of (ε, δ)-private signatures; None for no noise. See docs/privacy.md.
        signature_delta: δ of the same.
        signature_clip: the largest norm of an example's contribution.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> method = fc.FLT(k=2, manifold="pca")
        >>> result = fc.run(method, clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clusters)
        6
    """

    name: ClassVar[str] = "flt"
    title: ClassVar[str] = "FLT: clients with similar encoded data share models"
    paper: ClassVar[str] = (
        "Jamali-Rad et al., Federated Learning with Taskonomy for Non-IID Data, arXiv 2103.15947"
    )
    client_disclosure: ClassVar[str] = (
        "once, in clear, k centers of e numbers (5 × 128 by default) and their count; with"
        " fine_tune='federated', before that, F times the autoencoder's weights (51,577 for"
        " 28 × 28); then once a round the trained weights. The server needs only weighted sums of"
        " all weights"
    )
    server_visibility: ClassVar[Needs] = "signatures"
    groups: ClassVar[Groups] = "found"
    extra_traffic: ClassVar[str] = (
        "once, before the first round, the encoder down and the centers up"
    )
    no_secure_sum: ClassVar[str] = (
        "forms sums that overlap, whose differences show clients; use clade_groups"
    )
    state: ClassVar[type[State]] = FLTState

    k: Centres = 5
    gamma: float = 1.0
    distance: Distance = "matching"
    manifold: Manifold = "umap"
    manifold_dim: int = DIMENSIONS
    cut: Cut = "threshold"
    clusters: int | None = None
    aggregation: Literal["graph", "clusters"] = "graph"
    absent: Literal["last", "skip"] = "last"
    fine_tune: Literal["auto", "none", "client", "federated"] = "auto"
    fine_tune_epochs: int = 5
    encoder: str = "default"

    def __post_init__(self) -> None:
        super().__post_init__()
        most = MAX_MATCHING_POINTS if self.distance == "matching" else 1000
        require(
            self.k == "auto" or is_int(self.k, 1, most),
            "method.k",
            self.k,
            f"must be 'auto' or a whole number from 1 to {most}",
        )
        require(self.gamma > 0, "method.gamma", self.gamma, "must be above 0")
        ok = self.clusters is None or (is_int(self.clusters, 1) and self.cut != "gap")
        require(
            ok,
            "method.clusters",
            self.clusters,
            "must be at least 1, and cannot be used with cut = 'gap'",
        )
        require_int("method.manifold_dim", self.manifold_dim, 1)
        require_int("method.fine_tune_epochs", self.fine_tune_epochs, 1)
        ok = self.signature_epsilon is None or (self.k == 1 and self.fine_tune in ("auto", "none"))
        require(
            ok,
            "method.signature_epsilon",
            self.signature_epsilon,
            "needs k = 1, and fine_tune = 'none' or 'auto'; see docs/privacy.md",
        )

    @property
    def encoder_source(self) -> str:
        return self.encoder

    def init(self, fed: Federation, params: Tree, key: int) -> FLTState:
        encoder, everyone = Encoder(self.encoder_module), torch.arange(len(fed.sizes))
        weights, federated = (
            encoder.weights(),
            not self.noise and encoder.tuning(self.fine_tune) == "federated",
        )
        weighted_sum = SegmentSum(
            segment_ids=torch.zeros_like(everyone),
            weights=fed.sizes,
            num_segments=1,
            robust_ok=True,
        )
        for number in range(self.fine_tune_epochs if federated else 0):
            results = fed.map(
                autoencode(encoder, 1),
                everyone,
                broadcast=add_prefix("encoder", weights),
                key=fold_in(key, "tune", number),
                reduce=weighted_sum,
            )
            trained = weighted_mean(
                results.sums,
                results.total_weight,
                fallback=stack([{name: weights[name] for name in encoder.trained}]),
            )
            weights |= {name: value[0].cpu() for name, value in trained.items()}
        unknown, zeros = torch.full_like(everyone, UNKNOWN), torch.zeros_like(everyone)
        state = FLTState(
            stack([params]),
            unknown,
            zeros[:, None, None].float(),
            zeros,
            unknown,
            zeros[None].bool(),
            weights,
        )
        return self.add_clients(fed, state, everyone, key)

    def round(self, fed: Federation, state: FLTState, cohort: Tensor, key: int) -> FLTState:
        sizes = fed.sizes[: len(state.row)].double()
        weighted_sum = SegmentSum(
            weights=state.mixing[:, cohort].T * sizes[cohort, None],
            num_segments=len(state),
            robust_ok=True,
        )
        results = fed.map(
            sgd(self.local),
            cohort,
            per_client=ModelAssignment(state.models, state.row[cohort]),
            key=key,
            reduce=weighted_sum,
        )
        if len(results.ids) == 0:
            return state
        sums, weight = results.sums, results.total_weight
        if self.aggregation == "graph" and self.absent == "last":
            absent = (state.row != UNKNOWN).index_fill(0, results.ids, False).nonzero().flatten()
            # The last model of an absent client is its row of the old models. old[i, j] is the
            # weight of the old row j in the new row i.
            old = torch.zeros(len(state), len(state), dtype=torch.float64)
            old.index_add_(1, state.row[absent], state.mixing[:, absent] * sizes[absent])
            sums, weight = add_weighted_models(sums, weight, old, state.models)
        return update_models(fed, state, weighted_mean(sums, weight, fallback=state.models))

    def add_clients(self, fed: Federation, state: FLTState, ids: Tensor, key: int) -> FLTState:
        """The centers of the new clients join those of the known ones, and their relations are
        computed (see `_join`). If no client is known yet, Ã is computed.
        """
        state = state.with_num_clients(len(fed.sizes))
        encoder = Encoder(self.encoder_module)
        own = self.fine_tune_epochs if encoder.tuning(self.fine_tune) == "client" else 0
        sent = add_prefix("encoder", state.encoder if own else encoder.needed(state.encoder))
        program = (
            private_signature(encoder, self.signature_clip, self.noise, self.secret or 0)
            if self.noise
            else signature(encoder, self.k, own)
        )
        results = fed.map(program, ids.sort().values, broadcast=sent, key=key)
        if len(results.ids) == 0:
            return state
        centres, counts = (
            results.outputs["centres"].cpu(),
            results.outputs["count"].cpu().clamp(1, results.outputs["centres"].shape[1]),
        )
        seed = fold_in(key, "manifold") % 2**32
        if bool((state.row != UNKNOWN).any()):
            return self._join(fed, state, results.ids, centres, counts, seed)
        groups, related = cluster_signatures(
            centres.numpy(),
            counts.numpy(),
            self.manifold,
            self.distance,
            self.cut,
            self.gamma,
            self.clusters,
            seed,
            graph=self.aggregation == "graph",
            dim=self.manifold_dim,
        )
        rows, row = mixing_matrix(groups, related)
        state = state.at_rows(torch.zeros(len(rows), dtype=torch.int64))
        zeros = centres.new_zeros(len(state.row), *centres.shape[1:])
        mixing = state.mixing.expand(len(rows), -1).index_copy(1, results.ids, rows)
        state = replace(state, centres=zeros, mixing=mixing)
        return state.with_clients(results.ids, torch.from_numpy(groups), row, centres, counts)

    def _join(
        self,
        fed: Federation,
        state: FLTState,
        new: Tensor,
        centres: Tensor,
        counts: Tensor,
        seed: int,
    ) -> FLTState:
        """Relate newcomers to the known clients and to each other. The centers of all are embedded
        again; relations and groups of known clients stay. Clients with equal rows of Ã share a
        model: that of the known clients among them, or the mean of the models of the related known
        clients, or that of the nearest known client.
        """
        known = (state.row != UNKNOWN).nonzero().flatten()
        clients = torch.cat([known, new]).sort().values
        is_new = torch.isin(clients, new)
        state = state.with_clients(new, state.cluster_ids[new], state.row[new], centres, counts)
        joined, related, nearest = relate_newcomers(
            state.centres[clients].numpy(),
            state.counts[clients].numpy(),
            is_new.numpy(),
            state.cluster_ids[clients].numpy(),
            self.manifold,
            self.distance,
            self.gamma if self.cut == "threshold" and self.clusters is None else None,
            seed,
            graph=self.aggregation == "graph",
            dim=self.manifold_dim,
        )
        rows, index, parent = extend_mixing(
            state.mixing,
            state.row,
            clients,
            is_new,
            torch.from_numpy(related),
            torch.from_numpy(nearest),
        )
        # Rows that only newcomers have start with the mean of the related known clients.
        only_new = torch.ones(len(rows), 1).index_fill(0, index[~is_new], 0.0)
        weights = torch.zeros(len(rows), len(state), dtype=torch.float64)
        by_client = rows[:, known] * only_new * fed.sizes[known].double()
        weights.index_add_(1, state.row[known], by_client)
        sums, weight = add_weighted_models({}, torch.zeros(len(rows)), weights, state.models)
        state = state.at_rows(parent)
        return replace(
            state,
            models=weighted_mean(sums, weight, fallback=state.models),
            cluster_ids=state.cluster_ids.index_copy(0, new, torch.from_numpy(joined)),
            row=state.row.index_copy(0, clients, index),
            mixing=rows,
        )

    def assign_models(self, state: FLTState, ids: Tensor) -> ModelAssignment:
        return ModelAssignment(state.models, state.row[ids])
