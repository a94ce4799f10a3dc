"""Who is asked in a round."""

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
    """Ids of the clients that were refused so often (0: nobody is); the history tells, so that a
    resumed run knows them too.
    """
    times = Counter(
        failure["client"]
        for row in history
        for failure in row["failures"]
        if failure.get("rejected")
    )
    return torch.tensor(
        sorted(client for client, number in times.items() if 0 < after <= number), dtype=torch.int64
    )


def exclude_blocked(
    drawn: Tensor, clients: int, history: Sequence[Mapping[str, Any]], after: int
) -> Tensor:
    """Those of a cohort that are not set aside. Where all clients are, something else is wrong, and
    the run ends.
    """
    aside = blocked_clients(history, after)
    if len(aside) == clients:
        why = next(
            failure["reason"]
            for row in reversed(history)
            for failure in reversed(row["failures"])
            if failure.get("rejected")
        )
        raise FedcladeError(
            f"after round {history[-1]['round']}: every client has been refused {after} times, the"
            f" last because {why}. Where training itself runs away, try a smaller local.lr;"
            " run.max_rejections = 0 goes on regardless."
        )
    return drawn[~torch.isin(drawn, aside)]


def cohort_of(key: int, clients: int, size: int) -> Tensor:
    """Ids of the clients of a round, in rising order: those with the least hashes or, where that
    would hash many for few, hashes as ids.
    """
    if clients <= _RANKED or size > clients // 2:
        everyone = np.arange(clients)
        ranked: Any = (
            client_keys(key, everyone) << 31
        ) | everyone  # of equal hashes the smaller id comes first
        return torch.from_numpy(np.sort(np.partition(ranked, size - 1)[:size] & ((1 << 31) - 1)))
    drawn: Any = (
        client_keys(key, np.arange(4 * size)) % clients
    )  # of so many some are equal, but not half of them
    first = np.sort(np.unique(drawn, return_index=True)[1])
    return torch.from_numpy(np.sort(drawn[first[:size]]))
