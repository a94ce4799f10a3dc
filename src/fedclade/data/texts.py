"""Clients from texts: classes of texts, tags of words, or the next word.

The vocabulary comes from federated counts: each client counts the words of its training rows, and
only the sums over clients are used.
"""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from fedclade.core.names import Names, checked_client_names, checked_names
from fedclade.data.client_rows import Rows, check_test_share, clients_of_rows, is_test_row
from fedclade.data.federated_dataset import Clients
from fedclade.data.hugging_face import load_saved
from fedclade.data.table_columns import read_parquet
from fedclade.data.text_encoding import (
    END,
    FIRST_WORD,
    TextEncoding,
    TextTask,
    federated_vocabulary,
)
from fedclade.data.text_encoding import words as words_of
from fedclade.errors import FedcladeWarning, InvalidInputError, nearest, require, require_int
from fedclade.io import safe_read

_SHOWN = 5  # names in a message

TASKS = get_args(TextTask)
Columns: TypeAlias = dict[str, list[Any]]


def from_text(
    data: Any,
    *,
    text: str,
    client: str,
    target: str | None = None,
    task: TextTask | None = None,
    length: int = 64,
    words: int = 10_000,
    test: float = 0.2,
    seed: int = 0,
) -> Clients:
    """Make clients from a table of texts. `clients.encoding` then encodes new texts.

    Rows without client, text or target are left out; a warning counts them.

    Args:
        data: The path of a CSV file with a header, of a Parquet file, or of the folder of a
            `datasets.Dataset`; a dictionary of columns; a data frame; or a `datasets.Dataset`.
        text: The column of the texts. For tagging a list of words, or words with spaces between.
        client: The column with the client of each text; its values are the names of the clients.
        target: The column of the class of each text, or for tagging the tag of each word, as a list
            or with spaces between. None for a language model, whose target is the next word.
        task: "classification", "tagging" or "language_model"; None for a language model if there is
            no target, for tagging if the targets are lists, else for classification.
        length: The number of words of an input. A longer text is cut for classification. For the
            other tasks the texts of a client are joined and cut into windows of this length; the
            last window overlaps the one before, so that there is no padding.
        words: The size of the vocabulary, as in `fc.models.BagOfWords` and `TextTransformer`.
        test: The share of each client's texts that is its test part.
        seed: The seed of that split.
    """
    require_int("length", length, 1)
    require_int("words", words, FIRST_WORD + 1, 10**8)
    check_test_share(test, seed)
    require(task is None or task in TASKS, "task", task, f"must be one of {', '.join(TASKS)}")
    columns = _columns(data, [name for name in (text, client, target) if name is not None])
    columns = _without_gaps(columns, text)
    if task is None:
        task = "language_model"
        if target is not None:
            is_list = isinstance(columns[target][0], list | tuple | np.ndarray)
            task = "tagging" if is_list else "classification"
    if (target is None) != (task == "language_model"):
        needed = "no target" if task == "language_model" else "a target"
        raise InvalidInputError(f"target = {target!r}: the task {task} needs {needed}.", "target")
    names, numbers = _clients(columns[client])
    encoding = TextEncoding((), length, text, client, target, task)  # no vocabulary yet
    if task == "classification":
        assert target is not None
        return _classification(
            columns[text], columns[target], names, numbers, encoding, words, test, seed
        )
    tags = columns[target] if target is not None else None
    return _windows_of_clients(columns[text], tags, names, numbers, encoding, words, test, seed)


def _classification(
    texts: Sequence[Any],
    targets: Sequence[Any],
    names: tuple[str, ...],
    client: Tensor,
    encoding: TextEncoding,
    words: int,
    test: float,
    seed: int,
) -> Clients:
    class_names, y = _numbered([_as_text(value) for value in targets], "target")
    if len(class_names) == 1:
        raise InvalidInputError(
            f"target = {encoding.target!r}: all texts have the class {class_names[0]!r}; name a"
            " column with at least 2 classes, or leave it out for a language model.",
            "target",
        )
    is_test = is_test_row(client, y, test, seed)
    checked = [_text_of(value, row) for row, value in enumerate(texts)]
    counts = _counts([words_of(value) for value in checked], client, is_test)
    encoding = replace(encoding, vocabulary=federated_vocabulary(counts, words))
    x = encoding.encode(checked)
    train, held = (Rows(x[rows], y[rows], client[rows]) for rows in (~is_test, is_test))
    clients = clients_of_rows(train, held, Names(names, class_names), len(class_names), "texts")
    return replace(clients, encoding=encoding)


