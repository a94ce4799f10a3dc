"""Metrics and number formatting that all parts of the report share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Metric:
    """The metric by which a page compares clients."""

    key: str
    label: str
    unit: str
    higher_is_better: bool

    def worst_tenth(self, values: Iterable[float | None]) -> float | None:
        """The mean of the worst tenth (number of clients rounded up), like `accuracy_worst10`."""
        known = sorted(
            (value for value in values if value is not None), reverse=not self.higher_is_better
        )
        return mean(known[: math.ceil(len(known) / 10)])

    def text(self, value: float) -> str:
        return f"{value:.1f} %" if self.unit else f"{value:.3g}"


ACCURACY = Metric("accuracy", "Accuracy", "%", True)
# A page shows the first of these that all runs have.
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
        return {str(key): short(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [short(item, digits) for item in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        rounded = float(f"{value:.{digits}g}")
        return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
    return value


def evenly(number: int, maximum: int) -> list[int]:
    """All of 0 … number − 1, or `maximum` of them, evenly spaced."""
    if number <= maximum:
        return list(range(number))
    return [place * number // maximum for place in range(maximum)]
