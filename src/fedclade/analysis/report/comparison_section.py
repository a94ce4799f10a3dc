"""The comparison of several runs: a row and a curve for each setting, over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fedclade.analysis.clients_hurt import BASELINES, shares_hurt
from fedclade.analysis.report.load import StoredRun
from fedclade.analysis.report.metric import Metric, mean, short
from fedclade.analysis.significance import Measured
from fedclade.training.metrics import own_names

_AVERAGED = ("clusters", "ari", "bytes_up", "bytes_down", "seconds", "failures")


def compared(runs: Sequence[StoredRun], metric: Metric) -> list[dict[str, Any]]:
    """A row for each title, in the order of the runs."""
    by_title: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_title.setdefault(run.title, []).append(run)
    hurt = shares_hurt(
        [
            Measured(
                run.title,
                run.summary["seed"],
                (run.tables.get("data"), run.tables.get("partition")),
                run.summary,
                run.clients,
            )
            for run in runs
            if run.summary is not None and run.clients is not None
        ]
    )
    return [
        {
            **_row(title, title_runs, metric),
            **{
                f"hurt_{baseline}": short(hurt.get(baseline, {}).get(title), 6)
                for baseline in BASELINES
            },
        }
        for title, title_runs in by_title.items()
    ]


def _row(title: str, runs: Sequence[StoredRun], metric: Metric) -> dict[str, Any]:
    scores = [score for run in runs if (score := run.last.get(metric.key)) is not None]
    worst = [value for run in runs if (value := _worst(run, metric)) is not None]
    row: dict[str, Any] = {
        "label": title,
        "runs": [run.name for run in runs],
        "ended": all(run.summary is not None for run in runs),
        "score": mean(scores),
        "stderr": _mean_of(runs, f"{metric.key}_stderr"),
        "spread": statistics.stdev(scores) if len(scores) > 1 else None,
        "worst": mean(worst),
        "variance": _mean_of(runs, f"{metric.key}_variance"),
        "validation": _mean_of(runs, f"validation_{metric.key}"),
        "own": {
            name: _mean_of(runs, name)
            for name in dict.fromkeys(name for run in runs for name in own_names(run.last))
        },
        "curve": _curve(runs, metric),
    }
    for key in _AVERAGED:
        row[key] = mean(
            [
                value
                for run in runs
                if run.summary is not None and (value := run.summary.get(key)) is not None
            ]
        )
    return dict(short(row, 6))


def _mean_of(runs: Sequence[StoredRun], name: str) -> float | None:
    return mean([value for run in runs if (value := run.last.get(name)) is not None])


def _worst(run: StoredRun, metric: Metric) -> float | None:
    reported = run.last.get(f"{metric.key}_worst10")
    if reported is not None or run.clients is None or metric.key not in run.clients:
        return reported
    return metric.worst_tenth(run.clients[metric.key])


def _curve(runs: Sequence[StoredRun], metric: Metric) -> list[list[float]]:
    """[round, mean, minimum, maximum] over the seeds, for rounds in which all were evaluated."""
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for row in run.rounds:
            if row.get(metric.key) is not None:
                by_round.setdefault(row["round"], []).append(row[metric.key])
    complete = {
        number: values for number, values in sorted(by_round.items()) if len(values) == len(runs)
    }
    return [
        [number, statistics.fmean(values), min(values), max(values)]
        for number, values in complete.items()
    ]
