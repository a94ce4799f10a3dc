"""Several methods on the same clients: what to run, and the table of what came out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedclade.errors import InvalidInput
from fedclade.experiment import config
from fedclade.experiment.config import Experiment, Table
from fedclade.experiment.result import Result
from fedclade.experiment.runner import Run
from fedclade.experiment.store import RunStore
from fedclade.registry import REGISTRY, find

_AVERAGED = ("accuracy", "accuracy_stderr", "accuracy_variance", "accuracy_worst10", "ari", "clusters", "bytes_up", "bytes_down", "seconds")


@dataclass(frozen=True)
class Planned:
    """One run of a comparison."""

    experiment: Experiment
    label: str

    def prepared(self, device: str, data_root: str | None) -> Run:
        return self.experiment.prepared(self.experiment.clients(data_root), device)


def plan(tables: dict[str, Table], methods: Sequence[str], sets: Sequence[str]) -> list[Experiment]:
    """An experiment for each method. `METHOD.KEY=VALUE` among the sets concerns that method alone."""
    if not methods:
        raise InvalidInput("--methods: name at least one, for example --methods fedavg,local.")
    if len(set(methods)) != len(methods):
        raise InvalidInput(f"--methods {','.join(methods)}: a method is named twice.")
    for name in methods:
        find("method", name, f"--methods '{name}'")
    # `local` is a table and a method: the table is meant, since Local has no settings of its own.
    own_sets = [given for given in sets if (head := given.split(".")[0]) in REGISTRY["method"] and head not in config.TABLES]
    for given in own_sets:
        if given.split(".")[0] not in methods:
            raise InvalidInput(f"--set {given}: '{given.split('.')[0]}' is not among the methods compared ({', '.join(methods)}).")
    common = [given for given in sets if given not in own_sets]
    experiments = []
    for name in methods:
        own = [f"method.{given.partition('.')[2]}" for given in own_sets if given.split(".")[0] == name]
        experiments.append(config.experiment(config.apply(tables, [*common, f'method.name="{name}"', *own])))
    return experiments


def runs(experiments: Sequence[Experiment], seeds: int) -> list[Planned]:
    """Every method with every seed."""
    every = [base.with_seed(base.run.seed + seed) for seed in range(seeds) for base in experiments]
    return [Planned(each, f"{each.method.name}-seed{each.run.seed}") for each in every]


def execute(planned: Sequence[Planned], folder: Path, resume: bool, one: Callable[[Planned], Result]) -> list[dict[str, Any]]:
    """Do the runs, each in its own folder, and write comparison.json."""
    for run in planned:  # before any has cost time
        RunStore.open(folder / run.label, resume)
    summaries: dict[str, list[dict[str, Any]]] = {}
    for run in planned:
        summaries.setdefault(run.experiment.method.name, []).append(one(run).summary)
    rows = [_row(name, found) for name, found in summaries.items()]
    RunStore(folder).write_comparison({"rows": rows, "runs": summaries})
    return rows


def _row(method: str, summaries: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"method": method, "seeds": len(summaries)}
    for name in _AVERAGED:
        values = [summary[name] for summary in summaries if summary[name] is not None]
        row[name] = statistics.fmean(values) if values else None
    accuracies = [summary["accuracy"] for summary in summaries if summary["accuracy"] is not None]
    row["accuracy_std"] = statistics.stdev(accuracies) if len(accuracies) > 1 else None
    return row
