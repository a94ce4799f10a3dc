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

_RANKED = 10_000  # up to this number, all clients are hashed to draw a cohort


def blocked_clients(history: Sequence[Mapping[str, Any]], after: int) -> Tensor:
    """The ids of the blocked clients. They follow from the history, so that a resumed run blocks
    the same clients.

    Args:
        history: the rounds so far.
        after: the number of rejections that blocks a client; 0 to block none.
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
    """The clients of a cohort that are not blocked. If every client is blocked, training diverges
    and the run ends with an error.

    Args:
        drawn: the ids of the cohort.
        clients: the number of all clients.
        history: the rounds so far.
        after: the number of rejections that blocks a client; 0 to block none.
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
            f"after round {history[-1]['round']}: the replies of every client were rejected"
            f" {after} times; the last reason: {reason}. If training diverges, lower local.lr. Set"
            " run.max_rejections = 0 to continue anyway.",
            "run.max_rejections",
        )
    return drawn[~torch.isin(drawn, blocked)]


def cohort_of(key: int, clients: int, size: int) -> Tensor:
    """The ids of the clients of a round, in ascending order: the clients with the smallest hashes
    or, for a small cohort of many clients, hashes used as ids.

    Args:
        key: the random key of the round.
        clients: the number of all clients.
        size: the number of clients in the cohort.
    """
    if clients <= _RANKED or size > clients // 2:
        everyone = np.arange(clients)
        # Of equal hashes, the smaller id is first.
        ranked: Any = (client_keys(key, everyone) << 31) | everyone
        return torch.from_numpy(np.sort(np.partition(ranked, size - 1)[:size] & ((1 << 31) - 1)))
    # Some of these are equal, but fewer than half.
    drawn: Any = client_keys(key, np.arange(4 * size)) % clients
    first = np.sort(np.unique(drawn, return_index=True)[1])
    return torch.from_numpy(np.sort(drawn[first[:size]]))
