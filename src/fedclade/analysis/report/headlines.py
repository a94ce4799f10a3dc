"""Title and headline of a page: its data, and the result in one or two sentences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedclade.analysis.report.load import Row, StoredRun
from fedclade.analysis.report.metric import ACCURACY, Metric
from fedclade.analysis.report.run_progress import Progress
from fedclade.analysis.report.verdict import short_verdict, verdict
from fedclade.analysis.significance import Differences

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


def title(
    runs: Sequence[StoredRun],
    diagnoses: Sequence[tuple[str, Row]],
    metric: Metric,
    differences: Differences | None,
    progress: Progress | None,
) -> str:
    """The data, the number of clients, and the verdict."""
    if not runs:
        about = diagnoses[0][1].get("about", {})
        data = Path(str(about.get("dataset") or diagnoses[0][0])).stem
        kind = diagnoses[0][1].get("kind")
        return f"{_with_clients(data, about.get('clients'))}: {kind or 'diagnosis'}"
    data = " and ".join(dict.fromkeys(run.data_name for run in runs))
    counts = {run.summary["clients"] for run in runs if run.summary is not None}
    place = _with_clients(data, counts.pop() if len(counts) == 1 else None)
    if progress is not None:
        if progress.runs > 1:
            return f"{place}: {progress.finished} of {progress.runs} runs finished"
        return f"{place}: {runs[0].method}, round {progress.round} of {progress.rounds}"
    if len(runs) == 1:
        score = runs[0].last.get(metric.key)
        result = "" if score is None else f", {metric.label.lower()} {metric.text(score)}"
        return f"{place}: {runs[0].method}{result}"
    if differences is None or differences.best is None:
        return f"{place}: {len(runs)} runs"
    return f"{place}: {short_verdict(differences)}"


def top(
    runs: Sequence[StoredRun],
    diagnoses: Sequence[tuple[str, Row]],
    metric: Metric,
    differences: Differences | None,
    progress: Progress | None,
) -> str:
    """The first sentences of a page: the verdict of a comparison, the result of a single run."""
    if not runs:
        content = diagnoses[0][1]
        return str(content.get("headline") or next(iter(content.get("sentences", ())), ""))
    if progress is not None and progress.runs > 1:
        return _so_far(runs, metric)
    if len(runs) == 1:
        return headline(runs[0], metric, runs)
    return verdict(differences) if differences is not None else ""


def _so_far(runs: Sequence[StoredRun], metric: Metric) -> str:
    """The leader of runs that are not all finished. Nothing is decided before the end."""
    known = [(run.name, score) for run in runs if (score := run.last.get(metric.key)) is not None]
    if not known:
        return "Nothing evaluated yet."
    first, best = sorted(known, key=lambda entry: entry[1], reverse=metric.higher_is_better)[0]
    return (
        f"So far {first} leads: {metric.label.lower()} {metric.text(best)}. The verdict follows"
        " when all runs are finished."
    )


def _with_clients(data: str, clients: int | None) -> str:
    return data if clients is None else f"{data}, {clients:,} clients"


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
