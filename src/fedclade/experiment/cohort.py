"""Who is asked in a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclade.client.keys import client_keys

_RANKED = 10_000  # clients that are all hashed to draw some of them


def cohort_of(key: int, clients: int, size: int) -> Tensor:
    """Ids of the clients of a round, in rising order: those with the least hashes or, where that would hash many for few, hashes as ids."""
    if clients <= _RANKED or size > clients // 2:
        everyone = np.arange(clients)
        ranked: Any = (client_keys(key, everyone) << 31) | everyone  # of equal hashes the smaller id comes first
        return torch.from_numpy(np.sort(np.partition(ranked, size - 1)[:size] & ((1 << 31) - 1)))
    drawn: Any = client_keys(key, np.arange(4 * size)) % clients  # of so many some are equal, but not half of them
    first = np.sort(np.unique(drawn, return_index=True)[1])
    return torch.from_numpy(np.sort(drawn[first[:size]]))
