"""Early stopping: the evaluations since the lowest loss on validation data."""

from __future__ import annotations

from collections.abc import Sequence

from fedclade.io.schemas import RoundRecord


def is_better(loss: float | None, best: float | None) -> bool:
    """Whether a mean loss on validation data is lower than the best one so far. None: the loss is
    not finite, or there is none.
    """
    return loss is not None and (best is None or loss < best)


def is_exhausted(history: Sequence[RoundRecord], patience: int) -> bool:
    """Whether the last `patience` evaluations had no lower mean loss on validation data than the
    evaluations before them. `patience` 0 means never.
    """
    if patience == 0:
        return False
    best: float | None = None
    without_gain = 0
    for row in history:
        if "validation_loss" not in row:
            continue
        if is_better(row["validation_loss"], best):
            best, without_gain = row["validation_loss"], 0
        else:
            without_gain += 1
    return without_gain >= patience
