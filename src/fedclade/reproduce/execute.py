"""The runs of a table: the plan, and the execution of those that are missing."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from fedclade.core.functional_encoder import Encoder
from fedclade.core.inputs import select
from fedclade.core.pytree import nbytes
from fedclade.data.datasets import Dataset, is_available, load
from fedclade.data.federated_dataset import Clients
from fedclade.engines.device import pick_device
from fedclade.errors import InvalidInputError, nearest
from fedclade.io import schemas
from fedclade.io.atomic import write_text
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info
from fedclade.io.run_dir import RunDirectory, StoredModels
from fedclade.io.schemas import RoundRecord
from fedclade.methods import FLT, IFCA, FedSEM
from fedclade.methods.required_context import need_probe_samples
from fedclade.reproduce.encoder_data import encoder_data
from fedclade.reproduce.panels import Panel
from fedclade.reproduce.paper_metrics import History, Numbers
from fedclade.reproduce.spec import STUDY_DATA, Column, Row, Table
from fedclade.reproduce.studies import STUDIES
from fedclade.training import encoders, experiment_file
from fedclade.training.callbacks import OnRound
from fedclade.training.experiment_file import Experiment

ENCODER_EPOCHS = 5
QUICK_ENCODER_SAMPLES = 1000  # with --quick, if the table does not thin its data


@dataclass(frozen=True)
class TableEntry:
    """One run of a table: a row, the column with its data and settings, and one seed."""

    row: Row
    column: Column
    data: str
    seed: int
    sets: tuple[str, ...]
    base: dict[str, experiment_file.Table] = field(repr=False)
    study: str = ""
    needs_probe: bool = False  # whether a row of the column needs probe samples

    @property
    def label(self) -> str:
        """The name of the folder or file. Equal settings have equal names in every table, row and
        column.
        """
        settings = (
            [self.tables]
            if self.study
            else [self.base, self.sets, self.row.encoder.get(self.column.name)]
        )
        text = json.dumps([*settings, self.needs_probe], sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        return f"{self.study or self.row.method}-{self.data}-{digest}-seed{self.seed}"

    @property
    def tables(self) -> dict[str, experiment_file.Table]:
        """The experiment file with all settings applied."""
        return experiment_file.apply(self.base, self.sets)

    def experiment(self, encoder: Path | None) -> Experiment:
        sets = [*self.sets, *([f'method.encoder="{encoder}"'] if encoder is not None else [])]
        experiment = experiment_file.experiment(experiment_file.apply(self.base, sets))
        return replace(experiment, needs_probe=self.needs_probe)


@dataclass(frozen=True)
class Options:
    """Which runs of a table to execute, and how.

    Args:
        seeds: the number of seeds per cell; None for that of the table.
        quick: run a small, short version with one seed.
        methods: methods or names of rows; empty for all.
        columns: names of columns; empty for all.
        device: "auto", "cpu" or "cuda".
        data_root: the folder to search first for data sets.
    """

    seeds: int | None = None
    quick: bool = False
    methods: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    device: str = "auto"
    data_root: str | None = None


@dataclass(frozen=True)
class Plan:
    """The entries of a table, and the data set of each column (None if none is available)."""

    table: Table
    options: Options
    data: dict[str, str | None]
    # by row, column with its settings, and seed
    entries: dict[tuple[str, str, int], TableEntry]


def plan(table: Table, options: Options) -> Plan:
    """The runs that a table needs. An unknown method or column raises `InvalidInputError`."""
    rows = _chosen(
        "--methods",
        [name for row in table.rows for name in (row.method, row.name) if name],
        options.methods,
    )
    named = _chosen("--column", [column.name for column in table.columns], options.columns)
    seeds = 1 if options.quick else options.seeds or table.seeds
    data: dict[str, str | None] = {}
    entries = {}
    for column in (column for column in table.columns if column.name in named):
        source = table.settings_of(column)
        if source.name not in data:
            data[source.name] = next(
                (name for name in source.data if _is_available(name, options.data_root)), None
            )
        data[column.name] = chosen = data[source.name]
        needs_probe = chosen is not None and _needs_probe(table, source, chosen)
        for row in table.rows:
            if (
                chosen is not None
                and (row.method in rows or row.name in rows)
                and column.name not in row.skip
            ):
                for seed in range(seeds):
                    entry = _entry(table, row, source, chosen, seed, options.quick)
                    entries[row.name, source.name, seed] = replace(entry, needs_probe=needs_probe)
    return Plan(table, options, data, entries)


def _needs_probe(table: Table, column: Column, data: str) -> bool:
    """Whether a row of this column needs probe samples, whichever rows are run now."""
    if data in STUDY_DATA:
        return False
    shown = [other.name for other in table.columns if table.settings_of(other) == column]
    return need_probe_samples(
        _entry(table, row, column, data, seed=0, quick=False).experiment(None).method
        for row in table.rows
        if not set(shown) <= set(row.skip)
    )


def _entry(table: Table, row: Row, column: Column, data: str, seed: int, quick: bool) -> TableEntry:
    sets = [f'data.name="{data}"'] if data not in STUDY_DATA else []
    sets += [
        *column.set,
        *([f'method.name="{row.method}"'] if row.method else []),
        *row.set,
        *row.sets.get(column.name, ()),
    ]
    sets += [f"run.seed={seed}", *([*table.quick.set, *column.quick] if quick else [])]
    return TableEntry(row, column, data, seed, tuple(sets), table.experiment, table.study)


def _chosen(option: str, known: Sequence[str], names: Sequence[str]) -> Sequence[str]:
    """The names that are chosen. A name may have commas, at which the command line divides it."""
    chosen: list[str] = []
    rest = list(names)
    while rest:
        ends = range(len(rest), 0, -1)
        name, end = next(
            ((name, end) for end in ends if (name := ", ".join(rest[:end])) in known), (rest[0], 1)
        )
        if name not in known:
            raise InvalidInputError(
                f"{option} {name}: not in this table.{nearest(name, known)}", option
            )
        chosen, rest = [*chosen, name], rest[end:]
    return chosen or known


def _is_available(name: str, root: str | None) -> bool:
    return name in STUDY_DATA or is_available(name, root)


class Sizes(NamedTuple):
    """The number of clients, the median of their training samples, and the probe samples."""

    clients: int
    samples: float
    probe: int


class Done(NamedTuple):
    """A finished entry: its summary, its rounds, the panels that a study returned, the sizes of its
    clients, which synthetic data do not have, and the columns per client of a training run.
    """

    summary: Numbers
    history: History
    panels: tuple[Panel, ...] = ()
    sizes: Sizes | None = None
    clients: dict[str, list[Any]] | None = None


ENVIRONMENT_FILE = "about.json"  # in a run's folder: the machine and the commit of the run


def so_far(plan: Plan, folder: Path) -> Plan:
    """The plan with only the entries that are finished in this folder."""
    return replace(
        plan, entries={key: entry for key, entry in plan.entries.items() if _is_done(entry, folder)}
    )


def without_finished(plan: Plan, folder: Path) -> Plan:
    """The plan without the entries that are finished in this folder."""
    return replace(
        plan,
        entries={key: entry for key, entry in plan.entries.items() if not _is_done(entry, folder)},
    )


def train_encoders(plan: Plan, folder: Path) -> None:
    """Train the encoders of a plan that do not exist in this folder."""
    samples = plan.table.quick.samples if plan.options.quick else None
    for entry in plan.entries.values():
        _encoder(entry, folder, plan.options, samples)


def _is_done(entry: TableEntry, folder: Path) -> bool:
    return (
        (folder / f"{entry.label}.json").exists()
        if entry.study
        else RunDirectory(folder / entry.label).summary() is not None
    )


def execute(
    plan: Plan, folder: Path, on_entry: Callable[[TableEntry, int, int], OnRound | None]
) -> dict[tuple[str, str, int], Done]:
    """Execute the entries that are not finished in `folder`.

    Args:
        plan: the entries.
        folder: the folder of all runs.
        on_entry: called before each run with its entry, its number and the number of entries.

    Returns:
        Each finished entry.
    """
    done: dict[tuple[str, str, int], Done] = {}
    samples = plan.table.quick.samples if plan.options.quick else None
    partitions = _PartitionCache(plan.options.data_root, samples)
    # Ordered by column and seed, so that a partition is computed once for all its rows.
    order = sorted(
        plan.entries.items(), key=lambda item: (list(plan.data).index(item[0][1]), item[0][2])
    )
    for number, (key, entry) in enumerate(order, start=1):
        on_start = partial(on_entry, entry, number, len(order))
        done[key] = (
            _study(entry, folder, partitions, plan.options, on_start)
            if entry.study
            else _run(entry, folder, partitions, plan.options, on_start)
        )
    return done


class _PartitionCache:
    """The clients of an experiment, with a cache of the last data set and the last partition.

    Args:
        root: the folder to search first for data sets.
        samples: the largest number of training samples to use; None for all.
    """

    def __init__(self, root: str | None, samples: int | None) -> None:
        self.samples = samples
        self._root = root
        self._data: tuple[str, Dataset] | None = None
        self._last: tuple[object, Clients] | None = None

    def clients(self, experiment: Experiment) -> Clients:
        key = (
            experiment.data,
            experiment.partition,
            experiment.scheme,
            experiment.run.seed,
            experiment.needs_probe,
        )
        if self._last is None or self._last[0] != key:
            self._last = (key, experiment.partitioned(self._dataset(experiment.data.name or "")))
        return self._last[1]

    def _dataset(self, name: str) -> Dataset:
        if self._data is None or self._data[0] != name:
            data = load(name, self._root)
            self._data = (name, data if self.samples is None else thinned(data, self.samples))
        return self._data[1]


def thinned(data: Dataset, samples: int) -> Dataset:
    """At most this many training samples and half as many test samples, evenly spaced."""
    train = slice(None, None, max(1, -(-len(data.y_train) // samples)))
    test = slice(None, None, max(1, -(-2 * len(data.y_test) // samples)))
    keys = {
        name: (ids[train], None if test_ids is None else test_ids[test])
        for name, (ids, test_ids) in data.keys.items()
    }
    return Dataset(
        data.name,
        select(data.x_train, train),
        data.y_train[train],
        select(data.x_test, test),
        data.y_test[test],
        keys,
        data.key_names,
        data.names,
    )


def _run(
    entry: TableEntry,
    folder: Path,
    partitions: _PartitionCache,
    options: Options,
    on_start: Callable[[], OnRound | None],
) -> Done:
    """Summary and history of a training run, from its folder if it is finished."""
    store = RunDirectory(folder / entry.label)
    numbers: Numbers | None = store.summary()
    if numbers is None or entry.row.formula:
        experiment = entry.experiment(_encoder(entry, folder, options, partitions.samples))
        if numbers is None:
            run = experiment.to_run(partitions.clients(experiment), options.device)
            numbers = run.run(store.folder, resume=True, on_round=on_start()).summary
            environment = environment_info(pick_device(options.device).type)
            write_text(store.folder / ENVIRONMENT_FILE, json.dumps(environment, indent=1) + "\n")
        if entry.row.formula:
            numbers = {**numbers, **_traffic(experiment, store, numbers)}
    path = store.folder / ENVIRONMENT_FILE
    if path.exists():
        numbers = {**numbers, "about": schemas.read(path, schemas.table)}
    clients, history = store.read_clients(numbers["clients"]), store.history()
    if "layer" not in store.tables().get("personal", {}):
        # The table does not compare with and without a personal layer. A method's own layer is a
        # part of the method.
        clients, numbers = _without_shared(clients), _without_shared(numbers)
        history = [cast(RoundRecord, _without_shared(row)) for row in history]
    numbers = {**numbers, **_over_samples(clients)}
    sizes = Sizes(
        numbers["clients"],
        statistics.median(clients["examples"]),
        store.tables()["partition"].get("probe", 0),
    )
    return Done(numbers, history, sizes=sizes, clients=clients)


def _without_shared(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Without the numbers of models before the personal layer."""
    return {name: value for name, value in numbers.items() if not name.endswith("_shared")}


