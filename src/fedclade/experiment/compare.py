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
        find("method", name, "--methods")
    common = [given for given in sets if given.split(".")[0] not in REGISTRY["method"]]
    experiments = []
    for name in methods:
        own = [f"method.{given.partition('.')[2]}" for given in sets if given.split(".")[0] == name]
        experiments.append(config.experiment(config.apply(tables, [*common, f'method.name="{name}"', *own])))
    return experiments


def execute(experiments: Sequence[Experiment], seeds: int, folder: Path, one: Callable[[Planned], Result]) -> list[dict[str, Any]]:
    """Run every method with every seed, each in its own folder, and write comparison.json."""
    summaries: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        for base in experiments:
            number = base.run.seed + seed
            planned = Planned(base.with_seed(number), f"{base.method.name}-seed{number}")
            summaries.setdefault(base.method.name, []).append(one(planned).summary)
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
