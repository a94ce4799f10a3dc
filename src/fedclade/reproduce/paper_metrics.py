"""What a cell of a table is read from: a number of a run's summary, or one that its history
gives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Numbers = Mapping[str, Any]
History = Sequence[Mapping[str, Any]]


def measure(metric: str, summary: Numbers, history: History) -> float | None:
    """The value of a metric; None where the run has none, such as the rounds to an accuracy that
    was never reached.

    "rounds_to 80": the first round evaluated with 80 % or more; "megabits_to 80": what had been
    sent until then, both ways, in 10⁶ bits; "accuracy_at 50": the accuracy of round 50; "most
    clusters": the most that there were in any round. Else a name of the summary.
    """
    name, _, argument = metric.partition(" ")
    if name == "rounds_to":
        return _first(history, float(argument))
    if name == "megabits_to":
        last = _first(history, float(argument))
        return (
            None
            if last is None
            else sum(row["bytes_up"] + row["bytes_down"] for row in history if row["round"] <= last)
            * 8e-6
        )
    if name == "accuracy_at":
        value = next(
            (row.get("accuracy") for row in history if row["round"] == int(argument)), None
        )
    elif metric == "most clusters":
        value = max(row["clusters"] for row in history)
    else:
        value = summary.get(metric)
    return None if value is None else float(value)


def _first(history: History, target: float) -> int | None:
    return next((row["round"] for row in history if (row.get("accuracy") or 0.0) >= target), None)