def _over_samples(clients: dict[str, list[Any]]) -> Numbers:
    """The accuracies over all test samples: means of the clients' accuracies, weighted by the
    number of their test samples.
    """
    numbers = {}
    before = "accuracy_shared" if "accuracy_shared" in clients else "accuracy"
    columns = {"accuracy": before}
    if before != "accuracy":
        columns["accuracy_tuned"] = "accuracy"
    for name, column in columns.items():
        pairs = [
            (size, value)
            for size, value in zip(
                clients.get("test_examples", []), clients.get(column, []), strict=False
            )
            if value is not None and size
        ]
        if pairs:
            total = sum(size for size, _ in pairs)
            numbers[f"sample_{name}"] = sum(size * value for size, value in pairs) / total
    return numbers


def _study(
    entry: TableEntry,
    folder: Path,
    partitions: _PartitionCache,
    options: Options,
    on_start: Callable[[], object],
) -> Done:
    """The numbers of a study, from its file if it exists. Rows that read other rounds of the same
    study share a file.
    """
    file = folder / f"{entry.label}.json"
    if not file.exists():
        clients = None if entry.data in STUDY_DATA else partitions.clients(entry.experiment(None))
        on_start()
        start = time.perf_counter()
        result = STUDIES[entry.study](entry.tables, clients, options.device)
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "rounds": result.history,
            "panels": [panel.as_json() for panel in result.panels],
            "seconds": round(time.perf_counter() - start, 3),
            "about": environment_info(pick_device(options.device).type),
        }
        if clients is not None:
            median = statistics.median(clients.sizes.tolist())
            content["sizes"] = Sizes(len(clients), median, clients.origin.get("probe", 0))
        write_results(file, content)
    study = schemas.read(file, schemas.study)
    numbers: Numbers = {name: study[name] for name in ("seconds", "about") if name in study}
    panels = tuple(Panel.from_json(panel) for panel in study.get("panels", ()))
    sizes = Sizes(*study["sizes"]) if "sizes" in study else None
    return Done({**study["rounds"][-1], **numbers}, study["rounds"], panels, sizes)


