"""Experiment files: TOML, checked key by key and converted to the objects that it names."""

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
from fedclade.errors import InvalidInputError, nearest, require
from fedclade.io import safe_read
from fedclade.methods.base import Method
from fedclade.methods.required_context import is_injected, need_probe_samples
from fedclade.models import ModelSpec
from fedclade.registry import REGISTRY, find
from fedclade.training.config import (
    EngineConfig,
    LocalConfig,
    PrivacyConfig,
    ServerConfig,
    TrainingConfig,
)
from fedclade.training.data_config import DataConfig, Progress
from fedclade.training.personal_layer import PersonalConfig
from fedclade.training.runner import TrainingRun

Table = dict[str, Any]
TABLES = (
    "data",
    "partition",
    "model",
    "local",
    "method",
    "run",
    "personal",
    "server",
    "privacy",
    "engine",
)
T = TypeVar("T")
_UNSAFE = re.compile(r"[^\w.=+-]+")  # in names of folders
_EXAMPLE_NAMES = {"data": "digits", "partition": "iid", "model": "mlp", "method": "fedavg"}

RENAMED_KEYS = {
    "local.lr_decay": "local.decay, with local.schedule = 'exponential'",
    "run.average": "server.aggregator",
    "run.fine_tune_epochs": "personal.epochs, with personal.layer = 'finetune'",
    "run.fine_tune_every": "personal.every",
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
"""Keys of version 0.1 and their new names. A file with an old key is an error that gives the new
name.
"""


@dataclass(frozen=True)
class PartitionConfig:
    """The settings that every partition has in addition to those of its scheme.

    Args:
        clients: the number of clients.
        probe: the number of probe samples; None for a tenth, at most 2,500, if a method of the
            comparison needs them, and 0 otherwise.
        seed: the seed of the partition; None for the seed of the run.
    """

    clients: int = 100
    probe: int | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Experiment:
    """A checked experiment file. The data set is not loaded yet."""

    data: DataConfig
    partition: PartitionConfig
    scheme: Any
    model: ModelSpec
    local: LocalConfig
    method: Method
    run: TrainingConfig
    personal: PersonalConfig
    server: ServerConfig
    privacy: PrivacyConfig
    engine: EngineConfig
    # In a sweep: the listed values that this experiment has, by key.
    chosen: dict[str, str] = field(default_factory=dict, hash=False)
    # Whether a method of the comparison needs probe samples; see `with_common_probe`.
    needs_probe: bool = False
    # Whether the file names no loss; numbers then get the squared error.
    is_default_loss: bool = False

    @property
    def title(self) -> str:
        """The name in tables, such as `clade beta=0.1`. Two keys with the same last part have the
        name of their table too.
        """
        ends = Counter(key.rpartition(".")[2] for key in self.chosen)
        short = {
            key: end if ends[end := key.rpartition(".")[2]] == 1 else key for key in self.chosen
        }
        return " ".join(
            [self.method.name, *(f"{short[key]}={value}" for key, value in self.chosen.items())]
        )

    @property
    def label(self) -> str:
        """The name of its folder: the title, in characters that every file system allows, and the
        seed.
        """
        return f"{_UNSAFE.sub('-', self.title)}-seed{self.run.seed}"

    @property
    def federation_key(self) -> tuple[object, ...]:
        """Experiments with equal keys have the same clients."""
        given = self.partition.seed if self.data.path is None else self.data.seed
        seed = self.run.seed if given is None else given
        return (self.data, self.partition, self.scheme, seed, self.needs_probe)

    def clients(self, root: str | None = None, progress: Progress | None = None) -> Clients:
        """Load the data set and partition it.

        Args:
            root: the folder to search first.
            progress: called with the number of images that are read and their number in all.
        """
        if self.data.path is not None:
            return self.data.read(self.run.seed, progress)
        assert self.data.name is not None
        return self.partitioned(load(self.data.name, root))

    def partitioned(self, data: Dataset) -> Clients:
        """Partition a data set that is already loaded."""
        seed = self.run.seed if self.partition.seed is None else self.partition.seed
        probe = 0 if self.partition.probe is None and not self.needs_probe else self.partition.probe
        clients = partition(data, self.scheme, self.partition.clients, seed, probe)
        # The name in the file, or an absolute path: experiment.toml then runs from any folder.
        name = self.data.name or data.name
        if name.endswith(".npz") or Path(name).name != name:
            name = str(Path(name).expanduser().resolve())
        return self.data.with_validation(replace(clients, dataset=name))

    def to_run(self, clients: Clients, device: str) -> TrainingRun:
        """The run of this experiment on these clients."""
        return TrainingRun(
            self.method,
            clients,
            self.model,
            self.local_for(clients.classes),
            self.run,
            self.engine,
            device,
            server=self.server,
            personal=self.personal,
            privacy=self.privacy,
        )

    def local_for(self, classes: int | None) -> LocalConfig:
        """The settings of local training. Targets of a table that are numbers have the squared
        error by default.

        Args:
            classes: the number of classes; None if the targets are no class labels.
        """
        if classes is None and self.is_default_loss and self.data.path is not None:
            return replace(self.local, loss="mse")
        return self.local


def presets() -> dict[str, str]:
    """The first comment line of each preset, by name."""
    comments = {}
    for file in resources.files("fedclade.training").joinpath("presets").iterdir():
        if file.name.endswith(".toml"):
            name = file.name.removesuffix(".toml")
            comments[name] = file.read_text().splitlines()[0].lstrip("# ")
    return dict(sorted(comments.items()))


def read(source: str | os.PathLike[str]) -> dict[str, Table]:
    """The tables of an experiment file.

    Args:
        source: the path of a TOML file, or the name of a preset.
    """
    path = Path(source)
    name = str(source)
    if name in presets():
        text = resources.files("fedclade.training").joinpath("presets", f"{name}.toml").read_text()
    elif path.exists() and not path.is_dir():
        try:
            text = safe_read.read(path, safe_read.MOST_TOML).decode()
        except UnicodeDecodeError as error:
            raise InvalidInputError(
                f"{path}: cannot be read as text ({error}).", str(path)
            ) from error
    else:
        raise InvalidInputError(
            f"experiment '{name}': neither a file nor a preset.{nearest(name, presets())}", name
        )
    try:
        return safe_read.parse_toml(text)
    except ValueError as error:
        raise InvalidInputError(f"{name}: not valid TOML: {error}.", name) from error


def apply(tables: dict[str, Table], sets: Sequence[str]) -> dict[str, Table]:
    """A copy of the tables with changed values.

    Args:
        tables: the tables of an experiment file.
        sets: assignments `table.key=value`; values as in `value_of`.
    """
    result = {
        name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()
    }
    # Names first: another method or partition drops the fields of the old one, but must not drop
    # the fields that are set in the same call.
    for assignment in sorted(
        sets, key=lambda text: text.partition("=")[0].strip().partition(".")[2] != "name"
    ):
        left, equals, right = assignment.partition("=")
        table, dot, key = left.strip().partition(".")
        if not equals or not dot or not key:
            raise InvalidInputError(
                f"--set {assignment}: write it as table.key=value, for example --set"
                " run.rounds=30.",
                "--set",
            )
        value = value_of(right)
        if not isinstance(result.get(table, {}), dict):
            raise _not_a_table(table, result[table])
        if (
            key == "name"
            and table in ("method", "partition", "model")
            and result.get(table, {}).get("name") != value
        ):
            result[table] = _common_only(table, result.get(table, {}))
        result.setdefault(table, {})[key] = value
    return result


def value_of(text: str) -> Any:
    """A value of the command line: parsed as TOML, or the text if it is not TOML."""
    try:
        return safe_read.parse_toml(f"value = {text}")["value"]
    except ValueError:
        return text.strip()


def _common_only(table: str, values: Table) -> Table:
    """The values that apply to every method, partition or model of this table."""
    common = {setting.name for setting in fields(PartitionConfig)} if table == "partition" else ()
    return {key: value for key, value in values.items() if key in common}


def _not_a_table(name: str, value: object) -> InvalidInputError:
    return InvalidInputError(f"{name} = {value!r}: must be a table, [{name}].", name)


def experiment(tables: dict[str, Table]) -> Experiment:
    """Check all tables of an experiment file, and build the objects that they name."""
    for name, table in tables.items():
        if name not in TABLES:
            raise InvalidInputError(f"[{name}]: unknown table.{nearest(name, TABLES)}", name)
        if not isinstance(table, dict):
            raise _not_a_table(name, table)
    has_path = "path" in tables.get("data", {})
    if has_path and "partition" in tables:
        raise InvalidInputError(
            "[partition]: data.path names data that have clients already. Leave [partition] out.",
            "partition",
        )
    for name in ("model", "method") if has_path else ("data", "partition", "model", "method"):
        if "name" not in tables.get(name, {}):
            raise InvalidInputError(
                f"{name}.name: missing. Write, for example, [{name}] name ="
                f' "{_EXAMPLE_NAMES[name]}".',
                f"{name}.name",
            )
    common_keys = {setting.name for setting in fields(PartitionConfig)}
    table = tables.get("partition", {})
    common_table = {key: value for key, value in table.items() if key in common_keys}
    scheme_table = {key: value for key, value in table.items() if key not in common_keys}
    common = build(PartitionConfig, common_table, "partition")
    for key, least in (("clients", 1), ("probe", 0), ("seed", 0)):
        value = getattr(common, key)
        require(
            value is None or value >= least,
            f"partition.{key}",
            value,
            f"must be at least {least}",
        )
    method = _named("method", tables["method"])
    data = build(DataConfig, tables["data"], "data")
    needs_probe = need_probe_samples([method])
    if needs_probe and has_path and data.probe is None:
        raise InvalidInputError(
            f"data.probe: missing; method {method.name} needs unlabeled inputs at the server. Set"
            " data.probe = 0.05 to give it this share of each client's training inputs.",
            "data.probe",
        )
    return Experiment(
        data=data,
        partition=common,
        scheme=None if has_path else _named("partition", scheme_table, also=common_keys),
        model=_named("model", tables["model"]),
        local=build(LocalConfig, tables.get("local", {}), "local"),
        method=method,
        run=build(TrainingConfig, tables.get("run", {}), "run"),
        personal=build(PersonalConfig, tables.get("personal", {}), "personal"),
        server=build(ServerConfig, tables.get("server", {}), "server"),
        privacy=build(PrivacyConfig, tables.get("privacy", {}), "privacy"),
        engine=build(EngineConfig, tables.get("engine", {}), "engine"),
        needs_probe=needs_probe,
        is_default_loss="loss" not in tables.get("local", {}),
    )


def with_common_probe(experiments: Sequence[Experiment]) -> list[Experiment]:
    """The experiments of a comparison. All set probe samples apart if one of their methods needs
    them, so that all train on the same samples.
    """
    needed = need_probe_samples(experiment.method for experiment in experiments)
    return [replace(experiment, needs_probe=needed) for experiment in experiments]


def _named(kind: Any, table: Table, also: set[str] | None = None) -> Any:
    """The method, model or partition that a table names, with the table's other keys as fields."""
    name = table["name"]
    if not isinstance(name, str):
        raise InvalidInputError(
            f"{kind}.name = {name!r}: must be a string.{nearest('', REGISTRY[kind])}",
            f"{kind}.name",
        )
    rest = {key: value for key, value in table.items() if key != "name"}
    return build(find(kind, name, f"{kind}.name"), rest, kind, also or set())


def build(cls: type[T], values: Table, table: str, also: set[str] | None = None) -> T:
    """Build a dataclass from a table. This function checks keys and types; the class checks ranges.

    Args:
        cls: the dataclass.
        values: the keys and values of the table.
        table: the name of the table in messages.
        also: other allowed keys of the table, for suggestions in messages.
    """
    settable = (
        [setting for setting in fields(cls) if setting.init and not is_injected(setting)]
        if is_dataclass(cls)
        else []
    )
    hints = get_type_hints(cls)
    known = {setting.name for setting in settable}
    checked = {}
    for key, value in values.items():
        name = f"{table}.{key}"
        if key not in known:
            if name in RENAMED_KEYS:
                raise InvalidInputError(f"{name}: renamed; write {RENAMED_KEYS[name]}.", name)
            known_names = (
                nearest(key, known | (also or set())) or f" {cls.__name__} has no settings."
            )
            raise InvalidInputError(f"{name}: unknown key.{known_names}", name)
        checked[key] = _typed(hints[key], value, name)
    for setting in settable:
        has_default = setting.default is not MISSING or setting.default_factory is not MISSING
        if setting.name not in checked and not has_default:
            name = f"{table}.{setting.name}"
            raise InvalidInputError(f"{name}: missing; {cls.__name__} needs it.", name)
    return cls(**checked)


def _typed(hint: Any, value: Any, name: str) -> Any:
    """The value as the type `hint`; `name` is the setting."""
    if isinstance(value, float) and not math.isfinite(value):
        raise InvalidInputError(f"{name} = {value}: must be a finite number.", name)
    try:
        # Through JSON: an array may become a tuple, but text never becomes a number.
        return TypeAdapter(hint).validate_json(json.dumps(value, default=str), strict=True)
    except ValidationError as error:
        allowed = dict.fromkeys(_in_words(problem["msg"]) for problem in error.errors())
        raise InvalidInputError(
            f"{name} = {value if isinstance(value, date | time) else repr(value)}: must be"
            f" {' or '.join(allowed)}.",
            name,
        ) from error


def _in_words(message: str) -> str:
    """The part of a pydantic message that describes the type, in the words of this project."""
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
