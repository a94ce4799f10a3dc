"""Clients from a table with a row per sample and a column that names the client of each row."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core.names import Names, checked_client_names, checked_names
from fedclade.data.bundled_tables import BUNDLED_TABLES
from fedclade.data.client_rows import Bools, Ints, is_held_out, rows_by_client, test_seed
from fedclade.data.column_encoding import (
    THREADS,
    CategoryColumn,
    ClientScale,
    ColumnEncoding,
    EncodedNumbers,
    Missing,
    NumberColumn,
    Standardize,
    Task,
)
from fedclade.data.datasets import TABLE_SUFFIXES
from fedclade.data.federated_dataset import Clients, RaggedIndex
from fedclade.data.table_columns import (
    as_codes,
    as_numbers,
    kind_of,
    location,
    number_of_rows,
    read_csv,
    read_frame,
    read_parquet,
    release_memory,
    require_column,
    shown,
)
from fedclade.errors import FedcladeWarning, InvalidInputError, is_number, require, require_int
from fedclade.io import safe_read

if TYPE_CHECKING:
    import pyarrow as pa

MAX_INTEGER_CLASSES = 10
"""Whole numbers with at most this number of different values are classes, unless `task` says."""
MAX_CATEGORIES = 100
"""The most categories of a column that `categorical` does not list: more are free text or ids."""
MAX_LISTED_CATEGORIES = 10_000
MAX_CLASSES = 1_000
TRAIN, VALIDATION, TEST, LEFT_OUT = 0, 1, 2, 3
TRAIN_OR_TEST = {"train": TRAIN, "training": TRAIN, "validation": VALIDATION, "test": TEST}
"""What a column may say that `test` names, in any case of letters."""
_SHOWN = 5  # names in a message

_log = logging.getLogger("fedclade")


@dataclass(frozen=True)
class TableSettings:
    """How a table becomes clients; the keys of [data] in an experiment file.

    Args:
        client: the column with the name of each row's client.
        target: the column with the targets.
        task: "classification" or "regression"; None to find it from the targets.
        test: the share of each client's rows that is its test part, or the name of a column that
            says train, test or validation.
        validation: the share of each client's training rows that is its validation data.
        drop: columns that are no inputs.
        categorical: columns of numbers that are categories, such as codes.
        missing: "mean" replaces a missing value by the column's mean and adds a column that says
            where; "drop" leaves out rows with a missing value.
        standardize: "federated" subtracts the mean of all clients and divides by the standard
            deviation; "client" uses those of each client; "none" leaves numbers as they are.
        seed: the seed of the test part.
        validation_seed: the seed of the validation data; None for `seed`.
    """

    client: str
    target: str
    task: Task | None = None
    test: float | str = 0.2
    validation: float = 0.0
    drop: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    missing: Missing = "mean"
    standardize: Standardize = "federated"
    seed: int = 0
    validation_seed: int | None = None

    def __post_init__(self) -> None:
        for key in ("client", "target"):
            value = getattr(self, key)
            require(isinstance(value, str), f"data.{key}", value, "must be the name of a column")
        for key, kind in (("task", Task), ("missing", Missing), ("standardize", Standardize)):
            value, allowed = getattr(self, key), get_args(kind)
            optional = key == "task" and value is None
            require(
                optional or value in allowed,
                f"data.{key}",
                value,
                f"must be one of {', '.join(allowed)}",
            )
        share = is_number(self.test) and 0 <= self.test < 1  # type: ignore[operator]
        require(
            share or isinstance(self.test, str),
            "data.test",
            self.test,
            "must be a share of at least 0 and below 1, or the name of a column",
        )
        require(
            is_number(self.validation) and 0 <= self.validation < 1,
            "data.validation",
            self.validation,
            "must be at least 0 (for none) and below 1",
        )
        for key in ("drop", "categorical"):
            names = getattr(self, key)
            listed = isinstance(names, list | tuple) and all(isinstance(n, str) for n in names)
            require(listed, f"data.{key}", names, "must be a list of column names")
            object.__setattr__(self, key, tuple(names))
        require(
            self.client != self.target,
            "data.target",
            self.target,
            "is the column of the clients too; name another",
        )
        for key in ("client", "target", "test"):
            name = getattr(self, key)
            require(name not in self.drop, "data.drop", name, f"data.{key} needs this column")
        both = [name for name in self.categorical if name in self.drop]
        require(not both, "data.categorical", both, "these columns are in data.drop too")
        require_int("data.seed", self.seed, 0)
        if self.validation_seed is not None:
            require_int("data.validation_seed", self.validation_seed, 0)

    @property
    def text(self) -> tuple[str, ...]:
        """The columns that stay as they are in the file."""
        split = (self.test,) if isinstance(self.test, str) else ()
        return (self.client, self.target, *split, *self.categorical)

    @property
    def origin(self) -> dict[str, Any]:
        """The settings as [data] has them, without the validation data."""
        table = {key: value for key, value in vars(self).items() if value is not None}
        table |= {"drop": list(self.drop), "categorical": list(self.categorical)}
        return {k: v for k, v in table.items() if k not in ("validation", "validation_seed")}

    @property
    def validation_origin(self) -> dict[str, Any]:
        """The settings of the validation data as [data] has them."""
        given = {"validation": self.validation or None, "validation_seed": self.validation_seed}
        return {key: value for key, value in given.items() if value is not None}


def from_csv(
    path: str | os.PathLike[str],
    *,
    client: str,
    target: str,
    task: Task | None = None,
    test: float | str = 0.2,
    validation: float = 0.0,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    missing: Missing = "mean",
    standardize: Standardize = "federated",
    seed: int = 0,
) -> Clients:
    """Make clients from a CSV file with a header: a row is a sample.

    What is learnt about columns comes from training rows only, as sums over clients, and is saved
    with a run in encoding.json. Rows without client or target are left out; a warning counts them.

    Args:
        path: The file, in UTF-8; comma, semicolon, tab or | separate its columns.
        client: The column with the name of each row's client.
        target: The column with the targets.
        task: "classification" or "regression"; None to find it from the targets: text and whole
            numbers with at most 10 different values are classes.
        test: The share of each client's rows that is its test part, with about the same share of
            every class; or the name of a column that says train, test or validation.
        validation: The share of each client's training rows that is its validation data.
        drop: Columns that are no inputs.
        categorical: Columns of numbers that are categories, such as codes. Text always is.
        missing: "mean" replaces a missing number by the mean and adds an input that says where;
            "drop" leaves out rows with a missing value.
        standardize: "federated" subtracts the mean of all clients and divides by the standard
            deviation; "client" uses those of each client; "none" leaves numbers as they are.
            Except for "none", targets that are numbers are standardized over all clients too.
        seed: The seed of the test part and of the validation data.
    """
    settings = TableSettings(
        client, target, task, test, validation, tuple(drop), tuple(categorical), missing,
        standardize, seed,
    )  # fmt: skip
    return clients_from_table(
        read_csv(path, settings.text, settings.drop), settings, os.fspath(path)
    )


def from_parquet(
    path: str | os.PathLike[str],
    *,
    client: str,
    target: str,
    task: Task | None = None,
    test: float | str = 0.2,
    validation: float = 0.0,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    missing: Missing = "mean",
    standardize: Standardize = "federated",
    seed: int = 0,
) -> Clients:
    """Make clients from a Parquet file. The arguments are those of `from_csv`.

    Args:
        path: The file.
        client: The column with the name of each row's client.
        target: The column with the targets.
        task: "classification" or "regression"; None to find it from the targets.
        test: A share, or the name of a column that says train, test or validation.
        validation: The share of each client's training rows that is its validation data.
        drop: Columns that are no inputs.
        categorical: Columns of numbers that are categories.
        missing: "mean" or "drop".
        standardize: "federated", "client" or "none".
        seed: The seed of the test part and of the validation data.
    """
    settings = TableSettings(
        client, target, task, test, validation, tuple(drop), tuple(categorical), missing,
        standardize, seed,
    )  # fmt: skip
    return clients_from_table(read_parquet(path, settings.drop), settings, os.fspath(path))


def from_frame(
    df: object,
    *,
    client: str,
    target: str,
    task: Task | None = None,
    test: float | str = 0.2,
    validation: float = 0.0,
    drop: Sequence[str] = (),
    categorical: Sequence[str] = (),
    missing: Missing = "mean",
    standardize: Standardize = "federated",
    seed: int = 0,
) -> Clients:
    """Make clients from a data frame of pandas or polars. The arguments are those of `from_csv`.

    Args:
        df: The data frame; its index is no column.
        client: The column with the name of each row's client.
        target: The column with the targets.
        task: "classification" or "regression"; None to find it from the targets.
        test: A share, or the name of a column that says train, test or validation.
        validation: The share of each client's training rows that is its validation data.
        drop: Columns that are no inputs.
        categorical: Columns of numbers that are categories.
        missing: "mean" or "drop".
        standardize: "federated", "client" or "none".
        seed: The seed of the test part and of the validation data.
    """
    settings = TableSettings(
        client, target, task, test, validation, tuple(drop), tuple(categorical), missing,
        standardize, seed,
    )  # fmt: skip
    return clients_from_table(read_frame(df, settings.drop), settings, "df")


def read_table(path: str, settings: TableSettings) -> Clients:
    """The clients of `data.path`: a CSV or Parquet file, or a table that comes with fedclade.

    Args:
        path: the path of a file, or the name of a table.
        settings: how the table becomes clients.
    """
    # An absolute path: experiment.toml then runs from any folder.
    source = path if path in BUNDLED_TABLES else str(Path(path).expanduser().resolve())
    return clients_from_table(open_table(path, settings), settings, source)


def open_table(path: str, settings: TableSettings) -> pa.Table:
    """The table of `data.path`, without the columns of `settings.drop`."""
    if path in BUNDLED_TABLES:
        table = BUNDLED_TABLES[path]()
        for name in settings.drop:
            require_column(table.column_names, name, "data.drop")
        return table.drop_columns(list(settings.drop))
    file = Path(path).expanduser()
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        return read_parquet(file, settings.drop)
    if suffix in TABLE_SUFFIXES:
        return read_csv(file, settings.text, settings.drop)
    raise InvalidInputError(
        f"data.path = '{path}': must end with .csv, .tsv, .txt or .parquet, or be the name of a"
        f" table of fedclade ({', '.join(BUNDLED_TABLES)}).",
        "data.path",
    )


def read_rows(path: str | os.PathLike[str], encoding: ColumnEncoding) -> pa.Table:
    """Rows for `ColumnEncoding.encode`, from a CSV or Parquet file.

    Args:
        path: the file.
        encoding: what a run learnt about the columns.
    """
    if Path(path).suffix.lower() == ".parquet":
        return read_parquet(path)
    return read_csv(path, encoding.text_columns)


def clients_from_table(table: pa.Table, settings: TableSettings, source: str) -> Clients:
    """Make clients from a table of pyarrow, from which `settings.drop` is left out already.

    Args:
        table: the table.
        settings: how it becomes clients.
        source: its path or name.
    """
    columns = table.column_names
    for key, names in (
        ("client", [settings.client]),
        ("target", [settings.target]),
        ("test", [settings.test] if isinstance(settings.test, str) else []),
        ("categorical", settings.categorical),
    ):
        for name in names:
            require_column(columns, name, f"data.{key}")
    roles = (settings.client, settings.target, settings.test)
    inputs = [name for name in columns if name not in roles]
    notes = _Notes(source, number_of_rows(table))
    client_ids, client_names = _coded(table, settings.client)
    targets = _Targets.find(table, settings)
    left_out = notes.leave_out(client_ids < 0, f"no value in '{settings.client}'")
    left_out |= notes.leave_out(targets.is_missing & ~left_out, f"no value in '{settings.target}'")
    kinds: dict[str, str] = {
        name: "category" if name in settings.categorical else kind_of(table, name)
        for name in inputs
    }
    if settings.missing == "drop":
        inputs = _without_empty(table, inputs, kinds, ~left_out, notes)
        gaps = np.zeros(len(left_out), bool)
        for name in inputs:
            gaps |= _is_missing(table, name, kinds[name])
        left_out |= notes.leave_out(gaps & ~left_out, "a missing value (data.missing = 'drop')")
    part = _parts(table, settings, client_ids, targets, left_out)
    idle = np.bincount(client_ids[part == TRAIN], minlength=len(client_names)) == 0
    no_training = idle[client_ids] & (part < LEFT_OUT)
    if no_training.any():
        named = [name for name, out in zip(client_names, idle, strict=True) if out]
        notes.leave_out(no_training, f"clients without training rows ({_listed(named)})")
        part[no_training] = LEFT_OUT
    client_ids, client_names = _without_idle(client_ids, client_names, idle)
    if not client_names:
        raise InvalidInputError(
            f"{source}: no row remains ({notes.in_words()}). Check data.client, data.target and"
            " data.missing.",
            source,
        )
    client_names = checked_client_names(client_names, "data.client")
    train = part == TRAIN
    inputs = _without_empty(table, inputs, kinds, train, notes)
    encoding, numbers = _learn(
        table, settings, inputs, kinds, client_ids, client_names, train, targets
    )
    table = table.drop_columns(list(numbers))
    release_memory()  # the inputs need it now
    clients = _build(
        table, settings, encoding, targets, client_ids, client_names, part, source, numbers
    )
    without_test = int((clients.test_sizes == 0).sum())
    if without_test and settings.test:
        have = "client has" if without_test == 1 else "clients have"
        notes.others.append(f"{without_test} {have} too few rows for a test part")
    notes.publish()
    _log.info("%s: %s", source, targets.in_words(settings.target))
    return clients


@dataclass
class _Notes:
    """What is left out of a table, so that nothing is lost without a word."""

    source: str
    rows: int
    counts: dict[str, int] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def leave_out(self, rows: Bools, why: str) -> Bools:
        if rows.any():
            self.counts[why] = int(rows.sum())
        return rows

    def in_words(self) -> str:
        reasons = ", ".join(f"{count:,} with {why}" for why, count in self.counts.items())
        out = [f"{sum(self.counts.values()):,} of {self.rows:,} rows left out: {reasons}"]
        return "; ".join((out if self.counts else []) + self.others)

    def publish(self) -> None:
        if self.counts or self.others:
            message = f"{self.source}: {self.in_words()}."
            warnings.warn(FedcladeWarning(message, self.source), stacklevel=4)


@dataclass(frozen=True)
class _Targets:
    """The targets of all rows: the number of a class, or a number."""

    values: NDArray[Any]  # int64, -1 where it is missing; or float64, NaN where it is missing
    classes: tuple[str, ...] | None

    @property
    def is_missing(self) -> Bools:
        return self.values < 0 if self.classes is not None else np.isnan(self.values)

    @staticmethod
    def find(table: pa.Table, settings: TableSettings) -> _Targets:
        task, name = settings.task or _task(table, settings.target), settings.target
        if task == "regression":
            return _Targets(as_numbers(table, name), None)
        codes, names = _coded(table, name)
        require(
            1 < len(names) <= MAX_CLASSES,
            "data.target",
            name,
            f"the column has {len(names):,} classes{f' ({names[0]})' if len(names) == 1 else ''},"
            f" and 2 to {MAX_CLASSES:,} are allowed; name another column, or set data.task ="
            " 'regression'",
        )
        return _Targets(codes, checked_names(names, f"column '{name}'"))

    def in_words(self, name: str) -> str:
        if self.classes is None:
            return f"target '{name}' holds numbers (task 'regression')."
        listed = _listed(list(self.classes))
        return f"target '{name}' has {len(self.classes)} classes ({listed})."


def _task(table: pa.Table, name: str) -> Task:
    """Text, truth values and a few whole numbers are classes."""
    import pyarrow as pa

    if pa.types.is_boolean(table.column(name).type):
        return "classification"
    try:
        numbers = as_numbers(table, name)
    except InvalidInputError:
        return "classification"
    present = numbers[~np.isnan(numbers)]
    few = len(present) > 0 and len(np.unique(present)) <= MAX_INTEGER_CLASSES
    return "classification" if few and bool((present % 1 == 0).all()) else "regression"


def _coded(table: pa.Table, column: str) -> tuple[Ints, tuple[str, ...]]:
    """The number of each row's text and the texts in order; -1 where there is none."""
    codes, texts = as_codes(table, column)
    names = _ordered(texts)
    number = {name: number for number, name in enumerate(names)}
    return np.array([*(number[text] for text in texts), -1])[codes], tuple(names)


