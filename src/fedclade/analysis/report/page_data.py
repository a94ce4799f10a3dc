"""The data of a page, from the folders of runs and diagnoses: one dictionary for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fedclade
from fedclade.analysis.report import headlines
from fedclade.analysis.report.comparison_section import (
    compared,
    curves,
    forest,
    pair_rows,
    tested,
    typical_run,
)
from fedclade.analysis.report.diagnosis_section import diagnosis_section
from fedclade.analysis.report.figure_descriptions import Figure
from fedclade.analysis.report.load import ReportData, StoredRun, read
from fedclade.analysis.report.metric import METRICS, Metric
from fedclade.analysis.report.run_progress import progress_of
from fedclade.analysis.report.run_section import mix, section

# Limits for a page of one run; with many runs each shows less, so that the page stays small.
_CLIENTS, _ALL_CLIENTS = 5_000, 40_000
_SIDE, _LEAST_SIDE = 200, 48


def collect(folders: Sequence[Path]) -> dict[str, Any]:
    """Runs, their comparison, and diagnoses. A comparison's folder means the runs in it."""
    contents = read([Path(folder) for folder in folders])
    runs, diagnoses = contents.runs, contents.diagnoses
    metric = _metric(runs)
    several = len(runs) > 1 or len(contents.planned) > 1
    rows = compared(runs, metric) if several else None
    differences = tested(runs) if several else None
    progress = progress_of(runs, contents.planned) if runs else None
    mixes = _UniqueList()
    return {
        "version": fedclade.__version__,
        "title": headlines.title(runs, diagnoses, metric, differences, progress),
        "headline": headlines.top(runs, diagnoses, metric, differences, progress),
        "metric": {
            "key": metric.key,
            "label": metric.label,
            "unit": metric.unit,
            "higher": metric.higher_is_better,
        },
        "progress": None if progress is None else progress.to_json(),
        "runs": [_run_data(run, metric, runs, mixes) for run in runs],
        "opened": typical_run(rows, runs, metric) if rows else None,
        "compared": rows,
        "waiting": _waiting(contents),
        "differences": list(differences.in_words) if differences is not None else [],
        "pairs": pair_rows(differences) if differences is not None else [],
        "figures": _without_none(
            {
                "curves": curves(rows, metric) if rows else None,
                "differences": forest(differences, rows) if differences and rows else None,
            }
        ),
        "diagnoses": [diagnosis_section(name, content) for name, content in diagnoses],
        "mixes": mixes.items,
    }


def _waiting(contents: ReportData) -> list[str]:
    """The runs of a comparison that have not begun."""
    begun = {run.name for run in contents.runs}
    return [run.name for run in contents.planned if run.name not in begun]


def _without_none(figures: dict[str, Figure | None]) -> dict[str, Figure]:
    return {name: figure for name, figure in figures.items() if figure is not None}


def _run_data(
    run: StoredRun, metric: Metric, runs: Sequence[StoredRun], mixes: _UniqueList
) -> dict[str, Any]:
    side = max(_LEAST_SIDE, min(_SIDE, round(_SIDE / math.sqrt(max(1, len(runs) - 2)))))
    heading = {
        "headline": headlines.headline(run, metric, runs),
        "progress": _progress(run),
        "cohort": _cohort(run),
    }
    return (
        heading
        | section(run, metric, min(_CLIENTS, _ALL_CLIENTS // len(runs)), side)
        | {"mix": mixes.index_of(mix(run))}
    )


def _progress(run: StoredRun) -> str | None:
    """How far an unfinished run is; None for a finished run."""
    progress = progress_of([run], [])
    return None if progress is None else progress.in_words()


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
