"""PCA+kM+HC: clients are related when the centres of their data, projected on principal components,
are near each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.clustering.flt import nearest
from fedclade.clustering.linkage import cut_number, linkage
from fedclade.clustering.set_distances import MOST, distances
from fedclade.core.federation import Federation
from fedclade.core.pytree import Tree, stack, tree_index
from fedclade.core.state import UNKNOWN, State
from fedclade.errors import InvalidInputError, require_int
from fedclade.methods._centroid_state import CentredState
from fedclade.methods.base import Groups, Method, Needs, check_choices
from fedclade.methods.fedavg import fedavg_round
from fedclade.methods.requirements import NeedsProbe
from fedclade.programs.pca_signature import flat, pca_signature, principal_axes
from fedclade.programs.sgd import sgd


@dataclass(frozen=True)
class PCAHCState(CentredState):
    """Beside the groups' models and the centres: what a late client projects on."""

    basis: Tree  # mean and axes that all clients project on; empty where each has its own


@dataclass(frozen=True)
class PCAHC(NeedsProbe, Method[PCAHCState]):
    """FLT's baseline: PCA and k-means at the client, hierarchical clustering at the server, no
    encoder.

    Once, before training, each client projects its samples on their first principal components
    (`components`, e in FLT) and sends the `k` centres of the projections. The distance of two
    clients is that of the best matching of their centres, as in FLT; Ward's tree of these distances
    is cut into C groups (`clusters`). Then FedAvg runs inside each group. Who missed the one-off
    phase joins the group of the known client whose signature is nearest.

    basis: "own", as in FLT: each client centres its samples and fits the axes by itself, so that no
    two clients' coordinates mean the same, and their means are lost. "shared": the server fits mean
    and axes on the probe data and sends them to all.
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
        "once, in clear, k centres of `components` numbers (5 × 128 by default) and their count; "
        "then the trained weights, once a round, of which only weighted sums are needed"
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
        for name, most in (("clusters", None), ("k", MOST), ("components", None)):
            require_int(f"method.{name}", getattr(self, name), 1, most)

    def init(self, fed: Federation, params: Tree, key: int) -> PCAHCState:
        everyone = torch.arange(len(fed.sizes))
        centres = torch.zeros(len(everyone), self.k, self.components)
        nobody, none = torch.full_like(everyone, UNKNOWN), torch.zeros_like(everyone)
        state = PCAHCState(stack([params]), nobody, centres, none, self._basis())
        return self.add_clients(fed, state, everyone, key)

    def _basis(self) -> Tree:
        if self.basis == "own":
            return {}
        if self.probe is None:
            raise InvalidInputError(
                "method.basis = 'shared': the server needs probe data to fit it; set some apart"
                " with partition(…, probe=n), or give inputs of your own, PCAHC(probe=array)."
            )
        return principal_axes(flat(self.probe), self.components)

    def round(self, fed: Federation, state: PCAHCState, cohort: Tensor, key: int) -> PCAHCState:
        return fedavg_round(fed, sgd(self.local), state, cohort, key)

    def add_clients(self, fed: Federation, state: PCAHCState, ids: Tensor, key: int) -> PCAHCState:
        """A newcomer joins the group of the known client nearest to it. Where nobody is known yet,
        those who answer are clustered.
        """
        state = state.with_num_clients(len(fed.sizes))
        got = fed.map(
            pca_signature(self.k, self.components),
            ids.sort().values,
            broadcast=state.basis,
            key=key,
        )
        if not len(got.ids):
            return state
        centres, counts = got.outputs["centres"].cpu(), got.outputs["count"].cpu().clamp(1, self.k)
        known = (state.cluster_ids != UNKNOWN).nonzero().flatten()
        if len(known):
            there = (state.centres[known].numpy(), state.counts[known].numpy())
            cluster = state.cluster_ids[
                known[
                    torch.from_numpy(nearest(centres.numpy(), counts.numpy(), *there, "matching"))
                ]
            ]
        else:
            tree = linkage(distances(centres.numpy(), counts.numpy()), "ward")
            cluster = torch.from_numpy(cut_number(tree, min(self.clusters, len(counts))))
            state = replace(
                state,
                models=tree_index(
                    state.models, torch.zeros(int(cluster.max()) + 1, dtype=torch.int64)
                ),
            )
        told = {"cluster_ids": cluster, "centres": centres, "counts": counts}
        return replace(
            state,
            **{
                name: getattr(state, name).index_copy(0, got.ids, value)
                for name, value in told.items()
            },
        )
