"""The runs of a table: which there are, and doing those that have not been done."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedclade.data.clients import Clients
from fedclade.data.datasets import load
from fedclade.errors import InvalidInput, nearest
from fedclade.experiment import config, encoders
from fedclade.experiment.config import Experiment
from fedclade.experiment.runner import OnRound
from fedclade.experiment.store import RunStore
from fedclade.reproduce.measures import History, Summary
from fedclade.reproduce.table import Column, Row, Table

ENCODER_EPOCHS = 5


@dataclass(frozen=True)
class Job:
    """One run: a row and the column whose data and settings it has, with one seed."""

    row: Row
    column: Column
    data: str
    seed: int
    sets: tuple[str, ...]
    base: dict[str, config.Table] = field(repr=False)

    @property
    def label(self) -> str:
        """The name of its folder: the same settings have the same, in whatever table or column they stand."""
        what = json.dumps([self.base, self.sets, self.row.encoder.get(self.column.name)], sort_keys=True)
        return f"{self.row.method}-{self.data}-{hashlib.sha256(what.encode()).hexdigest()[:10]}-seed{self.seed}"

    def experiment(self, encoder: Path | None) -> Experiment:
        sets = [*self.sets, *([f'method.encoder="{encoder}"'] if encoder is not None else [])]
        return config.experiment(config.apply(self.base, sets))


@dataclass(frozen=True)
class Options:
    """What of a table is run, and how. `methods` and `columns`: none named means all."""

    seeds: int | None = None
    quick: bool = False
    methods: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    device: str = "auto"
    data_root: str | None = None


@dataclass(frozen=True)
class Plan:
    """The jobs of a table, and the data set of each column (None: none of those it could use is here)."""

    table: Table
    options: Options
    data: dict[str, str | None]
    jobs: dict[tuple[str, str, int], Job]  # by row, column whose settings it has, and seed


def plan(table: Table, options: Options) -> Plan:
    """Which runs the table needs. What asks for an unknown method or column is refused."""
    rows = _chosen("--methods", [row.method for row in table.rows], options.methods)
    named = _chosen("--columns", [column.name for column in table.columns], options.columns)
    seeds = 1 if options.quick else options.seeds or table.seeds
    data: dict[str, str | None] = {}
    jobs = {}
    for column in (column for column in table.columns if column.name in named):
        source = table.settings_of(column)
        if source.name not in data:
            data[source.name] = next((name for name in source.data if _is_here(name, options.data_root)), None)
        data[column.name] = chosen = data[source.name]
        for row in table.rows:
            if chosen is not None and row.method in rows and column.name not in row.skip:
                for seed in range(seeds):
                    jobs[row.name, source.name, seed] = _job(table, row, source, chosen, seed, options.quick)
    return Plan(table, options, data, jobs)


def _job(table: Table, row: Row, column: Column, data: str, seed: int, quick: bool) -> Job:
    sets = [f'data.name="{data}"', *column.set, f'method.name="{row.method}"', *row.set, *row.sets.get(column.name, ()), f"run.seed={seed}"]
    if quick:
        sets += [*table.quick.set, *column.quick]
    return Job(row, column, data, seed, tuple(sets), table.experiment)


def _chosen(option: str, known: Sequence[str], wanted: Sequence[str]) -> Sequence[str]:
    for name in wanted:
        if name not in known:
            raise InvalidInput(f"{option} {name}: this table has none of that name.{nearest(name, known)}")
    return wanted or known


def _is_here(name: str, root: str | None) -> bool:
    try:
        load(name, root)
    except InvalidInput:
        return False
    return True


Done = tuple[Summary, History]


def execute(plan: Plan, folder: Path, on_job: Callable[[Job, int, int], OnRound | None]) -> dict[tuple[str, str, int], Done]:
    """Do the jobs that `folder` does not hold yet. `on_job` is told which one begins, its number and how many there are."""
    done: dict[tuple[str, str, int], Done] = {}
    clients: tuple[object, Clients] | None = None
    # Column by column and seed by seed, so that a partition is made once for all its rows.
    order = sorted(plan.jobs.items(), key=lambda item: (list(plan.data).index(item[0][1]), item[0][2]))
    for number, (key, job) in enumerate(order, start=1):
        store = RunStore(folder / job.label)
        summary = store.summary()
        if summary is None:
            experiment = job.experiment(_encoder(job, folder, plan.options))
            dealt = (experiment.data, experiment.partition, experiment.scheme, experiment.run.seed)
            if clients is None or clients[0] != dealt:
                clients = (dealt, experiment.clients(plan.options.data_root))
            on_round = on_job(job, number, len(order))
            summary = experiment.prepared(clients[1], plan.options.device).execute(store.folder, resume=True, on_round=on_round).summary
        done[key] = (summary, store.history())
    return done


def _encoder(job: Job, folder: Path, options: Options) -> Path | None:
    """The file of the encoder that this cell's FLT uses, trained if it is not there yet; None: the method's own default."""
    name = job.row.encoder.get(job.column.name)
    if name is None:
        return None
    epochs = 1 if options.quick else ENCODER_EPOCHS
    file = folder / "encoders" / f"{name}-{epochs}.safetensors"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        encoders.pretrain(name, file, epochs=epochs, root=options.data_root, device=options.device)
    return file.resolve()
