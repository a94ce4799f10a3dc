"""The data of a page, from the folders of runs and diagnoses: one dictionary for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fedclade
from fedclade.analysis.report import headlines
from fedclade.analysis.report.comparison_section import compared
from fedclade.analysis.report.load import Row, StoredRun, read
from fedclade.analysis.report.metric import METRICS, Metric, short
from fedclade.analysis.report.run_section import mix, section

# Limits for a page of one run; with many runs each shows less, so that the page stays small.
_CLIENTS, _ALL_CLIENTS = 5_000, 40_000
_SIDE, _LEAST_SIDE = 200, 48


def collect(folders: Sequence[Path]) -> dict[str, Any]:
    """Runs, their comparison, and diagnoses. A comparison's folder means the runs in it."""
    contents = read([Path(folder) for folder in folders])
    runs, diagnoses = contents.runs, contents.diagnoses
    metric = _metric(runs)
    rows = compared(runs, metric) if len(runs) > 1 else None
    mixes = _UniqueList()
    return {
        "version": fedclade.__version__,
        "title": _title(runs, [name for name, _ in diagnoses]),
        "headline": _headline(runs, diagnoses, rows, metric),
        "metric": {
            "key": metric.key,
            "label": metric.label,
            "unit": metric.unit,
            "higher": metric.higher_is_better,
        },
        "runs": [_run_data(run, metric, runs, mixes) for run in runs],
        "compared": rows,
        "differences": contents.differences,
        "diagnoses": [{"name": name, "diagnosis": short(content)} for name, content in diagnoses],
        "mixes": mixes.items,
    }


def _run_data(
    run: StoredRun, metric: Metric, runs: Sequence[StoredRun], mixes: _UniqueList
) -> dict[str, Any]:
    side = max(_LEAST_SIDE, min(_SIDE, round(_SIDE / math.sqrt(max(1, len(runs) - 2)))))
    heading = {
        "headline": headlines.headline(run, metric, runs),
        "progress": headlines.progress(run),
        "cohort": _cohort(run),
    }
    return (
        heading
        | section(run, metric, min(_CLIENTS, _ALL_CLIENTS // len(runs)), side)
        | {"mix": mixes.index_of(mix(run))}
    )


def _cohort(run: StoredRun) -> str:
    """Runs with equal values have the same clients, so they can be compared client by client."""
    return json.dumps(
        [run.tables.get("data"), run.tables.get("partition"), run.tables["run"].get("seed")],
        sort_keys=True,
        default=str,
    )


def _metric(runs: Sequence[StoredRun]) -> Metric:
    """The first metric that all evaluated runs have."""
    evaluated = [run.last for run in runs if run.last]
    return next(
        (
            metric
            for metric in METRICS
            if evaluated and all(last.get(metric.key) is not None for last in evaluated)
        ),
        METRICS[0],
    )


def _title(runs: Sequence[StoredRun], diagnosed: Sequence[str]) -> str:
    if not runs:
        return f"Diagnosis of {', '.join(diagnosed)}"
    data = " and ".join(
        dict.fromkeys(str(run.tables.get("data", {}).get("name", "clients")) for run in runs)
    )
    if len(runs) == 1:
        return f"{runs[0].method} on {data}"
    return f"{len(runs)} runs on {data}"


def _headline(
    runs: Sequence[StoredRun],
    diagnoses: Sequence[tuple[str, Row]],
    rows: Sequence[dict[str, Any]] | None,
    metric: Metric,
) -> str:
    if rows is not None:
        return headlines.overall([(row["label"], row["score"]) for row in rows], metric)
    if runs:
        return headlines.headline(runs[0], metric, runs)
    diagnosis = diagnoses[0][1]
    return str(diagnosis.get("headline") or next(iter(diagnosis.get("sentences", ())), ""))


class _UniqueList:
    """A list without duplicates: runs of one comparison have the same clients."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._index: dict[str, int] = {}

    def index_of(self, item: Any) -> int | None:
        """The index of the item, which is added if it is new; None for None."""
        if item is None:
            return None
        key = json.dumps(item)
        if key not in self._index:
            self._index[key] = len(self.items)
            self.items.append(item)
        return self._index[key]