def _windows_of_clients(
    texts: Sequence[Any],
    tags: Sequence[Any] | None,
    names: tuple[str, ...],
    client: Tensor,
    encoding: TextEncoding,
    size: int,
    test: float,
    seed: int,
) -> Clients:
    """Clients with a target for each word: its tag, or the next word if `tags` is None."""
    is_test = is_test_row(client, None, test, seed)
    if tags is None:
        sentences = [words_of(_text_of(value, row)) for row, value in enumerate(texts)]
    else:
        sentences = [
            [word.lower() for word in _list_of(value, row)] for row, value in enumerate(texts)
        ]
    counts, length = _counts(sentences, client, is_test), encoding.length
    encoding = replace(encoding, vocabulary=federated_vocabulary(counts, size))
    class_names: tuple[str, ...] | None = None
    labels: list[list[int]] = []
    if tags is not None:
        lists = [_list_of(value, row) for row, value in enumerate(tags)]
        for row, (sentence, tags_of_row) in enumerate(zip(sentences, lists, strict=True)):
            if len(sentence) != len(tags_of_row):
                raise InvalidInputError(
                    f"target: row {row} has {len(tags_of_row)} tags for {len(sentence)} words: give"
                    " one tag a word.",
                    "target",
                )
        class_names, flat = _numbered([tag for tag_list in lists for tag in tag_list], "target")
        ends = np.cumsum([0, *map(len, lists)]).tolist()
        labels = [flat[start:end].tolist() for start, end in pairwise(ends)]
    parts = []
    for part in (False, True):
        x, y, owner = [], [], []
        for number in range(len(names)):
            rows = ((client == number) & (is_test == part)).nonzero().flatten().tolist()
            tokens = [token for row in rows for token in encoding.tokens(sentences[row])]
            if tags is None:
                joined = [t for row in rows for t in (*encoding.tokens(sentences[row]), END)]
                tokens, after = joined[:-1], joined[1:]
            else:
                after = [label for row in rows for label in labels[row]]
            for start in window_starts(len(tokens), length):
                x.append(tokens[start : start + length])
                y.append(after[start : start + length])
                owner.append(number)
        inputs, targets = (torch.tensor(v, dtype=torch.int64).reshape(-1, length) for v in (x, y))
        parts.append(Rows(inputs, targets, torch.tensor(owner, dtype=torch.int64)))
    train, held = parts
    train, held, kept = _without_short_clients(train, held, names, length)
    classes = len(class_names) if class_names else FIRST_WORD + len(encoding.vocabulary)
    clients = clients_of_rows(train, held, Names(kept, class_names), classes, "texts")
    return replace(clients, encoding=encoding)


def window_starts(tokens: int, length: int) -> list[int]:
    """The starts of windows that cover all tokens; only the last two may overlap. None if there are
    fewer tokens than a window has.
    """
    if tokens < length:
        return []
    starts = list(range(0, tokens - length + 1, length))
    return starts if starts[-1] + length == tokens else [*starts, tokens - length]


def _without_short_clients(
    train: Rows, held: Rows, names: tuple[str, ...], length: int
) -> tuple[Rows, Rows, tuple[str, ...]]:
    """Leave out clients whose training texts are shorter than a window, with a warning."""
    present = train.client.bincount(minlength=len(names)) > 0
    if not bool(present.any()):
        raise InvalidInputError(
            f"length = {length}: no client has training texts of at least {length} words. Give a"
            " smaller length or more text.",
            "length",
        )
    if bool(present.all()):
        return train, held, names
    short = [name for name, there in zip(names, present.tolist(), strict=True) if not there]
    more = ", …" if len(short) > _SHOWN else ""
    warnings.warn(
        FedcladeWarning(
            f"{len(short)} of {len(names)} clients are left out, since their training texts have"
            f" fewer than {length} words: {', '.join(short[:_SHOWN])}{more}. A smaller length keeps"
            " them.",
            "length",
        ),
        stacklevel=4,
    )
    number = present.cumsum(0) - 1
    keep = present[held.client]
    x = held.x
    assert isinstance(x, Tensor)
    held = Rows(x[keep], held.y[keep], number[held.client[keep]])
    kept = tuple(name for name in names if name not in set(short))
    return train._replace(client=number[train.client]), held, kept


def _counts(
    sentences: Sequence[Sequence[str]], client: Tensor, is_test: Tensor
) -> list[Counter[str]]:
    """What each client sends: how often each word occurs in its training rows."""
    counts: list[Counter[str]] = [Counter() for _ in range(int(client.max()) + 1)]
    rows = zip(sentences, client.tolist(), is_test.tolist(), strict=True)
    for sentence, number, held_out in rows:
        if not held_out:
            counts[number].update(sentence)
    return counts


