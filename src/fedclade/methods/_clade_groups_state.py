"""The state of CladeGroups."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedclade.clustering.clade import assign_new, scatter_with_noise, whitening_matrix
from fedclade.core.federation import ClientResults
from fedclade.core.method_state import UNKNOWN, Features, State
from fedclade.core.pytree import Tree


@dataclass(frozen=True)
class CladeGroupsState(State):
    """The groups' models, and what is needed to assign a late client."""

    start: Tree  # (1, …) the model at which signatures are taken
    signature_key: Tensor  # () the randomness of their projection
    signature: Tensor  # (clients, e); zeros if not known
    whitener: Tensor  # (e, e)
    rounds: Tensor  # () the number of rounds so far
    # with late = "features" the "signature" of kind "features" and its "whitener"
    inputs: Tree = field(default_factory=dict, kw_only=True)

    def with_num_clients(self, clients: int) -> Self:
        more = (0, 0, 0, max(0, clients - len(self.signature)))
        inputs = dict(self.inputs)
        if inputs:
            inputs["signature"] = F.pad(inputs["signature"], more)
        return replace(
            super().with_num_clients(clients), signature=F.pad(self.signature, more), inputs=inputs
        )

    def with_late(self, replies: ClientResults, sizes: Tensor, by_inputs: bool) -> Self:
        """The state in which the clients that replied with signatures have a cluster.

        Args:
            replies: their signatures.
            sizes: (clients,) the numbers of samples.
            by_inputs: whether the signatures are of kind "features", as those in `inputs`.
        """
        own = self.inputs if by_inputs else {"signature": self.signature, "whitener": self.whitener}
        means = replies.outputs["mean"].double().cpu()
        signatures = own["signature"].index_copy(0, replies.ids, means)
        z, n = (signatures @ own["whitener"]).numpy(), sizes.double().numpy()
        is_old = (self.cluster_ids != UNKNOWN) & own["signature"].any(1)
        old, new = np.flatnonzero(is_old), replies.ids.numpy()
        known = self.cluster_ids.numpy()[old]
        groups = assign_new(
            z[new], n[new], z[old], n[old], known, max(1, 1 + int(known.max(initial=0)))
        )
        clusters = self.cluster_ids.index_copy(0, replies.ids, torch.from_numpy(groups))
        if by_inputs:
            return replace(self, cluster_ids=clusters, inputs={**own, "signature": signatures})
        return replace(self, cluster_ids=clusters, signature=signatures)

    def features(self) -> Features:
        return Features(
            "whitened signatures", self.signature @ self.whitener, self.signature.any(1)
        )

    @staticmethod
    def signatures_of(
        replies: ClientResults,
        scatter: NDArray[np.float64],
        sizes: Tensor,
        dimensions: int,
        variance: float,
    ) -> Tree:
        """The `signature` (clients, e) of each client, zeros without a reply, and the `whitener`.

        Args:
            replies: the means of the clients that replied, of at least one.
            scatter: (1, e, e) the sum of their scatter matrices.
            sizes: (clients,) the numbers of samples.
            dimensions: e.
            variance: of the noise in signatures, see `scatter_with_noise`.
        """
        signatures = torch.zeros(len(sizes), dimensions, dtype=torch.float64)
        signatures[replies.ids] = replies.outputs["mean"].double().cpu()
        n = sizes[replies.ids].double().numpy()
        within = scatter_with_noise(scatter, n, variance)[0]
        whitener = whitening_matrix(within, max(1.0, n.sum() - len(n)))
        return {"signature": signatures, "whitener": torch.from_numpy(whitener)}
