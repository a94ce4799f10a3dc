"""The number of a table's cell: a number of the run's summary, or one computed from its history."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Numbers = Mapping[str, Any]
History = Sequence[Mapping[str, Any]]


def measure(metric: str, summary: Numbers, history: History) -> float | None:
    """The value of a metric; None if the run has none, such as the rounds to an accuracy that was
    never reached.

    Args:
        metric: "rounds_to 80", the first evaluated round with 80 % or more; "megabits_to 80", the
            traffic until then in both directions, in 10⁶ bits; "accuracy"; "rounds_to_tuned 80",
            "megabits_to_tuned 80" and "accuracy_tuned", the same after local training
            (`personal.layer`); "accuracy_at 50", the accuracy of round 50; "best_accuracy",
            the largest of all evaluated rounds, by test samples; "accuracy_of_last 10", the mean of
            the last ten evaluated rounds; "most clusters", the
            largest number in any round; "sample_accuracy" and "sample_accuracy_tuned", accuracies
            over all test samples; else a key of the summary.
        summary: the run's summary.
        history: the run's rounds.
    """
    name, _, argument = metric.partition(" ")
    if name in ("rounds_to", "rounds_to_tuned"):
        return _first(history, float(argument), name.endswith("_tuned"))
    if name in ("megabits_to", "megabits_to_tuned"):
        last = _first(history, float(argument), name.endswith("_tuned"))
        return (
            None
            if last is None
            else sum(row["bytes_up"] + row["bytes_down"] for row in history if row["round"] <= last)
            * 8e-6
        )
    if name == "accuracy_at":
        value = next(
            (_accuracy(row, False) for row in history if row["round"] == int(argument)), None
        )
    elif name in ("best_accuracy", "accuracy_of_last"):
        rounds = [known for row in history if (known := _accuracy(row, False)) is not None]
        if name == "best_accuracy":
            value = max(rounds, default=None)
        else:
            value = statistics.fmean(rounds[-int(argument) :]) if rounds else None
    elif metric in ("accuracy", "accuracy_tuned"):
        value = _accuracy(summary, name == "accuracy_tuned")
    elif metric == "most clusters":
        value = max(row["clusters"] for row in history)
    else:
        value = summary.get(metric)
    return None if value is None else float(value)


def metric_text(metric: str) -> str:
    """A metric in words, with its unit."""
    name, _, argument = metric.partition(" ")
    texts = {
        "accuracy": "accuracy, %",
        "accuracy_tuned": "accuracy after local training, %",
        "sample_accuracy": "accuracy over all test samples, %",
        "sample_accuracy_tuned": "accuracy over all test samples after local training, %",
        "train_accuracy": "accuracy on training data, %",
        "accuracy_variance": "variance of accuracy over clients, %²",
        "train_accuracy_variance": "variance of training accuracy over clients, %²",
        "rounds_to": f"rounds to {argument} %",
        "megabits_to": f"megabits to {argument} %",
        "rounds_to_tuned": f"rounds to {argument} % after local training",
        "megabits_to_tuned": f"megabits to {argument} % after local training",
        "accuracy_stderr": "binomial standard error of the accuracy, %",
        "accuracy_at": f"accuracy in round {argument}, %",
        "best_accuracy": "accuracy of the round that is best on the test samples, %",
        "accuracy_of_last": f"mean accuracy of the last {argument} rounds, %",
    }
    return texts.get(name, metric)


def _first(history: History, target: float, is_tuned: bool) -> int | None:
    return next(
        (row["round"] for row in history if (_accuracy(row, is_tuned) or 0.0) >= target), None
    )


def _accuracy(numbers: Numbers, is_tuned: bool) -> float | None:
    """The accuracy before or after local training; None if it was not measured. `accuracy` is that
    after it where `accuracy_shared` is there too.
    """
    before: float | None = numbers.get("accuracy_shared", numbers.get("accuracy"))
    if not is_tuned:
        return before
    return numbers.get("accuracy") if "accuracy_shared" in numbers else None
