"""The headline: what came out, in a sentence that needs no figure."""

from __future__ import annotations

from collections.abc import Sequence

from fedclade.analysis.report.load import StoredRun
from fedclade.analysis.report.metric import ACCURACY, Metric

# How often a run is looked at and saved changes nothing in it.
_FREE = {"run": ("eval_every", "checkpoint_every", "fine_tune_epochs")}
_SAME = ("data", "partition", "model", "local", "run")


def headline(run: StoredRun, metric: Metric, others: Sequence[StoredRun]) -> str:
    """Groups, then what they are worth: against FedAvg where it ran under the same conditions, else
    as they stand.
    """
    score = run.last.get(metric.key)
    parts = [_groups(run)]
    base = next((other for other in others if _is_baseline(other, run)), None)
    if score is None:
        parts.append("nothing evaluated yet" if run.summary is None else "no client has test data")
    elif base is not None and metric == ACCURACY:
        gain, worst = (
            score - base.last["accuracy"],
            run.last["accuracy_worst10"] - base.last["accuracy_worst10"],
        )
        verb = "" if (gain >= 0) == (worst >= 0) else f"{_verb(worst)} "
        parts.append(
            f"the mean client {_verb(gain)} {abs(gain):.1f} points over FedAvg, the worst tenth"
            f" {verb}{abs(worst):.1f}"
        )
    else:
        worst_tenth = run.last.get("accuracy_worst10") if metric == ACCURACY else None
        tail = f", the worst tenth {metric.said(worst_tenth)}" if worst_tenth is not None else ""
        parts.append(f"the mean client has {_article(metric)} of {metric.said(score)}{tail}")
    return "; ".join(parts) + "."


def overall(labels: Sequence[tuple[str, float | None]], metric: Metric) -> str:
    """Of several: which is best."""
    known = [(label, value) for label, value in labels if value is not None]
    if len(known) < 2:
        return f"{len(labels)} runs beside each other."
    best = sorted(known, key=lambda one: one[1], reverse=metric.higher_is_better)
    (first, top), (second, next_best) = best[:2]
    return (
        f"Of the {len(known)} compared, {first} is best for the mean client: {metric.label.lower()}"
        f" {metric.said(top)}; next is {second} with {metric.said(next_best)}."
    )


def progress(run: StoredRun) -> str | None:
    """How far a run is that has not ended; None for one that has."""
    if run.summary is not None:
        return None
    done, wanted = (run.rounds[-1]["round"] if run.rounds else 0), run.tables["run"]["rounds"]
    return f"Round {done} of {wanted}: the run has not ended."


def _groups(run: StoredRun) -> str:
    count = (
        run.summary["clusters"]
        if run.summary
        else run.rounds[-1]["clusters"]
        if run.rounds
        else None
    )
    if count is None:
        return "No round has ended yet"
    clients = run.summary["clients"] if run.summary else None
    if count == 1:
        return "One model for all clients"
    if count == clients:
        return "Every client has a model of its own"
    return f"{count:,} groups {'found' if run.summary else 'so far'}"


def _verb(points: float) -> str:
    return "gains" if points >= 0 else "loses"


def _article(metric: Metric) -> str:
    name = metric.label.lower()
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _is_baseline(other: StoredRun, run: StoredRun) -> bool:
    evaluated = other.last.get("accuracy") is not None
    return other.method == "fedavg" and run.method != "fedavg" and evaluated and alike(other, run)


def alike(one: StoredRun, two: StoredRun) -> bool:
    """Whether two runs differ in their method only."""
    return all(_settled(one, table) == _settled(two, table) for table in _SAME)


def _settled(run: StoredRun, table: str) -> dict[str, object]:
    return {
        key: value
        for key, value in run.tables.get(table, {}).items()
        if key not in _FREE.get(table, ())
    }
