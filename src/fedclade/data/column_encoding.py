"""How the columns of a table become inputs and targets: what was learnt from the training rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from torch import Tensor

from fedclade.core.names import MAX_LENGTH
from fedclade.data.table_columns import as_codes, as_numbers, as_text, number_of_rows
from fedclade.errors import InvalidInputError, nearest
from fedclade.io import safe_read

if TYPE_CHECKING:
    import pyarrow as pa

Task: TypeAlias = Literal["classification", "regression"]
Missing: TypeAlias = Literal["mean", "drop"]
Standardize: TypeAlias = Literal["federated", "client", "none"]
Floats: TypeAlias = NDArray[np.float64]
EncodedNumbers: TypeAlias = tuple[NDArray[np.float32], NDArray[np.bool_]]
THREADS = 2  # that learn and write columns: memory limits the speed of more
_ROWS = 4096  # that are written at once
_DECIMAL = re.compile(r"^([+-]?\d+)\.0+$", re.ASCII)
_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class NumberColumn:
    """A column of numbers. Its input is (value - mean) / scale.

    Args:
        name: the name of the column.
        mean: the mean over the training rows that have a value.
        scale: the standard deviation over these rows; 1 if all values are equal.
        flag: whether a second input is 1 where the value is missing.
    """

    __pydantic_config__ = _STRICT

    name: str
    mean: float
    scale: float
    flag: bool = False
    kind: Literal["number"] = "number"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the column's inputs."""
        return (self.name, f"{self.name} missing") if self.flag else (self.name,)

    def encode(
        self,
        numbers: Floats,
        standardize: Standardize,
        scales: tuple[Floats, Floats],
        clients: NDArray[np.int64],
    ) -> EncodedNumbers:
        """The inputs of all rows, and where a value is missing.

        Args:
            numbers: the values, NaN where one is missing. They are overwritten.
            standardize: how they are standardized.
            scales: the means and the standard deviations: one of each, or one for each client.
            clients: (rows,) the place of each row's client in `scales`.
        """
        missing = np.isnan(numbers)
        if standardize == "none":
            encoded = numbers.astype(np.float32)
            encoded[missing] = self.mean
            return encoded, missing
        mean, scale = scales
        numbers -= mean[clients] if len(mean) > 1 else mean
        # Divided as float64: one pass less than a division and a copy.
        encoded = np.empty(len(numbers), np.float32)
        divisor = scale[clients] if len(scale) > 1 else scale
        np.divide(numbers, divisor, out=encoded, casting="same_kind")
        encoded[missing] = 0
        return encoded, missing


@dataclass(frozen=True)
class CategoryColumn:
    """A column of categories. Each category has an input, which is 1 in its rows and 0 in others.

    Args:
        name: the name of the column.
        categories: the categories of the training rows. Another one has zeros only.
        flag: whether one more input is 1 where the value is missing.
    """

    __pydantic_config__ = _STRICT

    name: str
    categories: tuple[str, ...]
    flag: bool = False
    kind: Literal["category"] = "category"

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of the column's inputs, each on one line."""
        names = [
            _one_line(f"{self.name}={category}", f"{self.name}=#{number}")
            for number, category in enumerate(self.categories)
        ]
        return (*names, f"{self.name} missing") if self.flag else tuple(names)


Column: TypeAlias = Annotated[NumberColumn | CategoryColumn, Field(discriminator="kind")]


@dataclass(frozen=True)
class ClientScale:
    """The means and standard deviations of one client, one of each for every column of numbers."""

    __pydantic_config__ = _STRICT

    mean: tuple[float, ...]
    scale: tuple[float, ...]


