"""What a table holds: the settings with which it can be used at once, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fedclade.data.column_encoding import ColumnEncoding, Task
from fedclade.data.federated_dataset import Clients
from fedclade.data.table_columns import (
    as_codes,
    as_numbers,
    is_text,
    kind_of,
    number_of_rows,
    require_column,
)
from fedclade.data.tables import (
    MAX_CATEGORIES,
    TRAIN_OR_TEST,
    TableSettings,
    clients_from_table,
    open_table,
)

if TYPE_CHECKING:
    import pyarrow as pa

_MIN_IDS = 20  # rows: a few different whole numbers are no ids


@dataclass(frozen=True)
class Inspection:
    """What `inspect_table` finds.

    Args:
        path: the table.
        settings: how it becomes clients.
        clients: the clients.
        dropped: columns that are no inputs, and why.
        rows: the number of rows.
    """

    path: str
    settings: TableSettings
    clients: Clients
    dropped: dict[str, str]
    rows: int

    @property
    def task(self) -> Task:
        """Whether targets are classes or numbers."""
        return "regression" if self.clients.classes is None else "classification"

    def in_words(self) -> str:
        """The size of the table and the kind of its target, in one line."""
        classes = self.clients.classes
        kind = "numbers" if classes is None else f"{classes} classes"
        encoding = self.clients.encoding
        inputs = len(encoding.columns) if isinstance(encoding, ColumnEncoding) else 0
        clients = "1 client" if len(self.clients) == 1 else f"{len(self.clients):,} clients"
        return (
            f"{self.rows:,} rows of {clients}, {inputs} input columns, target"
            f" '{self.settings.target}' with {kind}."
        )


def inspect_table(path: str, client: str, target: str) -> Inspection:
    """Look at a table, and try the settings that are found on it.

    Columns of dates, of free text and of ids become `drop`. A column that says train or test for
    every row becomes `test`.

    Args:
        path: a CSV or Parquet file, or the name of a table of fedclade.
        client: the column with the name of each row's client.
        target: the column with the targets.
    """
    settings = TableSettings(client, target)
    table = open_table(path, settings)
    for name, field in ((client, "data.client"), (target, "data.target")):
        require_column(table.column_names, name, field)
    dropped: dict[str, str] = {}
    for name in table.column_names:
        if name in (client, target):
            continue
        if _says_part(table, name):
            settings = replace(settings, test=name)
        elif why := _why_no_input(table, name):
            dropped[name] = why
    settings = replace(settings, drop=tuple(dropped))
    clients = clients_from_table(table.drop_columns(list(dropped)), settings, path)
    return Inspection(path, settings, clients, dropped, number_of_rows(table))


def _says_part(table: pa.Table, name: str) -> bool:
    if not is_text(table, name):
        return False
    codes, texts = as_codes(table, name)
    values = {text.lower() for text in texts}
    says_part = values <= set(TRAIN_OR_TEST) and "test" in values and len(values) > 1
    return says_part and bool((codes >= 0).all())


def _why_no_input(table: pa.Table, name: str) -> str:
    """Why a column is no input; "" if it can be one."""
    import pyarrow as pa

    column = table.column(name)
    if pa.types.is_temporal(column.type):
        return "dates or times"
    if kind_of(table, name) == "category":
        count = len(as_codes(table, name)[1])
        return f"{count:,} different texts" if count > MAX_CATEGORIES else ""
    if pa.types.is_integer(column.type) and len(column) >= _MIN_IDS:
        numbers = as_numbers(table, name)
        if len(np.unique(numbers)) == len(numbers):
            return "a different whole number in every row: an id?"
    return ""
