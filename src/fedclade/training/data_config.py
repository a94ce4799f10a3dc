"""[data] of an experiment file: a data set by its name, or your own data by their path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from fedclade.data.bundled_tables import BUNDLED_TABLES
from fedclade.data.column_encoding import Missing, Standardize
from fedclade.data.datasets import TABLE_SUFFIXES
from fedclade.data.federated_dataset import Clients
from fedclade.data.hugging_face import from_hf, is_saved
from fedclade.data.image_encoding import Color
from fedclade.data.image_folders import Layout, from_images
from fedclade.data.tables import TableSettings, read_table
from fedclade.data.texts import from_text
from fedclade.errors import InvalidInputError, require, require_int

Kind: TypeAlias = Literal["table", "texts", "images", "hf"]
Progress: TypeAlias = Callable[[int, int], None]

_READERS: dict[str, Callable[..., Clients]] = {
    "texts": from_text,
    "images": from_images,
    "hf": from_hf,
}
_NAMES = {
    "table": "a table",
    "texts": "texts",
    "images": "a folder of images",
    "hf": "a data set of Hugging Face",
}
# A key that only one kind of data has, besides those of tables.
_MARKS: dict[str, Kind] = {
    "text": "texts",
    "length": "texts",
    "words": "texts",
    "x": "hf",
    "layout": "images",
    "size": "images",
    "color": "images",
}
_NEEDED = {
    "table": ("client", "target"),
    "texts": ("text", "client"),
    "hf": ("client", "x", "target"),
}
_OF_ALL = ("name", "path", "validation", "validation_seed", "probe")


@dataclass(frozen=True)
class DataConfig:
    """The data set: `name` for data that a partition divides among clients, or `path` for data
    that have clients: a table, texts, a folder of images, or a data set of Hugging Face. The keys
    from `client` on are for `path`.

    Args:
        name: its name, or the path of an .npz file or of a folder of .npy files.
        validation: the share of each client's training data that becomes its validation data; 0
            for none.
        validation_seed: the seed of this split; None for the seed of the partition.
        path: a CSV or Parquet file, or "heart"; with `text` a CSV or Parquet file of texts; a
            folder of images; or a folder that `save_to_disk` of Hugging Face wrote.
        client: the column with the name of each row's client.
        target: the column with the targets.
        task: of a table "classification" or "regression", of texts "classification", "tagging" or
            "language_model"; None to find it from the targets.
        test: the share of each client's rows that is its test part, or for a table the name of a
            column that says train, test or validation; None for 0.2.
        drop: columns of a table that are no inputs.
        categorical: columns of a table with numbers that are categories.
        missing: of a table "mean" or "drop"; None for "mean".
        standardize: of a table "federated", "client" or "none"; None for "federated".
        text: the column with the texts.
        length: the number of words of an input; None for 64.
        words: the size of the vocabulary; None for 10,000.
        layout: of images "site/class" or "site/split/class"; None for "site/class".
        size: (height, width) to which images are resized; None if all have the same size.
        color: of images "rgb" or "gray"; None for "rgb".
        x: the column, or the columns, of inputs in a data set of Hugging Face.
        probe: the share of each client's training inputs that the server gets as probe data; None
            for none.
        seed: the seed of the test part; None for the seed of the run.
    """

    name: str | None = None
    validation: float = 0.0
    validation_seed: int | None = None
    path: str | None = None
    client: str | None = None
    target: str | None = None
    task: Literal["classification", "regression", "tagging", "language_model"] | None = None
    test: float | str | None = None
    drop: tuple[str, ...] | None = None
    categorical: tuple[str, ...] | None = None
    missing: Missing | None = None
    standardize: Standardize | None = None
    text: str | None = None
    length: int | None = None
    words: int | None = None
    layout: Layout | None = None
    size: tuple[int, int] | None = None
    color: Color | None = None
    x: str | tuple[str, ...] | None = None
    probe: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        require(
            self.name is None or self.path is None,
            "data.path",
            self.path,
            f"data.name = '{self.name}' is there too; keep one of the two",
        )
        if self.path is None:
            for key, value in vars(self).items():
                is_allowed = value is None or (key in _OF_ALL and key != "probe")
                instead = "; use partition.probe" if key == "probe" else ""
                only = f"only data with a path, data.path, have it{instead}"
                require(is_allowed, f"data.{key}", value, only)
        else:
            self._check_keys()
        require(
            0 <= self.validation < 1,
            "data.validation",
            self.validation,
            "must be at least 0 (for none) and below 1",
        )
        if self.validation_seed is not None:
            require_int("data.validation_seed", self.validation_seed, 0)
        require(
            self.probe is None or 0 < self.probe < 1,
            "data.probe",
            self.probe,
            "must be a share above 0 and below 1, such as 0.05",
        )

    @property
    def kind(self) -> Kind:
        """What `path` names. The keys decide; without a key of one kind, the file does."""
        assert self.path is not None
        folder = Path(self.path).expanduser()
        is_table_file = folder.suffix.lower() in TABLE_SUFFIXES
        for key in self._given():
            kind = _MARKS.get(key)
            if kind == "texts" or (kind is not None and not is_table_file):
                return kind
        if self.path in BUNDLED_TABLES or not folder.is_dir():
            return "table"
        return "hf" if is_saved(folder) else "images"

    def read(self, run_seed: int, progress: Progress | None = None) -> Clients:
        """The clients of `path`.

        Args:
            run_seed: the seed of the run.
            progress: called with the number of images that are read and their number in all.
        """
        clients = self._read_all(run_seed, progress)
        if self.probe is None:
            return clients
        return replace(
            clients.with_probe(self.probe), data_origin=clients.data_origin | {"probe": self.probe}
        )

    def _read_all(self, run_seed: int, progress: Progress | None) -> Clients:
        """The clients without probe data."""
        assert self.path is not None
        if self.kind == "table":
            return read_table(self.path, self.table_settings(run_seed))
        # An absolute path: experiment.toml then runs from any folder.
        source = str(Path(self.path).expanduser().resolve())
        settings = _defaults(self.kind) | {"seed": run_seed} | self._given()
        others = {"progress": progress} if self.kind == "images" else {}
        try:
            clients = _READERS[self.kind](source, **settings, **others)
        except InvalidInputError as error:
            raise _with_table(error, settings) from error
        clients = replace(
            clients,
            dataset=source,
            partition="folders" if self.client is None else f"column {self.client}",
            origin={"seed": settings["seed"]},
            data_origin={"path": source, **_without_none(settings)},
        )
        return self.with_validation(clients)

    @property
    def validation_origin(self) -> dict[str, Any]:
        """The settings of the validation data that are given."""
        given = {"validation": self.validation or None, "validation_seed": self.validation_seed}
        return _without_none(given)

    def table_settings(self, run_seed: int) -> TableSettings:
        """How the table `path` becomes clients.

        Args:
            run_seed: the seed of the run.
        """
        return TableSettings(
            **{"seed": run_seed} | self._given(),
            validation=self.validation,
            validation_seed=self.validation_seed,
        )

    def with_validation(self, clients: Clients) -> Clients:
        """The clients with validation data, if there is to be any."""
        if not self.validation:
            return clients
        return clients.with_validation(self.validation, self.validation_seed)

    def _given(self) -> dict[str, Any]:
        """The keys for `path` that are given."""
        given = {key: value for key, value in vars(self).items() if key not in _OF_ALL}
        return _without_none(given)

    def _check_keys(self) -> None:
        kind, given = self.kind, self._given()
        allowed = _keys(kind)
        for key, value in given.items():
            require(
                key in allowed,
                f"data.{key}",
                value,
                f"data.path = '{self.path}' is {_NAMES[kind]}, which has {', '.join(allowed)}",
            )
        for key in _NEEDED.get(kind, ()):
            if key not in given:
                field = f"data.{key}"
                raise InvalidInputError(
                    f"{field}: missing; {_NAMES[kind]}, data.path, needs the name of this column.",
                    field,
                )
        if kind == "table":
            self.table_settings(0)


def _keys(kind: Kind) -> tuple[str, ...]:
    """The keys that a kind of data has, besides those of all."""
    if kind != "table":
        return tuple(_defaults(kind))
    return tuple(setting.name for setting in fields(TableSettings) if setting.name not in _OF_ALL)


def _defaults(kind: Kind) -> dict[str, Any]:
    """The arguments of the function that reads this kind of data; None where one has no default."""
    arguments = list(inspect.signature(_READERS[kind]).parameters.values())[1:]
    return {
        argument.name: None if argument.default is inspect.Parameter.empty else argument.default
        for argument in arguments
        if argument.name != "progress"
    }


def _with_table(error: InvalidInputError, keys: Iterable[str]) -> InvalidInputError:
    """The error with the key of the experiment file in place of the argument in Python."""
    field = {"data": "data.path"}.get(error.field, f"data.{error.field}")
    message = str(error)
    if error.field not in (*keys, "data") or not message.startswith(error.field):
        return error
    return InvalidInputError(field + message.removeprefix(error.field), field)


def _without_none(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
