"""Schemas of the text files in run directories. They are checked when they are read, because a
folder may come from any source.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedclade.core.names import Names, checked_names
from fedclade.errors import InvalidInputError
from fedclade.io import safe_read

T = TypeVar("T")
Table = dict[str, Any]
Whole = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Number = Annotated[float, Field(strict=True)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(strict=True)]
_MEASURED = ("accuracy", "perplexity", "loss", "train_", "validation_")
Stopped: TypeAlias = Literal["patience", "on_round", "privacy_budget"]
"""Why a run ended before its last round: `run.patience`, the user's function, or
`privacy.epsilon`.
"""


class FailureRecord(TypedDict):
    """A client that did not answer in a round, or whose answer was rejected."""

    client: int
    reason: str
    rejected: bool


class _Evaluated(TypedDict, total=False):
    """Optional keys of an evaluation, in a round and in the summary."""

    accuracy_shared: float | None
    loss: float | None
    loss_shared: float | None
    perplexity: float | None
    train_accuracy: float | None
    train_accuracy_variance: float | None
    train_loss: float | None
    validation_accuracy: float | None
    validation_loss: float | None


class RoundRecord(_Evaluated):
    """A line of rounds.jsonl. Evaluated rounds also have the optional keys, and one key for each
    metric of the user.
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
    epsilon: NotRequired[float]  # of all rounds so far
    next_clip: NotRequired[float]  # of the next round


class Summary(_Evaluated):
    """summary.json: the numbers over all clients after the last round. Each metric of the user is
    another key.
    """

    method: str
    dataset: str
    partition: str
    model: str
    engine: str
    device: str
    seed: int
    rounds: int
    selected_round: int  # the round whose models are served and evaluated
    stopped: Stopped | None  # None: all rounds were run
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
    clients_without_validation: NotRequired[int]
    privacy: NotRequired[dict[str, Any]]
    chosen_lr: NotRequired[float]  # by local.lr = "auto"


class LrCandidate(TypedDict):
    """A learning rate that was tried, and its mean over clients on held-out training data."""

    lr: float
    accuracy: float | None  # percent
    loss: float | None  # None: training diverged


class LrSearch(TypedDict):
    """lr_search.json: the choice of `local.lr = "auto"`."""

    lr: float
    rounds: int
    candidates: list[LrCandidate]


class _OldFormatError(ValueError):
    """A file of an earlier version of fedclade."""


def read(path: Path, parse: Callable[[str], T], most: int = safe_read.MOST) -> T:
    """Read and check a file.

    Args:
        path: the file.
        parse: one of the functions below, which takes the file's text.
        most: the largest allowed size in bytes.
    """
    data = safe_read.read(path, most)
    try:
        return parse(data.decode())
    except _OldFormatError as error:
        raise InvalidInputError(f"{path}: {error}.", str(path)) from error
    except (ValueError, csv.Error, RecursionError) as error:
        raise InvalidInputError(f"{path}: damaged ({error}).", str(path)) from error


def summary(text: str) -> Summary:
    """summary.json."""
    return cast(Summary, _with_numbers(_validated(_Summary, safe_read.parse_json(text))))


def lr_search(text: str) -> LrSearch:
    """lr_search.json."""
    return cast(LrSearch, _validated(_LrSearch, safe_read.parse_json(text)))


def rounds(text: str) -> list[RoundRecord]:
    """rounds.jsonl."""
    return history([safe_read.parse_json(line) for line in text.splitlines()])


def history(rows: list[Any]) -> list[RoundRecord]:
    """The rounds of a history, from parsed JSON."""
    return [cast(RoundRecord, _with_numbers(_validated(_Round, row))) for row in rows]


def table(text: str) -> Table:
    """Any JSON object."""
    return _validated(_Open, safe_read.parse_json(text))


def study(text: str) -> Table:
    """The result of a study."""
    return _validated(_Study, safe_read.parse_json(text))


def comparison(text: str) -> Table:
    """comparison.json."""
    return _validated(_Comparison, safe_read.parse_json(text))


def plan(text: str) -> Table:
    """plan.json, which a folder of several runs has."""
    return _validated(_Plan, safe_read.parse_json(text))


def adapter(text: str) -> Table:
    """adapter.json, which a run has if it trained an adapter of peft."""
    return _validated(_Adapter, safe_read.parse_json(text))