def _columns(data: Any, names: Sequence[str]) -> Columns:
    """The columns of a CSV file, a dictionary, a data frame or a data set of Hugging Face."""
    if isinstance(data, str | os.PathLike):
        data = _opened(Path(data).expanduser())
    known = getattr(data, "column_names", None)
    if known is None:
        known = data if isinstance(data, Mapping) else getattr(data, "columns", None)
    if known is None:
        raise InvalidInputError(
            f"data: {type(data).__name__} has no columns. Give the path of a CSV or Parquet file, a"
            " dictionary of columns, a data frame or a datasets.Dataset.",
            "data",
        )
    known = [str(name) for name in known]
    for name in names:
        if name not in known:
            raise InvalidInputError(f"there is no column {name!r}.{nearest(name, known)}", name)
    columns = {name: _listed(data[name]) for name in names}
    if len({len(column) for column in columns.values()}) > 1 or not columns[names[0]]:
        sizes = ", ".join(f"{name}: {len(column)}" for name, column in columns.items())
        raise InvalidInputError(
            f"data: the columns have these numbers of rows: {sizes}. They must be equal, and at"
            " least 1.",
            "data",
        )
    return columns


def _opened(path: Path) -> Any:
    """A CSV or Parquet file, or the folder of a `datasets.Dataset`."""
    if path.is_dir():
        return load_saved(path)
    if path.suffix.lower() == ".parquet":
        return read_parquet(path)
    return read_csv_columns(path, safe_read.read(path))


def read_text_file(path: Path) -> Columns:
    """The columns of a CSV or Parquet file as text, empty where a value is missing.

    Args:
        path: the file.
    """
    if path.suffix.lower() != ".parquet":
        return read_csv_columns(path, safe_read.read(path))
    table = read_parquet(path)
    columns = {name: table.column(name).to_pylist() for name in table.column_names}
    return {
        name: ["" if value is None else _as_text(value) for value in values]
        for name, values in columns.items()
    }


def _without_gaps(columns: Columns, text: str) -> Columns:
    """The rows with a value in each column; a warning counts the others. An empty text is one."""
    rows = len(next(iter(columns.values())))
    keep, counts = np.ones(rows, bool), list[str]()
    for name, values in columns.items():
        gaps = [_is_missing(value) and not (name == text and value == "") for value in values]
        is_missing = np.array(gaps) & keep
        if is_missing.any():
            counts.append(f"{int(is_missing.sum()):,} with no value in '{name}'")
        keep &= ~is_missing
    if not counts:
        return columns
    message = f"{rows - int(keep.sum()):,} of {rows:,} rows left out: {', '.join(counts)}"
    if not keep.any():
        raise InvalidInputError(f"data: no row remains ({message}).", "data")
    warnings.warn(FedcladeWarning(f"texts: {message}.", "data"), stacklevel=3)
    kept = keep.nonzero()[0].tolist()
    return {name: [values[row] for row in kept] for name, values in columns.items()}


def _is_missing(value: Any) -> bool:
    if isinstance(value, list | tuple | np.ndarray):
        return False
    return value is None or value == "" or bool(value != value)


def _listed(column: Any) -> list[Any]:
    return list(column.to_pylist() if hasattr(column, "to_pylist") else column)


def read_csv_columns(path: Path, content: bytes) -> Columns:
    """The columns of a CSV file in UTF-8 with a header; comma, semicolon, tab or | separate them.
    A row of another length is named.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"{path}: it is not in UTF-8 (byte {error.start:,}). Save it in UTF-8.", str(path)
        ) from error
    delimiter = max(",;\t|", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        header = next(reader, [])
        if not header or len(set(header)) != len(header):
            problem = "has a column twice" if header else "is empty"
            raise InvalidInputError(f"{path}: the header {problem}.", str(path))
        rows = []
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise InvalidInputError(
                    f"{path}: line {reader.line_num} has {len(row)} values for {len(header)}"
                    " columns.",
                    str(path),
                )
            rows.append(row)
    except csv.Error as error:
        raise InvalidInputError(
            f"{path}: line {reader.line_num} is no CSV ({error}).", str(path)
        ) from error
    columns = zip(*rows, strict=True) if rows else [() for _ in header]
    return {name: list(column) for name, column in zip(header, columns, strict=True)}


def _clients(values: Sequence[Any]) -> tuple[tuple[str, ...], Tensor]:
    names, numbers = _numbered([_as_text(value) for value in values], "client")
    return checked_client_names(names, "client"), numbers


def _numbered(values: Sequence[str], field: str) -> tuple[tuple[str, ...], Tensor]:
    """The different values in alphabetical order, and the number of each value."""
    names = checked_names(sorted(set(values)), field)
    number = {name: place for place, name in enumerate(names)}
    return names, torch.tensor([number[value] for value in values], dtype=torch.int64)


def _as_text(value: Any) -> str:
    """A client or a class; 1.0 is "1", which a library made a float because of missing values."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def _text_of(value: Any, row: int) -> str:
    require(isinstance(value, str), "text", value, f"must be text; see row {row}")
    return str(value)


def _list_of(value: Any, row: int) -> list[str]:
    if isinstance(value, str):
        return value.split()
    if isinstance(value, list | tuple | np.ndarray):
        return [str(item) for item in value]
    raise InvalidInputError(
        f"row {row} has a {type(value).__name__}: give a list, or text with spaces between.", "text"
    )