def _traffic(experiment: Experiment, store: RunDirectory, summary: Numbers) -> Numbers:
    """The values of a formula's letters (see `core.cost_formula`), and all bytes that the
    simulator counted in both directions.
    """
    models, method = StoredModels(store.folder), experiment.method
    cohort = experiment.run.cohort_size(summary["clients"])
    symbols = {
        "M": summary["clients"],
        "n": cohort,
        "T": summary["rounds"],
        "W": nbytes(models.row(0)),
    }
    if isinstance(method, FLT) and isinstance(method.k, int) and models.shape is not None:
        encoder = Encoder(encoders.resolve(method.encoder, models.shape, experiment.run.seed))
        sent = encoder.needed(encoder.weights())
        symbols |= {
            "E": nbytes(sent),
            "k": method.k,
            "e": encoder.codes(sent, torch.zeros(1, *models.shape)).shape[1],
        }
    elif isinstance(method, IFCA | FedSEM):
        symbols["C"] = method.clusters
    return {"symbols": symbols, "bytes": summary["bytes_up"] + summary["bytes_down"]}


def _encoder(entry: TableEntry, folder: Path, options: Options, samples: int | None) -> Path | None:
    """The file of the encoder for this cell's FLT, which is trained if it does not exist; None for
    the method's default.
    """
    name = entry.row.encoder.get(entry.column.name)
    if name is None:
        return None
    epochs = 1 if options.quick else ENCODER_EPOCHS
    file = folder / "encoders" / f"{name}-{epochs}.safetensors"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        data = encoder_data(name, options.data_root)
        if options.quick:
            data = thinned(data, samples or QUICK_ENCODER_SAMPLES)
        encoders.pretrain(data, file, epochs=epochs, device=options.device)
    return file.resolve()
