"""The headline: the result of a run in one sentence."""

from __future__ import annotations

from collections.abc import Sequence

from fedclade.analysis.report.load import StoredRun
from fedclade.analysis.report.metric import ACCURACY, Metric

# Settings that do not change the training.
_IGNORED = {"run": ("eval_every", "checkpoint_every", "metrics"), "personal": ("every",)}
_COMPARED_TABLES = ("data", "partition", "model", "local", "run", "personal")


def headline(run: StoredRun, metric: Metric, others: Sequence[StoredRun]) -> str:
    """The number of groups, and the score: relative to FedAvg if a run of it differs only in the
    method, else the score itself.
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
        tail = f", the worst tenth {metric.text(worst_tenth)}" if worst_tenth is not None else ""
        parts.append(f"the mean client has {_article(metric)} of {metric.text(score)}{tail}")
    return "; ".join(parts) + "."


def overall(labels: Sequence[tuple[str, float | None]], metric: Metric) -> str:
    """Which of several runs is best."""
    known = [(label, value) for label, value in labels if value is not None]
    if len(known) < 2:
        return f"{len(labels)} runs."
    best = sorted(known, key=lambda entry: entry[1], reverse=metric.higher_is_better)
    (first, top), (second, next_best) = best[:2]
    return (
        f"Of the {len(known)} compared, {first} is best for the mean client: {metric.label.lower()}"
        f" {metric.text(top)}; next is {second} with {metric.text(next_best)}."
    )


def progress(run: StoredRun) -> str | None:
    """The current round of an unfinished run; None for a finished run."""
    if run.summary is not None:
        return None
    done, rounds = (run.rounds[-1]["round"] if run.rounds else 0), run.tables["run"]["rounds"]
    return f"Round {done} of {rounds}: the run is not finished."


def _groups(run: StoredRun) -> str:
    count = (
        run.summary["clusters"]
        if run.summary
        else run.rounds[-1]["clusters"]
        if run.rounds
        else None
    )
    if count is None:
        return "No round is finished yet"
    clients = run.summary["clients"] if run.summary else None
    if count == 1:
        return "One model for all clients"
    if count == clients:
        return "A separate model for each client"
    return f"{count:,} groups {'found' if run.summary else 'so far'}"


def _verb(points: float) -> str:
    return "gains" if points >= 0 else "loses"


def _article(metric: Metric) -> str:
    name = metric.label.lower()
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _is_baseline(other: StoredRun, run: StoredRun) -> bool:
    evaluated = other.last.get("accuracy") is not None
    return other.method == "fedavg" and run.method != "fedavg" and evaluated and alike(other, run)


def alike(first: StoredRun, second: StoredRun) -> bool:
    """Whether two runs differ only in their method."""
    return all(_settings(first, table) == _settings(second, table) for table in _COMPARED_TABLES)


def _settings(run: StoredRun, table: str) -> dict[str, object]:
    return {
        key: value
        for key, value in run.tables.get(table, {}).items()
        if key not in _IGNORED.get(table, ())
    }
