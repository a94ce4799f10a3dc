"""Small numbers work that all parts of the report share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """What a page measures clients by."""

    key: str
    label: str
    unit: str
    higher_is_better: bool

    def worst_tenth(self, values: Iterable[float | None]) -> float | None:
        """The mean of the worst tenth, rounded up, as `accuracy_worst10` has it."""
        known = sorted(
            (value for value in values if value is not None), reverse=not self.higher_is_better
        )
        return mean(known[: math.ceil(len(known) / 10)])

    def said(self, value: float) -> str:
        return f"{value:.1f} %" if self.unit else f"{value:.3g}"


ACCURACY = Metric("accuracy", "Accuracy", "%", True)
# In this order: the first that all runs have is what the page shows.
METRICS = (
    ACCURACY,
    Metric("perplexity", "Perplexity", "", False),
    Metric("loss", "Loss", "", False),
)


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def short(value: Any, digits: int = 5) -> Any:
    """JSON with numbers rounded to significant digits; None for a number that is not finite."""
    if isinstance(value, dict):
        return {str(key): short(each, digits) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [short(each, digits) for each in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        cut = float(f"{value:.{digits}g}")
        return int(cut) if cut.is_integer() and abs(cut) < 1e15 else cut
    return value


def evenly(number: int, most: int) -> list[int]:
    """All of 0 … number − 1, or `most` of them, evenly spread."""
    return (
        list(range(number)) if number <= most else [place * number // most for place in range(most)]
    )
