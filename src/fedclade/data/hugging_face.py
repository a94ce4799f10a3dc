"""Clients from data sets of Hugging Face, and from partitions of Flower Datasets.

No class of these packages is needed: a data set is an object with `column_names`, `features`,
`with_format` and rows by number, and a federation is an object with `load_partition`. Only a data
set on disk needs the package `datasets`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core.inputs import Inputs, map_inputs, samples_in, tensors_of
from fedclade.core.names import Names, checked_client_names, checked_names
from fedclade.data import array_checks
from fedclade.data.client_rows import Rows, check_test_share, clients_of_rows, is_test_row
from fedclade.data.federated_dataset import Clients
from fedclade.errors import InvalidInputError, nearest, require
from fedclade.io import safe_read

Array: TypeAlias = NDArray[np.generic]
_SPLITS = ("train", "test")
_BLOCK_BYTES = 1 << 26  # of inputs that are read at once
_SHARE_OF_MEMORY = 0.5  # that inputs in memory may need


@dataclass(frozen=True)
class _Table:
    """Rows of a data set: the columns that are read.

    Args:
        data: the data set.
        is_test: whether these are test rows; None if a share of them is.
        client: the name of the client of all rows; None if a column has it.
    """

    data: Any
    is_test: bool | None
    client: str | None

    @property
    def where(self) -> str:
        """What messages start with."""
        return "" if self.client is None else f"client {self.client}: "


def from_hf(
    data: Any,
    *,
    x: str | Sequence[str],
    target: str,
    client: str | None = None,
    test: float = 0.2,
    seed: int = 0,
) -> Clients:
    """Make clients from a data set of Hugging Face.

    Inputs of more than half of the machine's memory are copied once, some rows at a time, to a
    temporary file that is memory-mapped: a run then reads the samples of its batches only.

    Args:
        data: A `datasets.Dataset`; a `DatasetDict` with the splits train and test; the folder of
            one of them (`save_to_disk`), which needs the extra `hf`; or an object with
            `load_partition(i)` such as a `FederatedDataset` or a partitioner of Flower Datasets,
            whose partitions are the clients.
        x: The column of the inputs: numbers, arrays of one shape, or images of one size. Several
            columns of numbers are the features of one input; several columns of which one has
            arrays are the model's arguments by name.
        target: The column of the targets. Text, whole numbers and `ClassLabel` are classes, other
            numbers are regression targets.
        client: The column with the client of each row; its values are the names of the clients.
            None for an object with `load_partition`.
        test: The share of each client's rows that is its test part, if there is no split test;
            every class has about the same share. 0 for no test part.
        seed: The seed of that split.
    """
    check_test_share(test, seed)
    columns = [x] if isinstance(x, str) else list(x)
    require(
        len(columns) > 0 and all(isinstance(name, str) for name in columns),
        "x",
        x,
        "must be the name of a column, or several",
    )
    tables = _tables(data, client)
    needed = [target, *([] if client is None else [client])]
    read = [_read(table, needed) for table in tables]
    joined = {name: _joined(name, tables, [part[name] for part in read]) for name in needed}
    features = tables[0].data.features
    y, classes = _targets(joined[target], target, _class_names(features, target))
    if client is not None:
        numbers, client_names = _clients(joined[client], client, _class_names(features, client))
    else:
        client_names = checked_client_names([str(table.client) for table in tables], "client")
        sizes = torch.tensor([len(table.data) for table in tables])
        numbers = torch.arange(len(tables)).repeat_interleave(sizes)
    labels = array_checks.targets(y, target)
    held_out = torch.cat([torch.full((len(t.data),), bool(t.is_test)) for t in tables])
    if all(table.is_test is None for table in tables):
        one_label = labels if not labels.is_floating_point() and labels.ndim == 1 else None
        held_out = is_test_row(numbers, one_label, test, seed)
    x_train, x_test = _read_inputs(tables, columns, held_out)
    train = Rows(x_train, labels[~held_out], numbers[~held_out])
    rest = Rows(x_test, labels[held_out], numbers[held_out])
    number = None if labels.is_floating_point() else int(labels.max()) + 1
    if classes is not None and number is not None:
        number = max(number, len(classes))
    return clients_of_rows(
        train, rest, Names(client_names, classes, _feature_names(x_train, columns)), number, "hf"
    )


def _tables(data: Any, client: str | None) -> list[_Table]:
    """The parts of the data: one, the splits train and test, or the partitions."""
    if isinstance(data, str | os.PathLike):
        data = load_saved(Path(data).expanduser())
    if hasattr(data, "load_partition"):
        require(client is None, "client", client, "must be None: a partition is a client")
        return _partitions(data)
    if client is None:
        raise InvalidInputError(
            "client: give the column with the client of each row. Only an object with"
            " load_partition needs none.",
            "client",
        )
    return _splits(data, None)


def _splits(data: Any, client: str | None) -> list[_Table]:
    where = "data" if client is None else f"client {client}"
    if not isinstance(data, Mapping):
        return [_Table(_checked(data, where), None, client)]
    others = [str(split) for split in data if split not in _SPLITS]
    if others or "train" not in data:
        raise InvalidInputError(
            f"{where}: it has the splits {', '.join(map(str, data))}. Give a dictionary with the"
            " splits train and, if there is one, test.",
            where,
        )
    if len(data) == 1:
        return [_Table(_checked(data["train"], where), None, client)]
    return [_Table(_checked(data[split], where), split == "test", client) for split in _SPLITS]


def _partitions(data: Any) -> list[_Table]:
    """The partitions of a `FederatedDataset`, or of a partitioner of Flower Datasets."""
    known = getattr(data, "partitioners", None)
    if isinstance(known, Mapping) and len(known) > 1:
        raise InvalidInputError(
            f"data: it has partitioners of the splits {', '.join(map(str, known))}. Give one of one"
            " split; `test` sets a share of each partition aside.",
            "data",
        )
    first = data.load_partition(0)  # a FederatedDataset has its partitioner ready only then
    partitioner = next(iter(known.values())) if isinstance(known, Mapping) and known else data
    number = getattr(partitioner, "num_partitions", None)
    if not isinstance(number, int) or number < 1:
        raise InvalidInputError(
            f"data: {type(data).__name__} has load_partition, but not the number of partitions. Set"
            " its attribute num_partitions.",
            "data",
        )
    ids = getattr(partitioner, "partition_id_to_natural_id", None) or {}
    tables: list[_Table] = []
    for partition in range(number):
        part = first if partition == 0 else data.load_partition(partition)
        if isinstance(part, Mapping):
            raise InvalidInputError(
                f"data: partition {partition} has the splits {', '.join(map(str, part))}. Give"
                " partitions of one split; `test` sets a share of each aside.",
                "data",
            )
        name = str(ids.get(partition, partition))
        tables.append(_Table(_checked(part, f"client {name}"), None, name))
    return tables


def _checked(data: Any, where: str) -> Any:
    needed = ("column_names", "features", "with_format", "__len__", "__getitem__")
    if missing := [name for name in needed if not hasattr(data, name)]:
        raise InvalidInputError(
            f"{where}: {type(data).__name__} has no {', '.join(missing)}. Give a datasets.Dataset"
            " (not a streamed one), a DatasetDict, the folder of one, or an object with"
            " load_partition.",
            where,
        )
    if len(data) == 0:
        raise InvalidInputError(f"{where}: there are no rows. Give at least one.", where)
    return data


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def load_saved(path: Path) -> Any:
    """The data set in a folder that `save_to_disk` wrote.

    Args:
        path: the folder.
    """
    if not path.is_dir():
        raise InvalidInputError(
            f"data = '{path}': there is no such folder. Give a folder that save_to_disk wrote;"
            " nothing is downloaded.",
            "data",
        )
    try:
        package = import_module("datasets")
    except ImportError as error:
        raise InvalidInputError(
            f"datasets: it is not installed ({error}); pip install 'fedclade[hf]'.", "datasets"
        ) from error
    try:
        return package.load_from_disk(str(path))
    except Exception as error:  # of datasets, pyarrow and json
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InvalidInputError(
            f"data = '{path}': datasets cannot read it ({reason}).", "data"
        ) from error


def _columns(table: _Table, columns: Sequence[str]) -> Any:
    """The rows of a table with these columns, as arrays."""
    for name in columns:
        if name not in table.data.column_names:
            raise InvalidInputError(
                f"{table.where}there is no column {name!r}."
                f"{nearest(name, table.data.column_names)}",
                name,
            )
    return table.data.select_columns(list(dict.fromkeys(columns))).with_format("numpy")


def _bytes_of_a_row(rows: Any) -> int:
    return sum(np.asarray(value).nbytes for value in rows[0].values())


def _arrays(table: _Table, values: Mapping[str, Any]) -> dict[str, Array]:
    """Some rows of each column."""
    arrays: dict[str, Array] = {}
    for name, value in values.items():
        array = np.asarray(value)
        feature = table.data.features[name]
        if hasattr(feature, "shape") and feature.dtype == "uint8" and array.dtype.kind == "i":
            array = array.astype(np.uint8)  # `datasets` makes int64 of it; it is an image
        arrays[name] = array
        if array.dtype.kind == "O":
            raise InvalidInputError(
                f"{table.where}column {name!r} has missing values, or rows of different shapes."
                " Fill or filter them, and give all rows one shape.",
                name,
            )
    return arrays


def _read(table: _Table, columns: Sequence[str]) -> dict[str, Array]:
    """The columns of a table as arrays."""
    rows = _columns(table, columns)
    safe_read.fit(table.where or "data", len(rows) * _bytes_of_a_row(rows), "of columns")
    return _arrays(table, rows[:])


def _read_inputs(
    tables: Sequence[_Table], columns: Sequence[str], held_out: Tensor
) -> tuple[Inputs, Inputs]:
    """The inputs of the training rows and of the test rows.

    Args:
        tables: the parts of the data.
        columns: the columns of the inputs.
        held_out: (rows of all tables,) whether each row is a test row.
    """
    pools: list[Inputs] = []  # of the training rows and of the test rows
    ends = [0, 0]  # of the rows that each of them has
    first_arrays: dict[str, Array] = {}
    start = 0  # of a block in the rows of all tables
    for table in tables:
        rows = _columns(table, columns)
        step = max(1, _BLOCK_BYTES // max(1, _bytes_of_a_row(rows)))
        for first in range(0, len(rows), step):
            arrays = _arrays(table, rows[first : first + step])
            first_arrays = first_arrays or arrays
            for name in columns:
                _require_same_kind(name, table, arrays[name], first_arrays[name])
            block = array_checks.inputs(
                _inputs(arrays, columns), "x" if start == 0 else f"x[{start}:]"
            )
            is_test = held_out[start : start + samples_in(block)]
            start += len(is_test)
            if not pools:
                pools = _pools(block, [int((~held_out).sum()), int(held_out.sum())])
            for number, chosen in enumerate((~is_test, is_test)):
                begin, ends[number] = ends[number], ends[number] + int(chosen.sum())
                pairs = zip(tensors_of(pools[number]), tensors_of(block), strict=True)
                for into, values in pairs:
                    into[begin : ends[number]] = values[chosen]
    return pools[0], pools[1]


def _pools(block: Inputs, sizes: Sequence[int]) -> list[Inputs]:
    """Tensors for inputs like these, in memory or in temporary files.

    Args:
        block: inputs.
        sizes: the number of samples of each pool.
    """
    size = sum(value[0].nbytes for value in tensors_of(block)) * sum(sizes)
    if size <= _SHARE_OF_MEMORY * safe_read.memory():
        return [map_inputs(partial(_empty, samples=samples), block) for samples in sizes]
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if size > free:
        raise InvalidInputError(
            f"data: inputs of {size:,} bytes need a temporary file, and {folder} has {free:,} bytes"
            " free. Set the environment variable TMPDIR to a folder with more room.",
            "data",
        )
    return [map_inputs(partial(_mapped, samples=samples), block) for samples in sizes]


def _empty(like: Tensor, samples: int) -> Tensor:
    return like.new_empty(samples, *like.shape[1:])


def _mapped(like: Tensor, samples: int) -> Tensor:
    if samples == 0:
        return _empty(like, 0)
    shape = (samples, *like.shape[1:])
    # The file has no name: the system frees it when no tensor needs it any more.
    with tempfile.TemporaryFile() as file:
        return torch.from_numpy(np.memmap(file, like.numpy().dtype, "w+", shape=shape))


def _joined(name: str, tables: Sequence[_Table], parts: Sequence[Array]) -> Array:
    for table, part in zip(tables, parts, strict=True):
        _require_same_kind(name, table, part, parts[0])
    return np.concatenate(parts)


def _require_same_kind(name: str, table: _Table, array: Array, first: Array) -> None:
    if array.shape[1:] != first.shape[1:] or array.dtype.kind != first.dtype.kind:
        raise InvalidInputError(
            f"{table.where}column {name!r} has rows of shape {array.shape[1:]} and type"
            f" {array.dtype}, other rows have shape {first.shape[1:]} and type {first.dtype}: make"
            " them equal.",
            name,
        )


def _inputs(columns: Mapping[str, Array], names: Sequence[str]) -> object:
    if all(columns[name].ndim == 1 for name in names):
        for name in names:
            if columns[name].dtype.kind not in "biuf":
                raise InvalidInputError(
                    f"column {name!r} holds text: convert it to numbers first (fc.data.from_text"
                    " reads text).",
                    name,
                )
        return np.stack([columns[name].astype(np.float32) for name in names], axis=1)
    return columns[names[0]] if len(names) == 1 else {name: columns[name] for name in names}


def _feature_names(inputs: Inputs, columns: Sequence[str]) -> tuple[str, ...] | None:
    """The names of the columns, if each is one feature."""
    if isinstance(inputs, Tensor) and inputs.ndim == 2 and inputs.shape[1] == len(columns):
        return checked_names(columns, "x")
    return None


def _class_names(features: Mapping[str, Any], column: str) -> tuple[str, ...] | None:
    """The names of the classes of a column of type `ClassLabel`."""
    names = getattr(features[column], "names", None)
    return None if names is None else checked_names(names, column)


def _targets(
    values: Array, column: str, names: tuple[str, ...] | None
) -> tuple[Array, tuple[str, ...] | None]:
    """Targets as numbers, and the names of the classes if they have any."""
    if values.dtype.kind not in "US":
        return values, names
    texts, numbers = np.unique(values, return_inverse=True)
    return numbers.reshape(values.shape), checked_names(array_checks.as_texts(texts), column)


def _clients(
    values: Array, column: str, names: tuple[str, ...] | None
) -> tuple[Tensor, tuple[str, ...]]:
    """The number of each row's client, and the names of the clients, in their sorted order."""
    if values.ndim != 1 or values.dtype.kind not in "iuUS":
        raise InvalidInputError(
            f"client: column {column!r} has type {values.dtype} and rows of shape"
            f" {values.shape[1:]}: it must hold text or whole numbers, without missing values.",
            "client",
        )
    known, numbers = np.unique(values, return_inverse=True)
    texts = array_checks.as_texts(known)
    if names is not None:
        texts = [names[int(value)] for value in known]
    return torch.from_numpy(numbers), checked_client_names(texts, "client")
