"""The experiment file: TOML, checked key by key, turned into the objects it names."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from datetime import date, time
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedclade.data import Dataset, load, partition
from fedclade.data.federated_dataset import Clients
from fedclade.errors import InvalidInputError, nearest
from fedclade.io import safe_read
from fedclade.methods.base import Method
from fedclade.methods.required_context import is_injected
from fedclade.models import ModelSpec
from fedclade.registry import REGISTRY, find
from fedclade.training.config import EngineConfig, LocalConfig, ServerConfig, TrainingConfig
from fedclade.training.runner import TrainingRun

Table = dict[str, Any]
TABLES = ("data", "partition", "model", "local", "method", "run", "server", "engine")
T = TypeVar("T")
_UNSAFE = re.compile(r"[^\w.=+-]+")  # in names of folders

RENAMED_KEYS = {
    "run.average": "server.aggregator",
    "run.set_aside_after": "run.max_rejections",
    "engine.workers": "engine.threads",
    "method.size": "method.signature_dim",
    "method.factor": "method.noise_ratio",
    "method.confirm": "method.recluster_every",
    "method.epsilon": "method.signature_epsilon",
    "method.delta": "method.signature_delta",
    "method.clip": "method.signature_clip",
    "method.trial": "method.trial_rounds",
    "method.restarts": "method.num_restarts",
    "method.share": "method.shared_layers",
}
"""Keys of version 0.1: a file that has one is refused with the new name, never read as something
else.
"""


@dataclass(frozen=True)
class DataConfig:
    """Which data set: a name, or the path of an .npz file."""

    name: str


@dataclass(frozen=True)
class PartitionConfig:
    """What every partition has beside its own fields. `seed` is the run's unless it is given."""

    clients: int = 100
    probe: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Experiment:
    """What an experiment file asks for, checked. No data are loaded yet."""

    data: DataConfig
    partition: PartitionConfig
    scheme: Any
    model: ModelSpec
    local: LocalConfig
    method: Method
    run: TrainingConfig
    server: ServerConfig
    engine: EngineConfig
    # of a sweep: those of the listed values that this experiment has
    chosen: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def title(self) -> str:
        """As a table shows it: `clade beta=0.1`; with the table's name where two keys end alike."""
        ends = Counter(key.rpartition(".")[2] for key in self.chosen)
        shown = {
            key: end if ends[end := key.rpartition(".")[2]] == 1 else key for key in self.chosen
        }
        return " ".join(
            [self.method.name, *(f"{shown[key]}={value}" for key, value in self.chosen.items())]
        )

    @property
    def label(self) -> str:
        """The name of its folder among others: the title, in characters that every file system
        allows, and the seed.
        """
        return f"{_UNSAFE.sub('-', self.title)}-seed{self.run.seed}"

    def clients(self, root: str | None = None) -> Clients:
        """Load the data set and partition it."""
        return self.partitioned(load(self.data.name, root))

    def partitioned(self, data: Dataset) -> Clients:
        """The clients, from a data set that is loaded already."""
        seed = self.run.seed if self.partition.seed is None else self.partition.seed
        clients = partition(data, self.scheme, self.partition.clients, seed, self.partition.probe)
        # By the name it was asked for, so that experiment.toml can be run again from anywhere.
        path = Path(self.data.name)
        name = str(path.resolve()) if path.suffix == ".npz" else self.data.name
        return replace(clients, dataset=name)

    def to_run(self, clients: Clients, device: str) -> TrainingRun:
        """The run on these clients."""
        return TrainingRun(
            self.method,
            clients,
            self.model,
            self.local,
            self.run,
            self.engine,
            device,
            server=self.server,
        )


def presets() -> dict[str, str]:
    """Built-in experiments: name and first comment line."""
    found = {}
    for file in resources.files("fedclade.training").joinpath("presets").iterdir():
        if file.name.endswith(".toml"):
            found[file.name.removesuffix(".toml")] = file.read_text().splitlines()[0].lstrip("# ")
    return dict(sorted(found.items()))


def read(source: str | os.PathLike[str]) -> dict[str, Table]:
    """The tables of a TOML file, or of a preset by its name."""
    path = Path(source)
    name = str(source)
    if name in presets():
        text = resources.files("fedclade.training").joinpath("presets", f"{name}.toml").read_text()
    elif path.exists() and not path.is_dir():
        try:
            text = safe_read.read(path, safe_read.MOST_TOML).decode()
        except UnicodeDecodeError as error:
            raise InvalidInputError(f"{path}: it cannot be read as text ({error}).") from error
    else:
        raise InvalidInputError(
            f"experiment '{name}': neither a file nor a preset.{nearest(name, presets())}"
        )
    try:
        return safe_read.parse_toml(text)
    except ValueError as error:
        raise InvalidInputError(f"{name}: not valid TOML: {error}.") from error


