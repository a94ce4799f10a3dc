"""The state of methods whose clients send centers of their data: FLT, PCA+kM+HC."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.core.method_state import Features, State


@dataclass(frozen=True)
class CentroidState(State):
    """The models, and the centers by which clients are compared."""

    centres: Tensor  # (clients, k, e) the signatures
    counts: Tensor  # (clients,) the number of real centers among the k; 0 if unknown

    def with_num_clients(self, clients: int) -> Self:
        more = max(0, clients - len(self.counts))
        centres, counts = F.pad(self.centres, (0, 0, 0, 0, 0, more)), F.pad(self.counts, (0, more))
        return replace(super().with_num_clients(clients), centres=centres, counts=counts)

    def features(self) -> Features:
        real = torch.arange(self.centres.shape[1]) < self.counts[:, None]
        mean = (self.centres * real[..., None]).sum(1) / self.counts.clamp(min=1)[:, None]
        return Features("the mean of a client's centers", mean, self.counts > 0)
