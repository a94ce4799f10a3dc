"""Run directories: the files of a run, and how to read them."""

from __future__ import annotations

import csv
import io
import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedclade.core.names import NO_NAMES, Names
from fedclade.core.pytree import Tree, add_prefix
from fedclade.errors import InvalidInputError, WriteError
from fedclade.io import checkpoint, safe_read, schemas
from fedclade.io.atomic import append, remove_partials, translate_os_errors, write_text
from fedclade.io.checkpoint import Checkpoint, read_metadata, write_tensors
from fedclade.io.schemas import LrSearch, RoundRecord, Summary

T = TypeVar("T")
_RUN_FILES = ("experiment.toml", "rounds.jsonl", "summary.json", "checkpoint")


class RunDirectory:
    """The folder of one run: experiment.toml, rounds.jsonl, clients.csv, summary.json, models/,
    checkpoint/, names.json if clients, classes or features have names, and encoding.json
    if the data are a table, texts or images. Nothing is read or written before a method is called.

    Args:
        folder: the folder; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def open(folder: str | os.PathLike[str], resume: bool) -> RunDirectory:
        """The directory of a run that is about to be written. It is created later, by `begin`.

        Args:
            folder: the folder.
            resume: whether the folder may hold a run already, which is then continued.
        """
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise InvalidInputError(f"out = '{path}': it is a file. Give a folder.", "out")
        store = RunDirectory(path)
        if store.holds_run() and not resume:
            raise InvalidInputError(
                f"out = '{path}': it already holds a run. Give another folder, or resume the run"
                " (--resume, resume=True).",
                "out",
            )
        return store

    def begin(self, tables: dict[str, dict[str, Any]], history: list[RoundRecord]) -> None:
        """Create the folder and write the files of a run that starts or resumes; summary.json is
        removed.

        Args:
            tables: the tables of experiment.toml.
            history: the rounds before the resumed one; empty for a new run.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInputError(
                f"out = '{self.folder}': the folder cannot be made ({error.strerror}).", "out"
            ) from error
        with translate_os_errors(self.folder):
            # Not in the run directory itself, which may hold the user's files too.
            for folder in ("checkpoint", "models"):
                remove_partials(self.folder / folder)
            (self.folder / "summary.json").unlink(missing_ok=True)
        self.write_experiment(tables)
        self.write_history(history)

    def holds_run(self) -> bool:
        """Whether the folder has a file of a run, finished or not."""
        return any((self.folder / name).exists() for name in _RUN_FILES)

    def summary(self) -> Summary | None:
        """summary.json; None if the run has not finished."""
        return (
            schemas.read(path, schemas.summary)
            if (path := self.folder / "summary.json").exists()
            else None
        )

    def history(self) -> list[RoundRecord]:
        """The rounds in rounds.jsonl."""
        return schemas.read(self.folder / "rounds.jsonl", schemas.rounds)

    def tables(self) -> dict[str, dict[str, Any]]:
        """The tables of experiment.toml."""
        return schemas.read(self.folder / "experiment.toml", schemas.tables, safe_read.MOST_TOML)

    def write_experiment(self, tables: dict[str, dict[str, Any]]) -> None:
        """Write experiment.toml, without the values that are None."""
        without_none = {
            name: {key: value for key, value in table.items() if value is not None}
            for name, table in tables.items()
        }
        self._write("experiment.toml", tomli_w.dumps(without_none))

    def write_history(self, rows: list[RoundRecord]) -> None:
        """Write rounds.jsonl."""
        self._write("rounds.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def append_round(self, row: RoundRecord) -> None:
        """Append a round to rounds.jsonl."""
        append(self.folder / "rounds.jsonl", json.dumps(row))

    def write_clients(self, columns: dict[str, list[Any]]) -> None:
        """Write clients.csv.

        Args:
            columns: for each column, the values of the clients in order; None is an empty cell.
        """
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        self._write("clients.csv", text.getvalue())

    def write_names(self, names: Names) -> None:
        """names.json: the names of clients, classes and features, if any of them have names."""
        known = {key: value for key, value in asdict(names).items() if value is not None}
        if known:
            self._write("names.json", json.dumps(known, ensure_ascii=False, indent=1) + "\n")
        else:
            with translate_os_errors(self.folder):
                (self.folder / "names.json").unlink(missing_ok=True)

    def names(self) -> Names:
        """The names of clients, classes and features."""
        path = self.folder / "names.json"
        return schemas.read(path, schemas.names) if path.exists() else NO_NAMES

    def write_encoding(self, encoding: dict[str, Any] | None) -> None:
        """encoding.json: how rows of a table, texts or images become inputs; None for other
        data.
        """
        if encoding is not None:
            text = json.dumps(encoding, ensure_ascii=False, indent=1) + "\n"
            self._write("encoding.json", text)
        else:
            with translate_os_errors(self.folder):
                (self.folder / "encoding.json").unlink(missing_ok=True)

    def encoding(self, decode: Callable[[object], T]) -> T | None:
        """encoding.json; None if the run has none.

        Args:
            decode: checks the content; what is wrong is a `ValueError`.
        """
        path = self.folder / "encoding.json"
        if not path.exists():
            return None
        return schemas.read(path, lambda text: decode(safe_read.parse_json(text)))

    def write_lr_search(self, search: LrSearch) -> None:
        """Write lr_search.json, which a run with `local.lr = "auto"` has."""
        self._write("lr_search.json", json.dumps(search, indent=2) + "\n")

    def lr_search(self) -> LrSearch | None:
        """lr_search.json; None if the run has chosen no learning rate."""
        path = self.folder / "lr_search.json"
        return schemas.read(path, schemas.lr_search) if path.exists() else None

    def write_summary(self, summary: Summary) -> None:
        """Write summary.json, which marks the run as finished."""
        self._write("summary.json", json.dumps(summary, indent=2) + "\n")

    def write_comparison(self, comparison: dict[str, Any]) -> None:
        """Write comparison.json, which a folder of several runs has."""
        self._write("comparison.json", json.dumps(comparison, indent=2) + "\n")

    def write_plan(self, runs: list[dict[str, Any]]) -> None:
        """Write plan.json: all runs of a comparison, before the first begins."""
        self._write("plan.json", json.dumps({"runs": runs}, indent=2) + "\n")

    def plan(self) -> list[dict[str, Any]]:
        """The runs of plan.json: `name`, `title` and `rounds` of each."""
        return list(schemas.read(self.folder / "plan.json", schemas.plan)["runs"])

    def comparison(self) -> dict[str, Any]:
        """The content of comparison.json."""
        return schemas.read(self.folder / "comparison.json", schemas.comparison)

    def read_clients(self, number: int) -> dict[str, list[Any]]:
        """The columns of clients.csv.

        Args:
            number: the number of clients of the run; a file with another number is damaged.
        """
        names = self.names().clients
        return schemas.read(
            self.folder / "clients.csv", lambda text: schemas.columns(text, number, names)
        )

    def write_models(
        self,
        models: Tree,
        fixed: Tree,
        assignment: Tensor,
        clusters: Tensor,
        shape: tuple[int, ...] | None,
        classes: int | None,
        outputs: int | None,
    ) -> None:
        """Write models/models.safetensors.

        Args:
            models: the trained weights, with a row for each model (`models/…`).
            fixed: buffers and frozen weights, which all models share (`fixed/…`).
            assignment: (clients,) the row of each client's model; -1 for none.
            clusters: (clients,) the cluster of each client; -1 for none.
            shape: the shape of one input; None if an input is several tensors.
            classes: the number of classes; None if the targets are not class labels.
            outputs: the number of outputs of a model that is built by its name; None if the targets
                do not give it.
        """
        with translate_os_errors(self.folder / "models"):
            (self.folder / "models").mkdir(exist_ok=True)
        metadata = {"shape": shape, "classes": classes, "outputs": outputs}
        tensors = {
            "assignment": assignment,
            "clusters": clusters,
            **add_prefix("models", models),
            **add_prefix("fixed", fixed),
        }
        write_tensors(self.folder / "models" / "models.safetensors", tensors, metadata)

    def write_adapter(self, description: dict[str, Any]) -> None:
        """Write models/adapter.json.

        Args:
            description: the configuration of the adapter and its names, as JSON.
        """
        write_text(self._adapter_path, json.dumps(description, indent=1) + "\n")

    def adapter(self) -> dict[str, Any] | None:
        """models/adapter.json; None if the run trained no adapter of peft."""
        path = self._adapter_path
        return schemas.read(path, schemas.adapter) if path.exists() else None

    @property
    def _adapter_path(self) -> Path:
        return self.folder / "models" / "adapter.json"

    def save_checkpoint(self, point: Checkpoint) -> None:
        """Write a checkpoint, and remove all but the last two."""
        checkpoint.save(self.folder / "checkpoint", point)

    def latest_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that is not damaged; None if there are no checkpoints."""
        return checkpoint.latest(self.folder / "checkpoint")

    def _write(self, name: str, text: str) -> None:
        write_text(self.folder / name, text)


@contextmanager
def resumable(store: RunDirectory | None) -> Iterator[None]:
    """A context in which a `WriteError` also names the checkpoint from which the run can resume."""
    try:
        yield
    except WriteError as error:
        if store is None:
            raise
        raise WriteError(f"{error} {_resume_point(store)}", error.field) from error


def _resume_point(store: RunDirectory) -> str:
    try:
        # Damaged checkpoints were already reported at start-up.
        with warnings.catch_warnings(action="ignore"):
            last = store.latest_checkpoint()
    except InvalidInputError as error:
        return str(error)
    if last is None:
        return "No checkpoint yet; resuming will restart the run."
    return f"The last checkpoint is of round {last.round}; resuming continues from there."


class StoredModels:
    """The models of a finished run, read from disk one row at a time.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "models" / "models.safetensors"
        if not self.path.exists():
            raise InvalidInputError(
                f"{folder}: no finished run (there is no models/models.safetensors). Run it, or"
                " resume it with --resume.",
                str(folder),
            )
        try:
            # The kind of file only, not its size: rows are read one at a time.
            safe_read.size(self.path)
            with safe_open(self.path, framework="pt") as file:
                metadata = read_metadata(file)
                self.model_ids: Tensor = file.get_tensor("assignment")
                self.clusters: Tensor = file.get_tensor("clusters")
                stored = list(file.keys())
                shapes = [
                    file.get_slice(name).get_shape()
                    for name in stored
                    if name.startswith("models/")
                ]
            shape = metadata["shape"]
            self.shape: tuple[int, ...] | None = None if shape is None else tuple(shape)
            self.classes: int | None = metadata["classes"]
            self.outputs: int | None = metadata["outputs"]
            self._check(shapes)
        except InvalidInputError:
            raise
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise InvalidInputError(f"{self.path}: damaged ({error}).", str(self.path)) from error

    def _check(self, shapes: list[list[int]]) -> None:
        """Check what `row` and the building of the model rely on: the file may come from any
        source.
        """
        rows = {shape[0] if shape else 0 for shape in shapes}
        if len(rows) > 1 or self.model_ids.ndim != 1 or self.model_ids.shape != self.clusters.shape:
            raise ValueError(
                f"its parameters have rows for {sorted(rows)} models, 'assignment' has shape"
                f" {tuple(self.model_ids.shape)} and 'clusters' {tuple(self.clusters.shape)}"
            )
        for name, value, most in (
            ("assignment", self.model_ids, min(rows, default=0)),
            ("clusters", self.clusters, 2**63),
        ):
            if value.dtype != torch.int64 or (
                len(value) and not -1 <= int(value.min()) <= int(value.max()) < most
            ):
                raise ValueError(f"'{name}' has values outside -1 … {most - 1}")
        if not all(
            type(side) is int and side > 0
            for side in (*(self.shape or ()), self.classes, self.outputs)
            if side is not None
        ):
            raise ValueError(
                f"shape {self.shape}, classes {self.classes} and outputs {self.outputs} must be"
                " whole numbers above 0"
            )

    @property
    def fixed(self) -> Tree:
        """Buffers and frozen weights, read from disk: they may be as large as a language model."""
        with safe_open(self.path, framework="pt") as file:
            names = [name for name in list(file.keys()) if name.startswith("fixed/")]
            return {name.removeprefix("fixed/"): file.get_tensor(name) for name in names}

    def weights_of(self, client: int) -> Tree | None:
        """All weights of this client's model; None if the run has no model of it."""
        row = int(self.model_ids[client])
        return self.fixed | self.row(row) if row >= 0 else None

    def row(self, number: int) -> Tree:
        """The trained weights of model `number`."""
        with safe_open(self.path, framework="pt") as file:
            names = [name for name in list(file.keys()) if name.startswith("models/")]
            return {
                name.removeprefix("models/"): torch.as_tensor(file.get_slice(name)[number])
                for name in names
            }
