"""PCA+kM+HC: groups by the k-means centers of each client's data in principal components."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.clustering.flt import nearest_signature
from fedclade.clustering.linkage import cut_number, linkage
from fedclade.clustering.set_distances import MAX_MATCHING_POINTS, distances
from fedclade.core.federation import Federation
from fedclade.core.inputs import flat_numbers
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.pytree import Tree, stack, tree_index
from fedclade.errors import InvalidInputError, require_int
from fedclade.methods._data_centroids_state import CentroidState
from fedclade.methods.base import Groups, Method, Needs, check_choices
from fedclade.methods.fedavg import fedavg_round
from fedclade.methods.required_context import NeedsProbe
from fedclade.programs.pca_centroid_signature import pca_basis, pca_signature


@dataclass(frozen=True)
class PCAHCState(CentroidState):
    """The groups' models, the clients' centers, and the basis for late clients."""

    basis: Tree  # mean and axes that all clients project on; empty if each has its own


@dataclass(frozen=True)
class PCAHC(NeedsProbe, Method[PCAHCState]):
    """The baseline of FLT: PCA and k-means at the client, hierarchical clustering at the server, no
    encoder.

    Once, before training, each client projects its samples on their first principal components and
    sends the k centers of the projections. The distance of two clients is that of the best matching
    of their centers, as in FLT. Ward's tree of these distances is cut into C groups. Then FedAvg
    runs inside each group. A client that missed the one-off phase joins the group of the known
    client with the nearest signature.

    Args:
        clusters: C.
        k: the number of centers of a client.
        components: the number of principal components; e in FLT.
        basis: "own", as in FLT: each client fits mean and axes to its own samples, so the
            coordinates of two clients are not comparable, and the means are lost. "shared": the
            server fits mean and axes to the probe data and sends them to all clients.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.PCAHC(clusters=2), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> result.summary["clusters"]
        2
    """

    name: ClassVar[str] = "pca_hc"
    title: ClassVar[str] = (
        "PCA+kM+HC: clients whose data have similar principal components share a model"
    )
    paper: ClassVar[str] = (
        "a baseline in Jamali-Rad et al., Federated Learning with Taskonomy for Non-IID Data, arXiv"
        " 2103.15947"
    )
    client_disclosure: ClassVar[str] = (
        "once, in clear, k centers of `components` numbers (5 × 128 by default) and their count;"
        " then once a round the trained weights, of which the server needs only weighted sums"
    )
    server_visibility: ClassVar[Needs] = "signatures"
    groups: ClassVar[Groups] = "given"
    extra_traffic: ClassVar[str] = (
        "once k × components numbers and their count up; with basis='shared' components + 1 vectors"
        " of an input's size down"
    )
    state: ClassVar[type[State]] = PCAHCState

    clusters: int = 5
    k: int = 5
    components: int = 128
    basis: Literal["own", "shared"] = "own"

    def __post_init__(self) -> None:
        check_choices(self)
        for name, most in (("clusters", None), ("k", MAX_MATCHING_POINTS), ("components", None)):
            require_int(f"method.{name}", getattr(self, name), 1, most)

    @property
    def needs_probe_samples(self) -> bool:
        return self.basis == "shared" and super().needs_probe_samples

    def init(self, fed: Federation, params: Tree, key: int) -> PCAHCState:
        everyone = torch.arange(len(fed.sizes))
        centres = torch.zeros(len(everyone), self.k, self.components)
        unknown, zeros = torch.full_like(everyone, UNKNOWN), torch.zeros_like(everyone)
        state = PCAHCState(stack([params]), unknown, centres, zeros, self._basis())
        return self.add_clients(fed, state, everyone, key)

    def _basis(self) -> Tree:
        if self.basis == "own":
            return {}
        if self.probe is None:
            raise InvalidInputError(
                "method.basis = 'shared': the server needs probe data to fit the basis. Set samples"
                " apart with partition(…, probe=n) or clients.with_probe(0.05), or use"
                " PCAHC(probe=array).",
                "method.basis",
            )
        return pca_basis(flat_numbers(self.probe, self.name), self.components)

    def round(self, fed: Federation, state: PCAHCState, cohort: Tensor, key: int) -> PCAHCState:
        return fedavg_round(fed, sgd(self.local), state, cohort, key)

    def add_clients(self, fed: Federation, state: PCAHCState, ids: Tensor, key: int) -> PCAHCState:
        """A new client joins the group of the nearest known client. If no client is known yet,
        those that reply are clustered.
        """
        state = state.with_num_clients(len(fed.sizes))
        replies = fed.map(
            pca_signature(self.k, self.components),
            ids.sort().values,
            broadcast=state.basis,
            key=key,
        )
        if not len(replies.ids):
            return state
        centres = replies.outputs["centres"].cpu()
        counts = replies.outputs["count"].cpu().clamp(1, self.k)
        known = (state.cluster_ids != UNKNOWN).nonzero().flatten()
        if len(known):
            signatures = (state.centres[known].numpy(), state.counts[known].numpy())
            nearest = nearest_signature(centres.numpy(), counts.numpy(), *signatures, "matching")
            cluster = state.cluster_ids[known[torch.from_numpy(nearest)]]
        else:
            tree = linkage(distances(centres.numpy(), counts.numpy()), "ward")
            cluster = torch.from_numpy(cut_number(tree, min(self.clusters, len(counts))))
            state = replace(
                state,
                models=tree_index(
                    state.models, torch.zeros(int(cluster.max()) + 1, dtype=torch.int64)
                ),
            )
        updated = {"cluster_ids": cluster, "centres": centres, "counts": counts}
        return replace(
            state,
            **{
                name: getattr(state, name).index_copy(0, replies.ids, value)
                for name, value in updated.items()
            },
        )
