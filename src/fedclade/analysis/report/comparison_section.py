"""The comparison of several runs: a row and a curve for each setting, over its seeds, the best
first; and which differences are real.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fedclade.analysis.clients_hurt import BASELINES, shares_hurt
from fedclade.analysis.report.figure_descriptions import (
    Figure,
    axis,
    color_of_rank,
    dots,
    lines,
    series,
)
from fedclade.analysis.report.load import StoredRun
from fedclade.analysis.report.metric import Metric, mean, short
from fedclade.analysis.significance import Differences, Measured, Pair, differences
from fedclade.training.metrics import own_names

_AVERAGED = ("clusters", "ari", "bytes_up", "bytes_down", "seconds", "failures")


def compared(runs: Sequence[StoredRun], metric: Metric) -> list[dict[str, Any]]:
    """A row for each title, the best first; titles without a result keep their order."""
    by_title: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_title.setdefault(run.title, []).append(run)
    hurt = shares_hurt(_measured(runs))
    rows = [
        {
            **_row(title, title_runs, metric),
            **{
                f"hurt_{baseline}": short(hurt.get(baseline, {}).get(title), 6)
                for baseline in BASELINES
            },
        }
        for title, title_runs in by_title.items()
    ]
    rows.sort(key=lambda row: _rank(row["score"], metric))
    return [row | {"color": color_of_rank(rank, len(rows))} for rank, row in enumerate(rows)]


def _rank(score: float | None, metric: Metric) -> tuple[bool, float]:
    if score is None:
        return True, 0.0
    return False, -score if metric.higher_is_better else score


def tested(runs: Sequence[StoredRun]) -> Differences | None:
    """Which differences between the finished settings are real; None for fewer than two."""
    measured = _measured(runs)
    if len({run.title for run in measured}) < 2:
        return None
    return differences(measured)


def _measured(runs: Sequence[StoredRun]) -> list[Measured]:
    return [
        Measured(
            run.title,
            run.tables["run"].get("seed", 0),
            (run.tables.get("data"), run.tables.get("partition"), len(run.clients["client"])),
            run.summary,
            run.clients,
        )
        for run in runs
        if run.summary is not None and run.clients is not None
    ]


def typical_run(rows: Sequence[dict[str, Any]], runs: Sequence[StoredRun], metric: Metric) -> str:
    """The run to open first: of the best setting, the seed that is nearest to its mean."""
    best, by_name = rows[0], {run.name: run for run in runs}
    scores = {name: by_name[name].last.get(metric.key) for name in best["runs"]}
    known = {name: score for name, score in scores.items() if score is not None}
    if not known:
        return str(best["runs"][0])
    return str(min(known, key=lambda name: abs(known[name] - best["score"])))


def pair_rows(found: Differences) -> list[dict[str, Any]]:
    """All pairs for a table, those with the best setting first."""
    names = ("first", "second", "difference", "half_width", "p_holm", "gain", "lose", "verdict")
    return [short({name: getattr(pair, name) for name in names}, 6) for pair in found.pairs]


def forest(found: Differences, rows: Sequence[dict[str, Any]]) -> Figure | None:
    """The difference of each setting from the best one, with its interval."""
    if found.best is None:
        return None
    unit = "points" if found.measure == "accuracy" else "loss"
    colors = {row["label"]: row["color"] for row in rows}
    drawn = [_forest_row(pair, colors) for pair in found.pairs if pair.first == found.best]
    interval = ", with its 95 % interval" if len(found.seeds) > 1 else ""
    return dots(
        f"Difference of each setting from {found.best}{interval}",
        {"label": f"Difference from {found.best} ({unit})", "unit": ""},
        drawn,
        [(0.0, found.best)],
    )


def _forest_row(pair: Pair, colors: dict[str, int]) -> dict[str, Any]:
    value = -pair.difference
    row: dict[str, Any] = {"name": pair.second, "color": colors[pair.second], "value": value}
    if pair.half_width is not None:
        row |= {"low": value - pair.half_width, "high": value + pair.half_width}
    return row | {"note": "worse" if pair.verdict == "real" else pair.verdict}


def curves(rows: Sequence[dict[str, Any]], metric: Metric) -> Figure | None:
    """A curve for each setting, and one for each run that is not finished."""
    drawn = []
    for row in rows:
        points = [point[:2] for point in row["curve"]]
        band = [[number, low, high] for number, _, low, high in row["curve"]]
        several = len(row["runs"]) > 1
        drawn.append(series(row["label"], row["color"], points, band=band if several else None))
        drawn += [
            series(f"{name}, not finished", row["color"], points, dashed=True)
            for name, points in row["running"].items()
        ]
    return lines(f"{metric.label} of the mean client by round, all runs", axis(metric), drawn)


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
        "curve": _curve([run for run in runs if run.summary is not None], metric),
        "running": {
            run.name: _points(run, metric) for run in runs if run.summary is None and run.rounds
        },
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
        for number, value in _points(run, metric):
            by_round.setdefault(int(number), []).append(value)
    complete = {
        number: values for number, values in sorted(by_round.items()) if len(values) == len(runs)
    }
    return [
        [number, statistics.fmean(values), min(values), max(values)]
        for number, values in complete.items()
    ]


def _points(run: StoredRun, metric: Metric) -> list[list[float]]:
    """[round, value] where the run was evaluated."""
    return [
        [row["round"], row[metric.key]] for row in run.rounds if row.get(metric.key) is not None
    ]