def diagnosis(text: str) -> Table:
    """diagnosis.json."""
    return _validated(_Diagnosis, safe_read.parse_json(text))


def tables(text: str) -> dict[str, Table]:
    """experiment.toml. The last table is required, so that a truncated file is recognized."""
    content = safe_read.parse_toml(text)
    try:
        json.dumps(content)
    except TypeError as error:  # a date
        raise ValueError(str(error)) from error
    return _validated(_Tables, content)


def names(text: str) -> Names:
    """names.json, which a run has if its clients, classes or features have names."""
    content = safe_read.parse_json(text)
    _validated(_Names, content)
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
        raise _OldFormatError(
            "the column 'group' is from version 0.1, version 0.2 needs 'true_group'. Run the"
            " experiment again"
        )
    if len(rows) != number:
        raise ValueError(f"it has {len(rows)} clients, the run has {number}")
    cells = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))
    listed = cells.pop("client", [])
    values: dict[str, list[Any]] = {
        name: [json.loads(cell) if cell else None for cell in column]
        for name, column in cells.items()
    }
    expected = list(client_names or map(str, range(number)))
    if listed != expected:
        raise ValueError("its clients are not those of names.json, or not 0, 1, 2 …")
    by_name = _validated(_Clients, {"client": list(client_names or range(number)), **values})
    for name, column in by_name.items():
        _check_numbers(name, column)
    return by_name


def _validated(kind: type[BaseModel], content: Any) -> dict[str, Any]:
    """`content`, unchanged, if it is valid."""
    if not isinstance(content, dict):
        raise ValueError("it is not a table")
    try:
        kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    return content


def _with_numbers(row: Table) -> Table:
    """`row`, unchanged, if its metrics are numbers."""
    for name, value in row.items():
        _check_numbers(name, [value])
    return row


def _check_numbers(name: str, values: Sequence[Any]) -> None:
    """Check that a metric is a number or None."""
    if name.startswith(_MEASURED) and not all(
        value is None or type(value) is float or _is_whole(value) for value in values
    ):
        raise ValueError(f"{name} is not a number")


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Privacy(_Open):
    in_words: list[Text] = []


class _Summary(_Open):
    privacy: _Privacy | None = None
    stopped: Stopped | None = None
    clients: Whole
    clusters: Whole
    rounds: Whole
    ari: Number | None = None
    bytes_up: Whole = 0
    bytes_down: Whole = 0
    seconds: Number = 0.0
    failures: Whole = 0


class _LrCandidate(_Open):
    lr: Positive
    accuracy: Number | None
    loss: Number | None


class _LrSearch(_Open):
    lr: Positive
    rounds: Whole
    candidates: list[_LrCandidate]


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


class _PlannedRun(BaseModel):
    name: Text
    title: Text
    rounds: Whole


class _Plan(_Open):
    runs: list[_PlannedRun]


class _Comparison(_Open):
    folders: dict[Text, list[Text]] = {}
    differences: _Differences = _Differences()


class _Adapter(_Open):
    config: dict[Text, Any]
    keys: dict[Text, Text]


class _Difference(_Open):
    share: Number
    times_chance: Number
    p: Number


class _Evidence(_Open):
    labels: _Difference
    inputs: _Difference
    given_labels: _Difference


class _Pilot(_Open):
    method: Text
    layer: Text | None = None
    score: Number
    gain: Number
    gain_stderr: Number
    clusters: Whole = 1
    rounds: Whole = 0
    seeds: Whole = 1


class _Advice(_Open):
    method: Text
    layer: Text | None = None
    settings: dict[Text, Text | Whole | Number | bool | None] = {}
    rivals: list[Text] = []


class _Place(_Open):
    client: Whole
    x: Number
    y: Number
    name: Text | None = None


class _AboutClients(_Open):
    dataset: Text | None = None
    clients: Whole | None = None
    score: Text = "accuracy"


class _Diagnosis(_Open):
    headline: Text | None = None
    sentences: list[Text] = []
    kind: Text | None = None
    experiment: Text | None = None
    leaves_a_client: Text | None = None
    evidence: _Evidence | None = None
    probes: list[_Pilot] = []
    advice: _Advice | None = None
    group: list[Whole] | None = None
    members: list[Table] = []
    map: list[_Place] = []
    about: _AboutClients = _AboutClients()


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
