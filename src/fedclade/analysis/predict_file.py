"""Predictions for new rows: a CSV or Parquet file where the data are a table, a CSV file of texts,
a folder of images, or an .npz file.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.data.column_encoding import ColumnEncoding, category_codes
from fedclade.data.datasets import read_npz
from fedclade.data.image_encoding import ImageEncoding
from fedclade.data.image_folders import image_files
from fedclade.data.table_columns import as_numbers, as_text, location
from fedclade.data.tables import read_rows
from fedclade.data.text_encoding import TextEncoding
from fedclade.data.texts import read_text_file
from fedclade.errors import FedcladeWarning, InvalidInputError, nearest
from fedclade.training.result import Result

if TYPE_CHECKING:
    import pyarrow as pa

_PER_WORD = {"tagging": "tag for each word", "language_model": "word after each word"}


@dataclass(frozen=True)
class FilePredictions:
    """Predictions for the rows of a file.

    Args:
        columns: for each column its values, in the order of the rows: "file" for images,
            "prediction", and the probability of each class if it is asked for.
        closest_client: for a new client, the client whose model is used; else None.
    """

    columns: dict[str, list[Any]]
    closest_client: int | str | None = None


@dataclass(frozen=True)
class _Rows:
    """What is read from a file, or from a folder of images.

    Args:
        x: the inputs.
        clients: the client of each row; None if the file does not say it.
        y: the targets, of labeled rows only.
        files: the names of the images; None for other rows.
    """

    x: object
    clients: list[str | None] | None = None
    y: object = None
    files: list[str] | None = None


def predict_file(
    result: Result,
    rows: Path,
    client: str | None = None,
    labeled: Path | None = None,
    probability: bool = False,
) -> FilePredictions:
    """Predict the rows of a file, by the model of one client or, if a table has a column with the
    client of each row, by the models of these clients.

    Args:
        result: the run.
        rows: what the training data were: CSV or Parquet with their columns, CSV with the column of
            the texts, or an image or a folder of images; or .npz with x.
        client: the client of all rows, its name or number.
        labeled: in place of `client`, for a client that was not in the run: a file of rows with
            targets (the column of the training data, or y in .npz), or a folder with a folder of
            images for each class.
        probability: whether to add the probability of each class.
    """
    if client is not None and labeled is not None:
        raise InvalidInputError("--labeled: give it or --client, not both.", "--labeled")
    closest = None
    if labeled is not None:
        few = _read(result, labeled, with_targets=True)
        closest = result.closest_client(few.x, few.y)
    elif client is not None:
        closest = _known(result, client)
    new = _read(result, rows, client)
    if closest is not None:
        outputs = result.predict(new.x, closest, kind="output")
    elif new.clients is not None:
        outputs = _by_client(result, new.x, new.clients)
    else:
        raise InvalidInputError(
            f"--client: {rows} does not name the client of a row. Give --client NAME, or for a new"
            " client --labeled FILE.",
            "--client",
        )
    columns: dict[str, list[Any]] = {} if new.files is None else {"file": list(new.files)}
    columns |= _columns(result, outputs, probability)
    return FilePredictions(columns, closest if labeled is not None else None)


def _read(
    result: Result, path: Path, client: str | None = None, with_targets: bool = False
) -> _Rows:
    """The rows of a file, as the models of the run read them."""
    encoding = result.encoding
    if path.suffix.lower() == ".npz":
        arrays = read_npz(path, ("x", "y") if with_targets else ("x",))
        return _Rows(arrays["x"], y=arrays.get("y"))
    if isinstance(encoding, ImageEncoding):
        return _images(result, encoding, path, with_targets)
    if isinstance(encoding, TextEncoding):
        return _texts(result, encoding, path, with_targets)
    if isinstance(encoding, ColumnEncoding):
        return _table(encoding, path, client, with_targets)
    raise InvalidInputError(
        f"{path}: the data of this run are no table, texts or folder of images, so it cannot be"
        " read as they were. Give an .npz file with the array x (np.savez).",
        str(path),
    )


def _images(result: Result, encoding: ImageEncoding, path: Path, with_targets: bool) -> _Rows:
    files = image_files(path)
    y = None
    if with_targets:
        y = _labels(result, [file.parent.name for file in files], "--labeled")
    names = [str(file.relative_to(path)) if path.is_dir() else str(file) for file in files]
    return _Rows(encoding.encode(files), y=y, files=names)


def _texts(result: Result, encoding: TextEncoding, path: Path, with_targets: bool) -> _Rows:
    if encoding.task != "classification":
        raise InvalidInputError(
            f"{path}: the models of this run predict a {_PER_WORD[encoding.task]}, which a table"
            " cannot hold. Use result.predict([text, …], client=…) in Python.",
            str(path),
        )
    columns = read_text_file(path)
    for name, needed in ((encoding.text, True), (encoding.target, with_targets)):
        if needed and name not in columns:
            raise InvalidInputError(
                f"column '{name}': missing in {path}.{nearest(str(name), columns)}", str(name)
            )
    clients = columns.get(encoding.client)
    if not columns[encoding.text]:
        raise InvalidInputError(f"{path}: it has no rows.", str(path))
    y = (
        _labels(result, columns[str(encoding.target)], str(encoding.target))
        if with_targets
        else None
    )
    return _Rows(encoding.encode(columns[encoding.text]), clients, y)


def _table(encoding: ColumnEncoding, path: Path, client: str | None, with_targets: bool) -> _Rows:
    table = read_rows(path, encoding)
    if with_targets and encoding.target not in table.column_names:
        raise InvalidInputError(
            f"column '{encoding.target}': missing in {path}. Labeled rows need it."
            f"{nearest(encoding.target, table.column_names)}",
            encoding.target,
        )
    x = encoding.encode(table, client)
    _warn_of_unknown_categories(table, encoding)
    if with_targets:
        return _Rows(x, y=_targets(table, encoding))
    return _Rows(x, None if client is not None else _client_column(table, encoding))


def _labels(result: Result, names: Sequence[str], field: str) -> NDArray[np.int64]:
    """The numbers of these classes."""
    classes = result.names.classes or ()
    for name in names:
        if name not in classes:
            raise InvalidInputError(
                f"{field}: the run has no class {name!r}.{nearest(name, classes)}", field
            )
    return np.array([classes.index(name) for name in names])


def _known(result: Result, client: str) -> int | str:
    """A client of the run as the user writes it; clients without names have numbers."""
    named = result.names.clients is not None or not client.isdecimal()
    known = client if named else int(client)
    try:
        result.cluster_of(known)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"{error} For a client that was not in the run give a few of its rows with targets:"
            " --labeled FILE.",
            error.field,
        ) from error
    return known


def _client_column(table: pa.Table, encoding: ColumnEncoding) -> list[str | None] | None:
    """The client of each row; None if the table has no such column."""
    if encoding.client not in table.column_names:
        return None
    names: list[str | None] = as_text(table, encoding.client).to_pylist()
    if None in names:
        where = location(table, names.index(None))
        raise InvalidInputError(
            f"column '{encoding.client}', {where}: the row has no client.", encoding.client
        )
    return names


def _warn_of_unknown_categories(table: pa.Table, encoding: ColumnEncoding) -> None:
    """A typing error in a category changes predictions, and no number shows it."""
    for column in encoding.columns:
        if column.kind != "category":
            continue
        codes, names = category_codes(table, column)
        new = np.array([name not in column.categories for name in names] + [False])
        unknown = [names[code] for code in codes[new[codes]].tolist()]
        if unknown:
            rows = "1 row has" if len(unknown) == 1 else f"{len(unknown):,} rows have"
            message = (
                f"column '{column.name}': {rows} a category that no training row has, the first is"
                f" {unknown[0]!r}.{nearest(unknown[0], column.categories)} The models read it as"
                " none of the known ones."
            )
            warnings.warn(FedcladeWarning(message, column.name), stacklevel=3)


def _by_client(result: Result, x: object, clients: list[str | None]) -> Tensor:
    """The outputs for each row by the model of its client."""
    assert isinstance(x, Tensor)
    names = np.array(clients, dtype=object)
    outputs: Tensor | None = None
    for name in dict.fromkeys(clients):
        chosen = torch.from_numpy(names == name)
        part = result.predict(x[chosen], _known(result, str(name)), kind="output")
        if outputs is None:
            outputs = part.new_empty(len(x), *part.shape[1:])
        outputs[chosen] = part
    assert outputs is not None  # a table without rows is refused when it is read
    return outputs


def _targets(table: pa.Table, encoding: ColumnEncoding) -> NDArray[np.generic]:
    """The targets of labeled rows as a model predicts them."""
    if encoding.classes is None:
        numbers = as_numbers(table, encoding.target)
        if np.isnan(numbers).any():
            raise _bad_target(table, encoding, int(np.isnan(numbers).argmax()), "no value", "")
        return (numbers - encoding.target_mean) / encoding.target_scale
    label = {name: number for number, name in enumerate(encoding.classes)}
    names = as_text(table, encoding.target).to_pylist()
    for row, name in enumerate(names):
        if name not in label:
            hint = nearest(name or "", encoding.classes)
            raise _bad_target(table, encoding, row, f"the class {name!r}", hint)
    return np.array([label[name] for name in names])


def _bad_target(
    table: pa.Table, encoding: ColumnEncoding, row: int, what: str, hint: str
) -> InvalidInputError:
    return InvalidInputError(
        f"column '{encoding.target}', {location(table, row)}: {what}; the run has no such"
        f" target.{hint}",
        encoding.target,
    )


def _columns(result: Result, outputs: Tensor, probability: bool) -> dict[str, list[Any]]:
    """The columns of the file of predictions, with the names of classes."""
    labels = result.task.decode(outputs, "label")
    encoding = result.encoding
    if isinstance(encoding, ColumnEncoding) and encoding.classes is None:
        labels = labels.double() * encoding.target_scale + encoding.target_mean
    parts = [labels] if labels.ndim == 1 else list(labels.flatten(1).unbind(1))
    columns: dict[str, list[Any]] = {}
    for place, part in enumerate(parts):
        name = "prediction" if labels.ndim == 1 else f"prediction {place}"
        columns[name] = _values(part)
        if result.task.is_classification:
            columns[name] = [result.names.class_name(label) for label in part.tolist()]
    if probability:
        result.task.check_kind("probability")
        values = result.task.decode(outputs, "probability")
        values = values.unsqueeze(1) if values.ndim == 1 else values.flatten(1)
        for place, part in enumerate(values.unbind(1)):
            columns[f"probability {result.names.class_name(place)}"] = _values(part)
    return columns


def _values(column: Tensor) -> list[float]:
    """Numbers without the digits that float32 does not have."""
    return [float(f"{value:.7g}") for value in column.tolist()]
