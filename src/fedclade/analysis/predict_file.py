"""Predictions for the rows of a file: CSV or Parquet where the data are a table, else .npz."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.data.column_encoding import ColumnEncoding, category_codes
from fedclade.data.datasets import read_npz
from fedclade.data.table_columns import as_numbers, as_text, location
from fedclade.data.tables import read_rows
from fedclade.errors import FedcladeWarning, InvalidInputError, nearest
from fedclade.training.result import Result

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class FilePredictions:
    """Predictions for the rows of a file.

    Args:
        columns: for each column its values, in the order of the rows: "prediction", and the
            probability of each class if it is asked for.
        closest_client: for a new client, the client whose model is used; else None.
    """

    columns: dict[str, list[Any]]
    closest_client: int | str | None = None


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
        rows: a file of rows: CSV or Parquet with the columns of the training data, or .npz with x.
        client: the client of all rows, its name or number.
        labeled: in place of `client`, for a client that was not in the run: a file of rows with
            targets (the column of the training data, or y in .npz).
        probability: whether to add the probability of each class.
    """
    if client is not None and labeled is not None:
        raise InvalidInputError("--labeled: give it or --client, not both.", "--labeled")
    closest = None
    if labeled is not None:
        closest = result.closest_client(*_labeled(result, labeled))
    elif client is not None:
        closest = _known(result, client)
    if rows.suffix.lower() == ".npz":
        x: object = read_npz(rows, ("x",))["x"]
        clients = None
    else:
        encoding = _encoding(result, rows)
        table = read_rows(rows, encoding)
        x = encoding.encode(table, client)
        _warn_of_unknown_categories(table, encoding)
        clients = None if closest is not None else _client_column(table, encoding)
    if clients is not None:
        outputs = _by_client(result, x, clients)
    elif closest is not None:
        outputs = result.predict(x, closest, kind="output")
    else:
        raise InvalidInputError(
            f"--client: {rows} does not name the client of a row. Give --client NAME, or for a new"
            " client --labeled FILE.",
            "--client",
        )
    columns = _columns(result, outputs, probability)
    return FilePredictions(columns, closest if labeled is not None else None)


def _known(result: Result, client: str) -> int | str:
    """A client of the run as the user writes it; clients without names have numbers."""
    named = result.names.clients is not None or not client.isdecimal()
    known = client if named else int(client)
    result.cluster_of(known)  # raises if there is no such client
    return known


def _encoding(result: Result, path: Path) -> ColumnEncoding:
    if result.columns is None:
        raise InvalidInputError(
            f"{path}: the data of this run are no table, so no columns are known. Give an .npz file"
            " with the array x (np.savez).",
            str(path),
        )
    return result.columns


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


def _labeled(result: Result, path: Path) -> tuple[object, object]:
    if path.suffix.lower() == ".npz":
        arrays = read_npz(path, ("x", "y"))
        return arrays["x"], arrays["y"]
    encoding = _encoding(result, path)
    table = read_rows(path, encoding)
    if encoding.target not in table.column_names:
        raise InvalidInputError(
            f"column '{encoding.target}': missing in {path}. Labeled rows need it."
            f"{nearest(encoding.target, table.column_names)}",
            encoding.target,
        )
    return encoding.encode(table), _targets(table, encoding)


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
    encoding = result.columns
    if encoding is not None and encoding.classes is None:
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