def _ordered(names: Sequence[str]) -> list[str]:
    """Sorted: as numbers if all are finite numbers, otherwise as text."""
    try:
        numbers = [float(name) for name in names]
    except ValueError:
        return sorted(names)
    if not all(map(math.isfinite, numbers)):  # "nan" has no place among numbers
        return sorted(names)
    return [name for _, name in sorted(zip(numbers, names, strict=True))]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _is_missing(table: pa.Table, name: str, kind: str) -> Bools:
    if kind == "number":
        return np.isnan(as_numbers(table, name))
    return as_codes(table, name)[0] < 0


def _without_empty(
    table: pa.Table, inputs: list[str], kinds: dict[str, str], rows: Bools, notes: _Notes
) -> list[str]:
    """The columns that have a value in one of these rows."""
    first = table.slice(int(rows.argmax()), 1)  # most columns have a value in the first of the rows
    empty = [
        name
        for name in inputs
        if _is_missing(first, name, kinds[name])[0]
        and _is_missing(table, name, kinds[name])[rows].all()
    ]
    if len(empty) == len(inputs):
        raise InvalidInputError(
            f"{notes.source}: no column with values remains for the inputs.", notes.source
        )
    if empty:
        notes.others.append(f"columns without a value in training rows left out: {_listed(empty)}")
    return [name for name in inputs if name not in empty]


