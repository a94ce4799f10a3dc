"""How the columns of a table become inputs and targets: what was learnt from the training rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ConfigDict, Field
from torch import Tensor

from fedclade.core.names import MAX_LENGTH
from fedclade.data.table_columns import as_numbers, as_text, number_of_rows
from fedclade.errors import InvalidInputError, nearest
from fedclade.io import safe_read

if TYPE_CHECKING:
    import pyarrow as pa

Task: TypeAlias = Literal["classification", "regression"]
Missing: TypeAlias = Literal["mean", "drop"]
Standardize: TypeAlias = Literal["federated", "client", "none"]
Floats: TypeAlias = NDArray[np.float64]
_PENDING, _ROWS = 16, 8192  # inputs and rows that are written at once
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
        x = torch.zeros(rows, len(self.feature_names))
        ids = self._scale_ids(table, client)
        self.encode_rows(table, ids, ((x, np.arange(rows)),))
        return x

    def encode_rows(
        self,
        table: pa.Table,
        clients: NDArray[np.int64],
        parts: Sequence[tuple[Tensor, NDArray[np.int64]]],
    ) -> None:
        """Write the inputs of some rows into tensors of zeros, column by column: a table of a
        million rows then needs no second copy.

        Args:
            table: the table.
            clients: the number of each row's client in `client_scales`; their number for others.
            parts: pairs of a tensor (rows, inputs) and the rows of the table that it gets.
        """
        place = number = 0
        pending: list[NDArray[Any]] = []  # the inputs before `place` that are not written yet
        for column in self.columns:
            if column.name not in table.column_names:
                raise InvalidInputError(
                    f"column '{column.name}': missing. The model needs it."
                    f"{nearest(column.name, table.column_names)}",
                    column.name,
                )
            if isinstance(column, NumberColumn):
                numbers = as_numbers(table, column.name)
                missing = np.isnan(numbers)
                self._require_values(column.name, missing, parts)
                if self.standardize == "none":
                    numbers[missing] = column.mean
                else:
                    mean, scale = self._scales(column, number)
                    numbers -= mean[clients] if len(mean) > 1 else mean
                    numbers /= scale[clients] if len(scale) > 1 else scale
                    numbers[missing] = 0
                number += 1
                pending.append(numbers.astype(np.float32))
                place += 1
            else:
                _write(pending, place, parts)
                codes = self._codes(table, column)
                missing = codes == -2
                self._require_values(column.name, missing, parts)
                for x, rows in parts:
                    known = (codes[rows] >= 0).nonzero()[0]
                    x.numpy()[known, place + codes[rows][known]] = 1
                place += len(column.categories)
            if column.flag:
                pending.append(missing)
                place += 1
            if len(pending) >= _PENDING:
                _write(pending, place, parts)
        _write(pending, place, parts)

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
        import pyarrow as pa
        import pyarrow.compute as pc

        values = category_names(table, column)
        codes = pc.index_in(values, value_set=pa.array(column.categories, pa.string()))
        numbers: NDArray[np.int64] = codes.fill_null(-1).to_numpy().astype(np.int64)
        numbers[values.is_null().to_numpy()] = -2
        return numbers

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


def category_names(table: pa.Table, column: CategoryColumn) -> pa.ChunkedArray:
    """The category of each row as text; null where a value is missing.

    "1.0" is the category "1" if that is the known one: a file of codes with missing values often
    has them as decimal numbers, and the training data had them as numbers.

    Args:
        table: the rows.
        column: the column with its known categories.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    values = as_text(table, column.name)
    known = pc.is_in(values, value_set=pa.array(column.categories, pa.string()))
    whole = pc.replace_substring_regex(values, r"^([+-]?\d+)\.0+$", r"\1")
    return pc.if_else(known, values, whole)


def _write(
    pending: list[NDArray[Any]], end: int, parts: Sequence[tuple[Tensor, NDArray[np.int64]]]
) -> None:
    """Write the pending inputs, whose last is `end` - 1, and clear the list. Several columns at
    once and a few rows at a time: a column alone would touch all memory of x.
    """
    start = end - len(pending)
    for x, rows in parts if pending else ():
        for first in range(0, len(rows), _ROWS):
            some = rows[first : first + _ROWS]
            block = np.empty((len(some), len(pending)), np.float32)
            for number, column in enumerate(pending):
                block[:, number] = column[some]
            # By numpy: torch's threads wait for each other on a busy machine.
            x.numpy()[first : first + _ROWS, start:end] = block
    pending.clear()


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
