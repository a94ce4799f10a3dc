"""The runs of a table: which there are, and doing those that have not been done."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

from fedclade.core.functional_encoder import Encoder
from fedclade.core.pytree import nbytes
from fedclade.data.datasets import Dataset, load
from fedclade.data.federated_dataset import Clients
from fedclade.engines.simulator import pick_device
from fedclade.errors import InvalidInputError, nearest
from fedclade.io import schemas
from fedclade.io.atomic import write_text
from fedclade.io.environment_info import about
from fedclade.io.run_dir import RunDirectory, StoredModels
from fedclade.methods import FLT, IFCA, FedSEM
from fedclade.reproduce.metrics import History, Summary
from fedclade.reproduce.spec import SYNTHETIC, Column, Row, Table
from fedclade.reproduce.studies import STUDIES
from fedclade.training import config, encoder_pretraining
from fedclade.training.config import Experiment
from fedclade.training.runner import OnRound

ENCODER_EPOCHS = 5


@dataclass(frozen=True)
class Job:
    """One run or study: a row and the column whose data and settings it has, with one seed."""

    row: Row
    column: Column
    data: str
    seed: int
    sets: tuple[str, ...]
    base: dict[str, config.Table] = field(repr=False)
    study: str = ""

    @property
    def label(self) -> str:
        """The name of its folder or file: the same settings have the same, in whatever table, row
        or column they stand.
        """
        settings = (
            [self.tables]
            if self.study
            else [self.base, self.sets, self.row.encoder.get(self.column.name)]
        )
        what = json.dumps(settings, sort_keys=True)
        digest = hashlib.sha256(what.encode()).hexdigest()[:10]
        return f"{self.study or self.row.method}-{self.data}-{digest}-seed{self.seed}"

    @property
    def tables(self) -> dict[str, config.Table]:
        """The experiment file with all that is set."""
        return config.apply(self.base, self.sets)

    def experiment(self, encoder: Path | None) -> Experiment:
        sets = [*self.sets, *([f'method.encoder="{encoder}"'] if encoder is not None else [])]
        return config.experiment(config.apply(self.base, sets))


@dataclass(frozen=True)
class Options:
    """What of a table is run, and how. `methods` (or names of rows) and `columns`: none named means
    all.
    """

    seeds: int | None = None
    quick: bool = False
    methods: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    device: str = "auto"
    data_root: str | None = None


@dataclass(frozen=True)
class Plan:
    """The jobs of a table, and the data set of each column (None: none of those it could use is
    here).
    """

    table: Table
    options: Options
    data: dict[str, str | None]
    jobs: dict[tuple[str, str, int], Job]  # by row, column whose settings it has, and seed


def plan(table: Table, options: Options) -> Plan:
    """Which runs the table needs. What asks for an unknown method or column is refused."""
    rows = _chosen(
        "--methods",
        [name for row in table.rows for name in (row.method, row.name) if name],
        options.methods,
    )
    named = _chosen("--column", [column.name for column in table.columns], options.columns)
    seeds = 1 if options.quick else options.seeds or table.seeds
    data: dict[str, str | None] = {}
    jobs = {}
    for column in (column for column in table.columns if column.name in named):
        source = table.settings_of(column)
        if source.name not in data:
            data[source.name] = next(
                (name for name in source.data if _is_here(name, options.data_root)), None
            )
        data[column.name] = chosen = data[source.name]
        for row in table.rows:
            if (
                chosen is not None
                and (row.method in rows or row.name in rows)
                and column.name not in row.skip
            ):
                for seed in range(seeds):
                    jobs[row.name, source.name, seed] = _job(
                        table, row, source, chosen, seed, options.quick
                    )
    return Plan(table, options, data, jobs)


def _job(table: Table, row: Row, column: Column, data: str, seed: int, quick: bool) -> Job:
    sets = [f'data.name="{data}"'] if data != SYNTHETIC else []
    sets += [
        *column.set,
        *([f'method.name="{row.method}"'] if row.method else []),
        *row.set,
        *row.sets.get(column.name, ()),
    ]
    sets += [f"run.seed={seed}", *([*table.quick.set, *column.quick] if quick else [])]
    return Job(row, column, data, seed, tuple(sets), table.experiment, table.study)


def _chosen(option: str, known: Sequence[str], wanted: Sequence[str]) -> Sequence[str]:
    for name in wanted:
        if name not in known:
            raise InvalidInputError(
                f"{option} {name}: this table has none of that name.{nearest(name, known)}"
            )
    return wanted or known


def _is_here(name: str, root: str | None) -> bool:
    if name == SYNTHETIC:
        return True
    try:
        load(name, root)
    except InvalidInputError:
        return False
    return True


Done = tuple[Summary, History]
ABOUT = "about.json"  # beside a run: the machine and the commit it was made with


def so_far(plan: Plan, folder: Path) -> Plan:
    """The jobs of a plan that have been done."""
    return replace(plan, jobs={key: job for key, job in plan.jobs.items() if _is_done(job, folder)})


def _is_done(job: Job, folder: Path) -> bool:
    return (
        (folder / f"{job.label}.json").exists()
        if job.study
        else RunDirectory(folder / job.label).summary() is not None
    )


def execute(
    plan: Plan, folder: Path, on_job: Callable[[Job, int, int], OnRound | None]
) -> dict[tuple[str, str, int], Done]:
    """Do the jobs that `folder` does not hold yet. `on_job` is told which one begins, its number
    and how many there are.
    """
    done: dict[tuple[str, str, int], Done] = {}
    dealt = _Dealt(plan.options.data_root, plan.table.quick.samples if plan.options.quick else None)
    # Column by column and seed by seed, so that a partition is made once for all its rows.
    order = sorted(
        plan.jobs.items(), key=lambda item: (list(plan.data).index(item[0][1]), item[0][2])
    )
    for number, (key, job) in enumerate(order, start=1):
        begins = partial(on_job, job, number, len(order))
        done[key] = (
            _studied(job, folder, dealt, plan.options, begins)
            if job.study
            else _run(job, folder, dealt, plan.options, begins)
        )
    return done


class _Dealt:
    """The clients of an experiment, dealt anew only where those before were others, from data that
    are loaded once. `few`: of no more than so many samples.
    """

    def __init__(self, root: str | None, few: int | None) -> None:
        self.few = few
        self._root = root
        self._data: tuple[str, Dataset] | None = None
        self._last: tuple[object, Clients] | None = None

    def __call__(self, experiment: Experiment) -> Clients:
        what = (experiment.data, experiment.partition, experiment.scheme, experiment.run.seed)
        if self._last is None or self._last[0] != what:
            self._last = (what, experiment.partitioned(self._loaded(experiment.data.name)))
        return self._last[1]

    def _loaded(self, name: str) -> Dataset:
        if self._data is None or self._data[0] != name:
            whole = load(name, self._root)
            self._data = (name, whole if self.few is None else thinned(whole, self.few))
        return self._data[1]


def thinned(data: Dataset, samples: int) -> Dataset:
    """At most so many training samples and half as many test samples, taken evenly from all."""
    train = slice(None, None, max(1, -(-len(data.y_train) // samples)))
    test = slice(None, None, max(1, -(-2 * len(data.y_test) // samples)))
    keys = {
        name: (ids[train], None if test_ids is None else test_ids[test])
        for name, (ids, test_ids) in data.keys.items()
    }
    return Dataset(
        data.name,
        data.x_train[train],
        data.y_train[train],
        data.x_test[test],
        data.y_test[test],
        keys,
    )


def _run(
    job: Job, folder: Path, dealt: _Dealt, options: Options, begins: Callable[[], OnRound | None]
) -> Done:
    """Summary and history of a training run, from its folder if it has ended."""
    store = RunDirectory(folder / job.label)
    summary = store.summary()
    if summary is None or job.row.formula:
        experiment = job.experiment(_encoder(job, folder, options, dealt.few))
        if summary is None:
            run = experiment.to_run(dealt(experiment), options.device)
            summary = run.run(store.folder, resume=True, on_round=begins()).summary
            write_text(
                store.folder / ABOUT,
                json.dumps(about(pick_device(options.device).type), indent=1) + "\n",
            )
        if job.row.formula:
            summary = summary | _traffic(experiment, store, summary)
    made = store.folder / ABOUT
    return (
        summary | ({"about": schemas.read(made, schemas.table)} if made.exists() else {}),
        store.history(),
    )


def _studied(
    job: Job, folder: Path, dealt: _Dealt, options: Options, begins: Callable[[], object]
) -> Done:
    """The numbers of a study, from its file if it has one. Rows that only look at other rounds of
    it have the same file.
    """
    file = folder / f"{job.label}.json"
    if not file.exists():
        clients = None if job.data == SYNTHETIC else dealt(job.experiment(None))
        begins()
        start = time.perf_counter()
        history = STUDIES[job.study](job.tables, clients, options.device)
        folder.mkdir(parents=True, exist_ok=True)
        seconds, made = (
            round(time.perf_counter() - start, 3),
            about(pick_device(options.device).type),
        )
        write_text(
            file,
            json.dumps({"rounds": history, "seconds": seconds, "about": made}, indent=1) + "\n",
        )
    found = schemas.read(file, schemas.study)
    return {
        **found["rounds"][-1],
        **{name: found[name] for name in ("seconds", "about") if name in found},
    }, found["rounds"]


def _traffic(experiment: Experiment, store: RunDirectory, summary: Summary) -> Summary:
    """The values of a formula's letters (see `core.cost_expression`), and all bytes that the
    simulator counted, both ways.
    """
    models, method = StoredModels(store.folder), experiment.method
    cohort = experiment.run.cohort_size(summary["clients"])
    symbols = {
        "M": summary["clients"],
        "n": cohort,
        "T": summary["rounds"],
        "W": nbytes(models.row(0)),
    }
    if isinstance(method, FLT) and isinstance(method.k, int):
        encoder = Encoder(
            encoder_pretraining.resolve(method.encoder, models.shape, experiment.run.seed)
        )
        sent = encoder.needed(encoder.weights())
        symbols |= {
            "E": nbytes(sent),
            "k": method.k,
            "e": encoder.codes(sent, torch.zeros(1, *models.shape)).shape[1],
        }
    elif isinstance(method, IFCA | FedSEM):
        symbols["C"] = method.clusters
    return {"symbols": symbols, "bytes": summary["bytes_up"] + summary["bytes_down"]}


def _encoder(job: Job, folder: Path, options: Options, few: int | None) -> Path | None:
    """The file of the encoder that this cell's FLT uses, trained if it is not there yet; None: the
    method's own default.
    """
    name = job.row.encoder.get(job.column.name)
    if name is None:
        return None
    epochs = 1 if options.quick else ENCODER_EPOCHS
    file = folder / "encoders" / f"{name}-{epochs}.safetensors"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        data = load(name, options.data_root)
        encoder_pretraining.pretrain(
            data if few is None else thinned(data, few), file, epochs=epochs, device=options.device
        )
    return file.resolve()
