"""The text files of run folders, checked as they are read: a folder may come from anybody."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedclade.core.names import Names, checked_names
from fedclade.errors import InvalidInputError
from fedclade.io import safe_read

T = TypeVar("T")
Table = dict[str, Any]
Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
_MEASURED = ("accuracy", "perplexity", "loss", "train_")


class FailureRecord(TypedDict):
    """A client that did not answer in a round, or whose answer was rejected."""

    client: int
    reason: str
    rejected: bool


class _Evaluated(TypedDict, total=False):
    """What an evaluation may add to a round and to the summary."""

    accuracy_tuned: float | None
    loss: float | None
    loss_tuned: float | None
    perplexity: float | None
    train_accuracy: float | None
    train_accuracy_variance: float | None
    train_loss: float | None


class RoundRecord(_Evaluated):
    """A line of rounds.jsonl. Evaluated rounds have the optional keys, and one for each metric of
    the user's own.
    """

    round: int
    clients: int  # in the cohort
    clusters: int
    failures: list[FailureRecord]
    bytes_up: int
    bytes_down: int
    seconds: float
    accuracy: NotRequired[float | None]  # percent; only where the targets are class labels
    accuracy_stderr: NotRequired[float | None]
    accuracy_variance: NotRequired[float | None]
    accuracy_worst10: NotRequired[float | None]
    by_cluster_of: NotRequired[str]
    by_cluster: NotRequired[list[list[Any]]]


class Summary(_Evaluated):
    """summary.json: the numbers over all clients after the last round. Each metric of the user's
    own is one more key.
    """

    method: str
    dataset: str
    partition: str
    model: str
    engine: str
    device: str
    seed: int
    rounds: int
    clients: int
    clusters: int
    accuracy: float | None  # percent; None where the targets are not class labels
    accuracy_stderr: float | None
    accuracy_variance: float | None
    accuracy_worst10: float | None
    ari: float | None
    bytes_up: int
    bytes_down: int
    seconds: float
    failures: int
    blocked_clients: int
    clients_without_test: int
    clients_without_model: int


def read(path: Path, parse: Callable[[str], T], most: int = safe_read.MOST) -> T:
    """What a file says, by one of the functions below."""
    data = safe_read.read(path, most)
    try:
        return parse(data.decode())
    except (ValueError, csv.Error, RecursionError) as error:
        raise InvalidInputError(f"{path}: missing or damaged ({error}).") from error


def summary(text: str) -> Summary:
    return cast(Summary, _numbers(_as(_Summary, safe_read.parse_json(text))))


def rounds(text: str) -> list[RoundRecord]:
    return history([safe_read.parse_json(line) for line in text.splitlines()])


def history(rows: list[Any]) -> list[RoundRecord]:
    return [cast(RoundRecord, _numbers(_as(_Round, row))) for row in rows]


def table(text: str) -> Table:
    return _as(_Open, safe_read.parse_json(text))


def study(text: str) -> Table:
    return _as(_Study, safe_read.parse_json(text))


def comparison(text: str) -> Table:
    return _as(_Comparison, safe_read.parse_json(text))


def diagnosis(text: str) -> Table:
    return _as(_Diagnosis, safe_read.parse_json(text))


def tables(text: str) -> dict[str, Table]:
    """experiment.toml; one that was cut short is noticed by its last table."""
    found = safe_read.parse_toml(text)
    try:
        json.dumps(found)
    except TypeError as error:  # a date
        raise ValueError(str(error)) from error
    return _as(_Tables, found)


def names(text: str) -> Names:
    """names.json, which a run has if its clients, classes or features have names."""
    content = safe_read.parse_json(text)
    _as(_Names, content)
    clients, classes, features = (
        None if content.get(key) is None else checked_names(content[key], key)
        for key in ("clients", "classes", "features")
    )
    return Names(clients, classes, features)


def columns(text: str, number: int, client_names: Sequence[str] | None) -> dict[str, list[Any]]:
    """clients.csv, which has one line per client; an empty cell is None.

    Args:
        text: the content of the file.
        number: the number of clients of the run.
        client_names: the names of the clients; None: they have numbers only.
    """
    header, *rows = list(csv.reader(text.splitlines()))
    if "group" in header and "true_group" not in header:
        raise ValueError(
            "its column 'group' is called 'true_group' since version 0.2: run the experiment again"
        )
    if len(rows) != number:
        raise ValueError(f"it has {len(rows)} clients, the run {number}")
    cells = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))
    listed = cells.pop("client", [])
    values: dict[str, list[Any]] = {
        name: [json.loads(cell) if cell else None for cell in column]
        for name, column in cells.items()
    }
    expected = list(client_names or map(str, range(number)))
    if listed != expected:
        raise ValueError("its clients are not those of names.json, or not 0, 1, 2 …")
    found = _as(_Clients, {"client": list(client_names or range(number)), **values})
    for name, column in found.items():
        _check_numbers(name, column)
    return found


def _as(kind: type[BaseModel], found: Any) -> dict[str, Any]:
    """What was read, as it was, if it is of this kind."""
    if not isinstance(found, dict):
        raise ValueError("it holds no table")
    try:
        kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return found


def _numbers(row: Table) -> Table:
    for name, value in row.items():
        _check_numbers(name, [value])
    return row


def _check_numbers(name: str, values: Sequence[Any]) -> None:
    """What was measured is a number or None."""
    if name.startswith(_MEASURED) and not all(
        value is None or type(value) is float or _is_whole(value) for value in values
    ):
        raise ValueError(f"{name} is no number")


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Summary(_Open):
    clients: Whole
    clusters: Whole
    rounds: Whole
    ari: Number | None = None
    bytes_up: Whole = 0
    bytes_down: Whole = 0
    seconds: Number = 0.0
    failures: Whole = 0


class _Failure(_Open):
    client: Whole
    reason: Text
    rejected: bool = False


class _Round(_Open):
    round: Whole
    clusters: Whole
    bytes_up: Whole
    bytes_down: Whole
    seconds: Number
    failures: list[_Failure]
    by_cluster_of: Text = ""
    by_cluster: list[tuple[Whole, Whole, Number | None]] = []


class _Study(_Open):
    rounds: Annotated[list[Table], Field(min_length=1)]


class _Differences(_Open):
    in_words: list[Text] = []


class _Comparison(_Open):
    folders: dict[Text, list[Text]] = {}
    differences: _Differences = _Differences()


class _Diagnosis(_Open):
    headline: Text | None = None
    sentences: list[Text] = []


class _Named(_Open):
    name: Text


class _RunTable(_Open):
    rounds: Whole


class _Tables(_Open):
    __pydantic_extra__: dict[str, Table]
    data: Table = {}
    partition: Table = {}
    model: _Named
    local: Table = {}
    method: _Named
    run: _RunTable
    engine: Table


class _Names(_Open):
    clients: list[Text] | None = None
    classes: list[Text] | None = None
    features: list[Text] | None = None


class _Clients(_Open):
    client: list[Whole] | list[Text]
    cluster: list[Whole]
    true_group: list[Whole | None]
    examples: list[Whole]
