"""The state of FLT."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch.nn.functional as F
from torch import Tensor

from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.methods._data_centroids_state import CentroidState


@dataclass(frozen=True)
class FLTState(CentroidState):
    """The models (one per distinct row of Ã, not per client) and clusters, how models are mixed,
    and the data that places a late client.
    """

    row: Tensor  # (clients,) the model of each client
    mixing: Tensor  # (models, clients) the distinct rows of Ã
    encoder: Tree  # its weights at the end of the one-off phase

    def with_num_clients(self, clients: int) -> Self:
        more = max(0, clients - len(self.row))
        return replace(
            super().with_num_clients(clients),
            row=F.pad(self.row, (0, more), value=UNKNOWN),
            mixing=F.pad(self.mixing, (0, more)),
        )

    def with_clients(
        self, ids: Tensor, cluster_ids: Tensor, row: Tensor, centres: Tensor, counts: Tensor
    ) -> Self:
        """The state with these entries for some clients."""
        return replace(
            self,
            cluster_ids=self.cluster_ids.index_copy(0, ids, cluster_ids),
            row=self.row.index_copy(0, ids, row),
            centres=self.centres.index_copy(0, ids, centres),
            counts=self.counts.index_copy(0, ids, counts),
        )