def _parts(
    table: pa.Table,
    settings: TableSettings,
    client_ids: Ints,
    targets: _Targets,
    left_out: Bools,
) -> NDArray[np.int8]:
    """For each row TRAIN, VALIDATION, TEST or LEFT_OUT."""
    part = np.full(len(left_out), TRAIN, np.int8)
    if isinstance(settings.test, str):
        part = _named_parts(table, settings, left_out)
    part[left_out] = LEFT_OUT
    labels = None if targets.classes is None else targets.values
    own_seed = settings.validation_seed
    for share, kind, seed in (
        (0.0 if isinstance(settings.test, str) else settings.test, TEST, test_seed(settings.seed)),
        (settings.validation, VALIDATION, settings.seed if own_seed is None else own_seed),
    ):
        if share:
            part[is_held_out(client_ids, labels, float(share), seed, part == TRAIN)] = kind
    return part


def _named_parts(table: pa.Table, settings: TableSettings, left_out: Bools) -> NDArray[np.int8]:
    """The part that a column says."""
    assert isinstance(settings.test, str)
    codes, names = _coded(table, settings.test)
    parts = np.array([TRAIN_OR_TEST.get(name.lower(), -1) for name in names] + [-1], np.int8)
    part = parts[codes]  # -1, a missing value, is the last
    wrong = (part < 0) & ~left_out
    if wrong.any():
        row = int(wrong.argmax())
        value = "no value" if codes[row] < 0 else repr(names[codes[row]])
        raise InvalidInputError(
            f"column '{settings.test}', {location(table, row)}: {value}; data.test names this"
            " column, so it must say train, test or validation.",
            "data.test",
        )
    require(
        not settings.validation or not (part == VALIDATION).any(),
        "data.validation",
        settings.validation,
        f"the column '{settings.test}' has validation rows already; leave it at 0",
    )
    return part