@dataclass(frozen=True)
class ColumnEncoding:
    """How rows of a table become inputs, and outputs of a model become predictions.

    A run saves it in encoding.json.

    Args:
        client: the column with the name of each row's client.
        target: the column with the targets.
        task: whether targets are classes or numbers.
        columns: the columns that are inputs, in their order.
        classes: the names of the classes, in the order of the labels; None for numbers.
        target_mean: what is subtracted from targets that are numbers.
        target_scale: by what they are divided after that.
        missing: "mean" replaces a missing number by the mean; "drop" has no rows with missing
            values.
        standardize: "federated" uses the means of all clients, "client" those of the row's client,
            "none" leaves numbers as they are.
        client_scales: for "client", the means and deviations of each client.
    """

    __pydantic_config__ = _STRICT

    client: str
    target: str
    task: Task
    columns: tuple[Column, ...]
    classes: tuple[str, ...] | None = None
    target_mean: float = 0.0
    target_scale: float = 1.0
    missing: Missing = "mean"
    standardize: Standardize = "federated"
    client_scales: dict[str, ClientScale] | None = None
    kind: Literal["columns"] = "columns"

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The name of each input."""
        names: dict[str, None] = {}
        for column in self.columns:
            for name in column.inputs:
                names[_unused(name, names)] = None
        return tuple(names)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns that a reader must leave as text."""
        categories = (column.name for column in self.columns if column.kind == "category")
        return (self.client, self.target, *categories)

    def encode(self, table: pa.Table, client: str | None = None) -> Tensor:
        """The inputs of a model for the rows of a table, shape (rows, inputs).

        A category that no training row has gives zeros. Columns that are no inputs are ignored.

        Args:
            table: a table of pyarrow with the columns of the training data.
            client: the client of all rows, for `standardize="client"`; None: the column of clients
                says it where the table has one. Rows of other clients use the means of all.
        """
        rows = number_of_rows(table)
        safe_read.fit("the table", 4 * rows * len(self.feature_names), "as inputs")
        x = torch.empty(rows, len(self.feature_names))
        ids = self._scale_ids(table, client)
        self.encode_rows(table, ids, ((x, np.arange(rows)),))
        return x

    def encode_rows(
        self,
        table: pa.Table,
        clients: NDArray[np.int64],
        parts: Sequence[tuple[Tensor, NDArray[np.int64]]],
        converted: dict[str, EncodedNumbers] | None = None,
    ) -> None:
        """Write the inputs of some rows into tensors.

        Args:
            table: the table.
            clients: the number of each row's client in `client_scales`; their number for others.
            parts: pairs of a tensor (rows, inputs) and the rows of the table that it gets, in
                ascending order.
            converted: columns that are encoded already.
        """
        converted = converted or {}
        encoded: list[NDArray[Any]] = []
        places: list[int] = []  # the first input of each of them
        place = number = 0
        for column in self.columns:
            if column.name not in table.column_names and column.name not in converted:
                raise InvalidInputError(
                    f"column '{column.name}': missing. The model needs it."
                    f"{nearest(column.name, table.column_names)}",
                    column.name,
                )
            values: NDArray[Any]
            if isinstance(column, CategoryColumn):
                values = self._codes(table, column)
                missing = values == -2
            elif column.name in converted:
                values, missing = converted[column.name]
            else:
                values, missing = column.encode(
                    as_numbers(table, column.name),
                    self.standardize,
                    self._scales(column, number),
                    clients,
                )
            number += column.kind == "number"
            self._require_values(column.name, missing, parts)
            encoded.append(values)
            places.append(place)
            if column.flag:
                encoded.append(missing)
                places.append(place + len(column.inputs) - 1)
            place += len(column.inputs)
        _write(encoded, places, place, parts)

    def decode(self, outputs: Tensor) -> list[str] | list[float]:
        """The predictions of a model: the name of the class, or the number in the target's unit.

        Args:
            outputs: (rows, outputs) the outputs of a model.
        """
        if self.classes is not None:
            return [self.classes[label] for label in outputs.argmax(-1).tolist()]
        values = outputs.reshape(len(outputs), -1)[:, 0].double()
        predictions: list[float] = (values * self.target_scale + self.target_mean).tolist()
        return predictions

    def check(self) -> None:
        """Raise `ValueError` for values that do not fit together."""
        numbers = sum(column.kind == "number" for column in self.columns)
        scales = [column.scale for column in self.columns if column.kind == "number"]
        for scale in (self.client_scales or {}).values():
            if len(scale.mean) != numbers or len(scale.scale) != numbers:
                raise ValueError("client_scales: a client has another number of columns")
            scales += scale.scale
        if min(scales, default=1.0) <= 0:
            raise ValueError("scale: must be above 0")
        if (self.classes is None) != (self.task == "regression"):
            raise ValueError("classes: only a classification has them")

    def _scale_ids(self, table: pa.Table, client: str | None) -> NDArray[np.int64]:
        """The number of each row's client in `client_scales`; their number where it is unknown."""
        known = {name: number for number, name in enumerate(self.client_scales or {})}
        rows = number_of_rows(table)
        if client is not None or self.client not in table.column_names:
            return np.full(rows, known.get(client or "", len(known)))
        names = as_text(table, self.client).to_pylist() if known else []
        return np.array([known.get(name, len(known)) for name in names] or [0] * rows, np.int64)

    def _scales(self, column: NumberColumn, number: int) -> tuple[Floats, Floats]:
        """The mean and the scale of a column for each client, those of all clients last."""
        clients = (self.client_scales or {}).values()
        means = [*(client.mean[number] for client in clients), column.mean]
        scales = [*(client.scale[number] for client in clients), column.scale]
        return np.array(means), np.array(scales)

    def _codes(self, table: pa.Table, column: CategoryColumn) -> NDArray[np.int64]:
        """The number of each row's category; -1 for an unknown one, -2 for a missing value."""
        codes, names = category_codes(table, column)
        numbers = {category: number for number, category in enumerate(column.categories)}
        return np.array([*(numbers.get(name, -1) for name in names), -2])[codes]

    def _require_values(
        self,
        name: str,
        missing: NDArray[np.bool_],
        parts: Sequence[tuple[Tensor, NDArray[np.int64]]],
    ) -> None:
        if self.missing != "drop":
            return
        for _, rows in parts:
            if missing[rows].any():
                row = int(rows[missing[rows].argmax()])
                raise InvalidInputError(
                    f"column '{name}': row {row + 1} has no value, and the training data have no"
                    " rows with missing values (missing = 'drop'). Fill it in, or leave the row"
                    " out.",
                    name,
                )


