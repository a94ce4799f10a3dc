"""Client sampling: the cohort of each round, and the clients that are blocked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclade.core.rng import client_keys
from fedclade.errors import FedcladeError

_RANKED = 10_000  # clients that are all hashed to draw some of them


def blocked_clients(history: Sequence[Mapping[str, Any]], after: int) -> Tensor:
    """Ids of the clients that were rejected at least `after` times (0: none are blocked). They are
    read from the history, so that a resumed run knows them too.
    """
    rejections = Counter(
        failure["client"]
        for row in history
        for failure in row["failures"]
        if failure.get("rejected")
    )
    return torch.tensor(
        sorted(client for client, times in rejections.items() if 0 < after <= times),
        dtype=torch.int64,
    )


def exclude_blocked(
    drawn: Tensor, clients: int, history: Sequence[Mapping[str, Any]], after: int
) -> Tensor:
    """The clients of a cohort that are not blocked. If every client is blocked, the run ends:
    training diverges.
    """
    blocked = blocked_clients(history, after)
    if len(blocked) == clients:
        reason = next(
            failure["reason"]
            for row in reversed(history)
            for failure in reversed(row["failures"])
            if failure.get("rejected")
        )
        raise FedcladeError(
            f"after round {history[-1]['round']}: every client has been refused {after} times, the"
            f" last because {reason}. If training diverges, lower local.lr. Set"
            " run.max_rejections = 0 to continue anyway."
        )
    return drawn[~torch.isin(drawn, blocked)]


def cohort_of(key: int, clients: int, size: int) -> Tensor:
    """Ids of the clients of a round, in rising order: those with the smallest hashes or, for a
    small cohort of many clients, hashes as ids.
    """
    if clients <= _RANKED or size > clients // 2:
        everyone = np.arange(clients)
        # of equal hashes the smaller id comes first
        ranked: Any = (client_keys(key, everyone) << 31) | everyone
        return torch.from_numpy(np.sort(np.partition(ranked, size - 1)[:size] & ((1 << 31) - 1)))
    # some of these are equal, but not half of them
    drawn: Any = client_keys(key, np.arange(4 * size)) % clients
    first = np.sort(np.unique(drawn, return_index=True)[1])
    return torch.from_numpy(np.sort(drawn[first[:size]]))
