"""Everything a page shows, from the folders of runs and diagnoses: one dictionary that JSON can
say.
"""

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
from fedclade.analysis.report.run_section import mix, shown

# A page of one run shows this much; of many, each shows less, so that the page stays small.
_CLIENTS, _ALL_CLIENTS = 5_000, 40_000
_SIDE, _LEAST_SIDE = 200, 48


def collect(folders: Sequence[Path]) -> dict[str, Any]:
    """Runs, how they compare, and diagnoses. A comparison's folder stands for the runs inside
    it.
    """
    found = read([Path(folder) for folder in folders])
    runs, diagnoses = found.runs, found.diagnoses
    metric = _metric(runs)
    rows = compared(runs, metric) if len(runs) > 1 else None
    mixes = _Once()
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
        "runs": [_one(run, metric, runs, mixes) for run in runs],
        "compared": rows,
        "differences": found.differences,
        "diagnoses": [{"name": name, "said": short(said)} for name, said in diagnoses],
        "mixes": mixes.kept,
    }


def _one(run: StoredRun, metric: Metric, runs: Sequence[StoredRun], mixes: _Once) -> dict[str, Any]:
    side = max(_LEAST_SIDE, min(_SIDE, round(_SIDE / math.sqrt(max(1, len(runs) - 2)))))
    shown_first = {
        "headline": headlines.headline(run, metric, runs),
        "progress": headlines.progress(run),
        "cohort": _cohort(run),
    }
    return (
        shown_first
        | shown(run, metric, min(_CLIENTS, _ALL_CLIENTS // len(runs)), side)
        | {"mix": mixes.place(mix(run))}
    )


def _cohort(run: StoredRun) -> str:
    """Runs of which this is the same have the same clients, so that they can be compared client by
    client.
    """
    return json.dumps(
        [run.tables.get("data"), run.tables.get("partition"), run.tables["run"].get("seed")],
        sort_keys=True,
        default=str,
    )


def _metric(runs: Sequence[StoredRun]) -> Metric:
    """The first that every run that has been evaluated has."""
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
    said = diagnoses[0][1]
    return str(said.get("headline") or next(iter(said.get("sentences", ())), ""))


class _Once:
    """Keeps equal things once: runs of one comparison have the same clients."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self._places: dict[str, int] = {}

    def place(self, thing: Any) -> int | None:
        if thing is None:
            return None
        said = json.dumps(thing)
        if said not in self._places:
            self._places[said] = len(self.kept)
            self.kept.append(thing)
        return self._places[said]