def apply(tables: dict[str, Table], sets: Sequence[str]) -> dict[str, Table]:
    """The tables with `table.key=value` assignments made. A value is read as TOML; what is not TOML
    is a string.
    """
    result = {
        name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()
    }
    # Names first: choosing another method or partition drops the fields of the one before, and must
    # not drop what was set beside it.
    for given in sorted(
        sets, key=lambda given: given.partition("=")[0].strip().partition(".")[2] != "name"
    ):
        where, equals, text = given.partition("=")
        table, dot, key = where.strip().partition(".")
        if not equals or not dot or not key:
            raise InvalidInputError(
                f"--set {given}: write it as table.key=value, for example --set run.rounds=30."
            )
        value = value_of(text)
        if not isinstance(result.get(table, {}), dict):
            raise InvalidInputError(f"{table} = {result[table]!r}: must be a table, [{table}].")
        if (
            key == "name"
            and table in ("method", "partition", "model")
            and result.get(table, {}).get("name") != value
        ):
            result[table] = _common_only(
                table, result.get(table, {})
            )  # another method's or partition's fields do not apply
        result.setdefault(table, {})[key] = value
    return result


def value_of(text: str) -> Any:
    """What was given on the command line: read as TOML; what is not TOML is a string."""
    try:
        return safe_read.parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text.strip()


def _common_only(table: str, values: Table) -> Table:
    common = {each.name for each in fields(PartitionConfig)} if table == "partition" else set()
    return {key: value for key, value in values.items() if key in common}


def experiment(tables: dict[str, Table]) -> Experiment:
    """Check every table and make what it names."""
    for name, table in tables.items():
        if name not in TABLES:
            raise InvalidInputError(f"[{name}]: unknown table.{nearest(name, TABLES)}")
        if not isinstance(table, dict):
            raise InvalidInputError(f"{name} = {table!r}: must be a table, [{name}].")
    for name in ("data", "partition", "model", "method"):
        if "name" not in tables.get(name, {}):
            raise InvalidInputError(
                f'{name}.name: missing; say which, for example [{name}] name = "{_example(name)}".'
            )
    shares = {each.name for each in fields(PartitionConfig)}
    split = {key: value for key, value in tables["partition"].items() if key in shares}
    own = {key: value for key, value in tables["partition"].items() if key not in shares}
    common = build(PartitionConfig, split, "partition")
    for key, least in (("clients", 1), ("probe", 0), ("seed", 0)):
        value = getattr(common, key)
        if value is not None and value < least:
            raise InvalidInputError(f"partition.{key} = {value}: must be at least {least}.")
    return Experiment(
        data=build(DataConfig, tables["data"], "data"),
        partition=common,
        scheme=_named("partition", own, also=shares),
        model=_named("model", tables["model"]),
        local=build(LocalConfig, tables.get("local", {}), "local"),
        method=_named("method", tables["method"]),
        run=build(TrainingConfig, tables.get("run", {}), "run"),
        server=build(ServerConfig, tables.get("server", {}), "server"),
        engine=build(EngineConfig, tables.get("engine", {}), "engine"),
    )


def _example(table: str) -> str:
    return {"data": "digits", "partition": "iid", "model": "mlp", "method": "fedavg"}[table]


def _named(kind: Any, table: Table, also: set[str] | None = None) -> Any:
    name = table["name"]
    if not isinstance(name, str):
        raise InvalidInputError(
            f"{kind}.name = {name!r}: must be a string.{nearest('', REGISTRY[kind])}"
        )
    rest = {key: value for key, value in table.items() if key != "name"}
    return build(find(kind, name, f"{kind}.name = '{name}'"), rest, kind, also or set())


def build(cls: type[T], values: Table, table: str, also: set[str] | None = None) -> T:
    """Make a dataclass of a table: unknown keys are refused with the nearest known one, values by
    type, ranges by the class itself.
    """
    settable = (
        [each for each in fields(cls) if each.init and not is_injected(each)]
        if is_dataclass(cls)
        else []
    )
    hints = get_type_hints(cls)
    known = {each.name for each in settable}
    checked = {}
    for key, value in values.items():
        if key not in known:
            renamed = RENAMED_KEYS.get(f"{table}.{key}")
            if renamed is not None:
                raise InvalidInputError(f"{table}.{key}: renamed; write {renamed}.")
            known_names = (
                nearest(key, known | (also or set())) or f" {cls.__name__} has no settings."
            )
            raise InvalidInputError(f"{table}.{key}: unknown key.{known_names}")
        checked[key] = _typed(hints[key], value, f"{table}.{key}")
    for each in settable:
        has_default = each.default is not MISSING or each.default_factory is not MISSING
        if each.name not in checked and not has_default:
            raise InvalidInputError(f"{table}.{each.name}: missing; {cls.__name__} needs it.")
    return cls(**checked)


def _typed(hint: Any, value: Any, where: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInputError(f"{where} = {value}: must be a finite number.")
    try:
        # By way of JSON, so that an array may be a tuple while text never passes for a number.
        return TypeAdapter(hint).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        wanted = dict.fromkeys(_in_words(problem["msg"]) for problem in error.errors())
        raise InvalidInputError(
            f"{where} = {value if isinstance(value, date | time) else repr(value)}: must be"
            f" {' or '.join(wanted)}."
        ) from error


def _in_words(message: str) -> str:
    words = {
        "integer": "whole number",
        "boolean": "true or false",
        "string": "text",
        "array": "list",
        "tuple": "list",
    }
    text = message.removeprefix("Input should be ").replace("a valid ", "a ")
    for theirs, ours in words.items():
        text = text.replace(f"a {theirs}", ours if theirs in ("boolean", "string") else f"a {ours}")
    return text