def _without_idle(
    client_ids: Ints, names: Sequence[str], idle: Bools
) -> tuple[Ints, tuple[str, ...]]:
    """Clients numbered again, without those that have no training rows."""
    number = np.where(idle, -1, np.cumsum(~idle) - 1)
    ids = np.append(number, -1)[client_ids]  # -1, no client, is the last
    return ids, tuple(name for name, out in zip(names, idle, strict=True) if not out)


def _learn(
    table: pa.Table,
    settings: TableSettings,
    inputs: Sequence[str],
    kinds: dict[str, str],
    client_ids: Ints,
    client_names: Sequence[str],
    train: Bools,
    targets: _Targets,
) -> tuple[ColumnEncoding, dict[str, EncodedNumbers]]:
    """What the training rows say about the columns, and the encoded columns of numbers. Clients
    contribute sums only: counts, sums, sums of squared distances from the mean, and the counts of
    categories.
    """
    by_client_rows = rows_by_client(client_ids, len(client_names), train)
    rows = np.concatenate(by_client_rows)
    starts = np.cumsum([0, *map(len, by_client_rows[:-1])])

    def learn(
        name: str, numbers: NDArray[np.float64], sorted_numbers: NDArray[np.float64]
    ) -> _LearntNumbers:
        as_numbers(table, name, numbers)
        np.take(numbers, rows, out=sorted_numbers, mode="clip")
        sums = _Sums.of(sorted_numbers, starts)
        flag = settings.missing == "mean" and int(sums.counts.sum()) < len(rows)
        column = NumberColumn(name, sums.mean, sums.scale, flag)
        means, scales = np.array([sums.mean]), np.array([sums.scale])
        if settings.standardize == "client":
            own_means, own_scales = sums.by_client()
            means, scales = np.append(own_means, means), np.append(own_scales, scales)
        encoded = column.encode(numbers, settings.standardize, (means, scales), client_ids)
        return _LearntNumbers(column, means, scales, encoded)

    def learn_some(names: Sequence[str]) -> list[_LearntNumbers]:
        # Memory that the columns use in turn: new memory takes longer than the work on it.
        numbers, sorted_numbers = np.empty(len(train)), np.empty(len(rows))
        return [learn(name, numbers, sorted_numbers) for name in names]

    names = [name for name in inputs if kinds[name] == "number"]
    with ThreadPoolExecutor(THREADS) as threads:
        some = threads.map(learn_some, (names[first::THREADS] for first in range(THREADS)))
    learnt = {one.column.name: one for learnt_some in some for one in learnt_some}
    columns = tuple(
        learnt[name].column if name in learnt else _category_column(table, name, train, settings)
        for name in inputs
    )
    target_mean, target_scale = 0.0, 1.0
    if targets.classes is None and settings.standardize != "none":
        target = _Sums.of(targets.values[rows], starts)
        target_mean, target_scale = target.mean, target.scale
    by_client = None
    if settings.standardize == "client":
        by_client = {
            name: ClientScale(
                tuple(float(learnt[column].means[number]) for column in names),
                tuple(float(learnt[column].scales[number]) for column in names),
            )
            for number, name in enumerate(client_names)
        }
    encoding = ColumnEncoding(
        settings.client,
        settings.target,
        "regression" if targets.classes is None else "classification",
        columns,
        targets.classes,
        target_mean,
        target_scale,
        settings.missing,
        settings.standardize,
        by_client,
    )
    return encoding, {name: column.encoded for name, column in learnt.items()}