def category_codes(table: pa.Table, column: CategoryColumn) -> tuple[NDArray[np.int64], list[str]]:
    """The number of each row's category, -1 where a value is missing, and the categories.

    "1.0" is the category "1" if that is the known one: a file of codes with missing values often
    has them as decimal numbers, and the training data had them as numbers.

    Args:
        table: the rows.
        column: the column with its known categories.
    """
    codes, texts = as_codes(table, column.name)
    known = set(column.categories)
    return codes, [text if text in known else _DECIMAL.sub(r"\1", text) for text in texts]


def _write(
    encoded: Sequence[NDArray[Any]],
    places: Sequence[int],
    inputs: int,
    parts: Sequence[tuple[Tensor, NDArray[np.int64]]],
) -> None:
    """Write encoded columns into tensors, a few rows at a time: they stay in the cache.

    Args:
        encoded: the columns: inputs, or int64 for the numbers of categories.
        places: the first input of each column.
        inputs: the number of inputs.
        parts: pairs of a tensor (rows, inputs) and the rows that it gets, in ascending order.
    """
    rows = len(encoded[0])

    def write_blocks(thread: int) -> None:
        block = np.empty((min(rows, _ROWS), inputs), np.float32)
        for first in range(thread * _ROWS, rows, THREADS * _ROWS):
            last = min(first + _ROWS, rows)
            block[:] = 0
            for values, place in zip(encoded, places, strict=True):
                some = values[first:last]
                if some.dtype == np.int64:
                    known = (some >= 0).nonzero()[0]
                    block[known, place + some[known]] = 1
                else:
                    block[: last - first, place] = some
            for x, chosen in parts:
                start, end = np.searchsorted(chosen, (first, last))
                # By numpy: torch's threads wait for each other on a busy machine.
                into = x.numpy()[start:end]
                np.take(block, chosen[start:end] - first, axis=0, out=into, mode="clip")

    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(write_blocks, range(THREADS)))


def _one_line(name: str, otherwise: str) -> str:
    """A name that can be shown on one line; a category may be any text of the file."""
    text = " ".join(name.split())
    return text if text.isprintable() and len(text) <= MAX_LENGTH else otherwise


def _unused(name: str, used: dict[str, None]) -> str:
    number, new = 1, name
    while new in used:
        number += 1
        new = f"{name} ({number})"
    return new
