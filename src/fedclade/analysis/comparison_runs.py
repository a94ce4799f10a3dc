"""Several methods or settings on the same clients: the runs, and the table of their results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedclade.analysis import significance
from fedclade.analysis.clients_hurt import BASELINES, shares_hurt
from fedclade.analysis.sweep_grid import expand
from fedclade.errors import InvalidInputError
from fedclade.io.run_dir import RunDirectory
from fedclade.registry import REGISTRY, find
from fedclade.training import experiment_file
from fedclade.training.experiment_file import Experiment, Table
from fedclade.training.metrics import own_names
from fedclade.training.result import Result

_AVERAGED = (
    "accuracy",
    "accuracy_stderr",
    "accuracy_variance",
    "accuracy_worst10",
    "loss",
    "ari",
    "clusters",
    "bytes_up",
    "bytes_down",
    "seconds",
)
_VALIDATED = ("validation_accuracy", "validation_loss")


def plan(tables: dict[str, Table], methods: Sequence[str], sets: Sequence[str]) -> list[Experiment]:
    """An experiment for each method and each combination of listed values.

    Args:
        tables: the experiment file.
        methods: names of the methods.
        sets: settings as --set takes them; `METHOD.KEY=VALUE` changes that method only.
    """
    if not methods:
        raise InvalidInputError(
            "--methods: give at least one method, for example --methods fedavg,local.", "--methods"
        )
    if len(set(methods)) != len(methods):
        raise InvalidInputError(
            f"--methods {','.join(methods)}: a method is given twice.", "--methods"
        )
    for name in methods:
        find("method", name, "--methods")
    # `local` is a table and a method. It means the table, since the method Local has no settings.
    method_sets = [
        setting
        for setting in sets
        if (head := setting.split(".")[0]) in REGISTRY["method"]
        and head not in experiment_file.TABLES
    ]
    for setting in method_sets:
        if setting.split(".")[0] not in methods:
            raise InvalidInputError(
                f"--set {setting}: '{setting.split('.')[0]}' is not one of the compared methods"
                f" ({', '.join(methods)}).",
                setting.partition("=")[0],
            )
    common = [setting for setting in sets if setting not in method_sets]
    experiments = []
    for name in methods:
        own = [
            f"method.{setting.partition('.')[2]}"
            for setting in method_sets
            if setting.split(".")[0] == name
        ]
        experiments += expand(tables, [*common, f'method.name="{name}"', *own])
    return experiments


def runs(experiments: Sequence[Experiment], seeds: int | Sequence[int] = 1) -> list[Experiment]:
    """Every experiment with every seed, on clients that are the same for all experiments.

    Args:
        experiments: an experiment for each row of the table.
        seeds: the number of seeds, the first of which is that of the experiment; or the seeds.
    """
    if seeds != 1 and len({base.run.seed for base in experiments}) > 1:
        raise InvalidInputError(
            f"--seeds {seeds if isinstance(seeds, int) else ','.join(map(str, seeds))}: run.seed"
            " lists seeds already. Use one of the two.",
            "--seeds",
        )
    planned = []
    for number in range(seeds) if isinstance(seeds, int) else range(len(seeds)):
        for base in experiment_file.with_common_probe(experiments):
            seed = base.run.seed + number if isinstance(seeds, int) else seeds[number]
            planned.append(replace(base, run=replace(base.run, seed=seed)))
    labels = [experiment.label for experiment in planned]
    for label in labels:
        if labels.count(label) > 1:
            raise InvalidInputError(
                f"--set: two runs would use the same folder, {label}. Use values with different"
                " labels.",
                "--set",
            )
    return planned


def execute(
    experiments: Sequence[Experiment],
    folder: Path,
    resume: bool,
    run: Callable[[Experiment], Result],
) -> list[dict[str, Any]]:
    """Execute the runs, each in its own subfolder. Write plan.json before the first, the list of
    the runs, and comparison.json after the last: the rows of the table, the runs and the
    significant differences.

    Args:
        experiments: the runs.
        folder: the comparison's folder.
        resume: continue interrupted runs; a finished run is not repeated.
        run: executes one run.

    Returns:
        The rows of the table, one per title.
    """
    if RunDirectory(folder).holds_run():
        raise InvalidInputError(
            f"out = '{folder}': the folder contains a single run. Choose another folder for"
            " several runs.",
            "out",
        )
    for experiment in experiments:  # fail before the first run starts
        RunDirectory.open(folder / experiment.label, resume)
    folder.mkdir(parents=True, exist_ok=True)
    RunDirectory(folder).write_plan(
        [
            {
                "name": experiment.label,
                "title": experiment.title,
                "rounds": experiment.run.rounds,
            }
            for experiment in experiments
        ]
    )
    measured: list[significance.Measured] = []
    folders: dict[str, list[str]] = {}
    for experiment in experiments:
        result, title = run(experiment), experiment.title
        federation = (experiment.data, experiment.partition, experiment.scheme)
        measured.append(
            significance.Measured(
                title, experiment.run.seed, federation, result.summary, result.clients
            )
        )
        folders.setdefault(title, []).append(experiment.label)
    table = tabulate(measured)
    RunDirectory(folder).write_comparison(table.to_json(folders))
    return table.rows


@dataclass(frozen=True)
class ComparisonTable:
    """The results of several runs.

    Args:
        rows: the numbers of each title, averaged over its seeds.
        summaries: the summaries of each title, one for each seed.
        differences: which differences are significant.
    """

    rows: list[dict[str, Any]]
    summaries: dict[str, list[Mapping[str, Any]]]
    differences: significance.Differences

    def to_json(self, folders: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        """The content of comparison.json.

        Args:
            folders: the folders of each title, one for each seed.
        """
        return {
            "rows": self.rows,
            "runs": self.summaries,
            "folders": folders,
            "differences": self.differences.to_json(),
        }


def tabulate(measured: Sequence[significance.Measured]) -> ComparisonTable:
    """The table of several runs, with a row for each title."""
    summaries: dict[str, list[Mapping[str, Any]]] = {}
    for run in measured:
        summaries.setdefault(run.title, []).append(run.summary)
    hurt = shares_hurt(measured)
    rows = [
        {
            **_row(title, of_title),
            **{
                f"hurt_against_{baseline}": hurt.get(baseline, {}).get(title)
                for baseline in BASELINES
            },
        }
        for title, of_title in summaries.items()
    ]
    return ComparisonTable(rows, summaries, significance.differences(measured))


def _row(title: str, summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"method": title, "seeds": len(summaries)}
    own = dict.fromkeys(name for summary in summaries for name in own_names(summary))
    validated = [name for name in _VALIDATED if any(name in summary for summary in summaries)]
    for name in (*_AVERAGED, *validated, *own):
        values = [summary[name] for summary in summaries if summary.get(name) is not None]
        row[name] = statistics.fmean(values) if values else None
    accuracies = [summary["accuracy"] for summary in summaries if summary["accuracy"] is not None]
    row["accuracy_std"] = statistics.stdev(accuracies) if len(accuracies) > 1 else None
    return row