class _LearntNumbers(NamedTuple):
    """A column of numbers: its mean and scale for all clients, or for each client and for all."""

    column: NumberColumn
    means: NDArray[np.float64]
    scales: NDArray[np.float64]
    encoded: EncodedNumbers


@dataclass(frozen=True)
class _Sums:
    """The sums of a column over the training rows of each client that have a value."""

    counts: NDArray[np.float64]
    totals: NDArray[np.float64]
    squares: NDArray[np.float64]  # of distances from the mean of all clients

    @staticmethod
    def of(values: NDArray[np.float64], starts: Ints) -> _Sums:
        """The sums of values that are sorted by client; they are overwritten.

        Args:
            values: the values of all training rows, NaN where one is missing.
            starts: the place of the first value of each client.
        """
        missing = np.isnan(values).nonzero()[0]
        ends = np.append(starts[1:], len(values))
        missing_by_client = np.searchsorted(missing, ends) - np.searchsorted(missing, starts)
        counts = (ends - starts - missing_by_client).astype(np.float64)
        values[missing] = 0
        totals = np.add.reduceat(values, starts)
        mean = totals.sum() / max(1.0, counts.sum())
        # A second exchange of sums: squares of large numbers would lose their last digits.
        values -= mean
        values *= values
        values[missing] = 0
        return _Sums(counts, totals, np.add.reduceat(values, starts))

    @property
    def mean(self) -> float:
        return float(self.totals.sum() / max(1.0, self.counts.sum()))

    @property
    def scale(self) -> float:
        scale = float(np.sqrt(self.squares.sum() / max(1.0, self.counts.sum())))
        return scale if scale > 1e-9 * abs(self.mean) and scale > 0 else 1.0

    def by_client(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The mean and the standard deviation of each client; those of all where a client has no
        value, or equal values only.
        """
        counts = np.maximum(self.counts, 1)
        means = np.where(self.counts > 0, self.totals / counts, self.mean)
        variances = np.maximum(self.squares / counts - (means - self.mean) ** 2, 0)
        scales = np.sqrt(variances)
        equal = scales <= 1e-6 * np.maximum(self.scale, 1e-3 * np.abs(means))
        return means, np.where(equal, self.scale, scales)


def _category_column(
    table: pa.Table, name: str, train: Bools, settings: TableSettings
) -> CategoryColumn:
    codes, texts = as_codes(table, name)
    counts = np.bincount(codes[train] + 1, minlength=len(texts) + 1)
    names = _ordered([text for text, count in zip(texts, counts[1:], strict=True) if count])
    listed = name in settings.categorical
    most = MAX_LISTED_CATEGORIES if listed else MAX_CATEGORIES
    if len(names) > most:
        advice = "list it in data.drop" + ("" if listed else " or in data.categorical")
        raise InvalidInputError(
            f"column '{name}': {len(names):,} different texts such as {shown(names[0])}, above the"
            f" limit of {most:,}. If it holds ids or free text, {advice}. If it holds numbers,"
            " write them without units and without separators of thousands.",
            name,
        )
    return CategoryColumn(name, tuple(names), settings.missing == "mean" and bool(counts[0]))


def _build(
    table: pa.Table,
    settings: TableSettings,
    encoding: ColumnEncoding,
    targets: _Targets,
    client_ids: Ints,
    client_names: tuple[str, ...],
    part: NDArray[np.int8],
    source: str,
    numbers: dict[str, EncodedNumbers],
) -> Clients:
    features = checked_names(encoding.feature_names, "columns")
    pool, held = (part <= VALIDATION).nonzero()[0], (part == TEST).nonzero()[0]
    safe_read.fit(source, 4 * len(features) * (len(pool) + len(held)), "as inputs")
    x, x_test = torch.empty(len(pool), len(features)), torch.empty(len(held), len(features))
    encoding.encode_rows(table, client_ids, ((x, pool), (x_test, held)), numbers)
    place = np.full(len(part), -1)  # of a row of the table in its pool
    place[pool], place[held] = np.arange(len(pool)), np.arange(len(held))

    def index(kind: int) -> list[Tensor]:
        rows = rows_by_client(client_ids, len(client_names), part == kind)
        return [torch.from_numpy(place[own]) for own in rows]

    def y(rows: Ints) -> Tensor:
        values = targets.values[rows]
        if targets.classes is not None:
            return torch.from_numpy(values)
        return torch.from_numpy((values - encoding.target_mean) / encoding.target_scale).float()

    test = index(TEST)
    part_ids = iter(range(len(test)))
    validation = RaggedIndex.of(index(VALIDATION)) if (part == VALIDATION).any() else None
    return Clients(
        x,
        y(pool),
        RaggedIndex.of(index(TRAIN)),
        x_test,
        y(held),
        RaggedIndex.of(rows for rows in test if len(rows)),
        test_part_id=torch.tensor([next(part_ids) if len(rows) else -1 for rows in test]),
        test_sample_id=torch.arange(len(held)),
        classes=None if targets.classes is None else len(targets.classes),
        dataset=source,
        partition=f"column {settings.client}",
        origin={"seed": settings.seed},
        names=Names(client_names, targets.classes, features),
        validation=validation,
        validation_origin=settings.validation_origin,
        encoding=encoding,
        data_origin={"path": source, **settings.origin},
    )
