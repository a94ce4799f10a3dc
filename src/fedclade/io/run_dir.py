"""A run directory: what a run leaves on disk, and how it is read back."""

from __future__ import annotations

import csv
import io
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from fedclade.io.schemas import RoundRecord, Summary

_RUN_FILES = ("experiment.toml", "rounds.jsonl", "summary.json", "checkpoint")


class RunDirectory:
    """The folder of one run: experiment.toml, rounds.jsonl, clients.csv, summary.json, models/,
    checkpoint/, and names.json where clients, classes or features have names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def open(folder: str | os.PathLike[str], resume: bool) -> RunDirectory:
        """A folder to write a run to. One that holds a run already is refused unless it is
        resumed.
        """
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise InvalidInputError(f"out = '{path}': it is a file; give a folder.")
        store = RunDirectory(path)
        if store.holds_run() and not resume:
            raise InvalidInputError(
                f"out = '{path}': it already holds a run; give another folder, or resume it"
                " (--resume, resume=True)."
            )
        return store

    def begin(self, tables: dict[str, dict[str, Any]], history: list[RoundRecord]) -> None:
        """Make the folder and write how the run begins: nothing of an earlier end is left."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInputError(
                f"out = '{self.folder}': it cannot be made ({error.strerror})."
            ) from error
        with translate_os_errors(self.folder):
            for folder in (
                "checkpoint",
                "models",
            ):  # ours alone, unlike the folder that they are in
                remove_partials(self.folder / folder)
            (self.folder / "summary.json").unlink(missing_ok=True)
        self.write_experiment(tables)
        self.write_history(history)

    def holds_run(self) -> bool:
        return any((self.folder / name).exists() for name in _RUN_FILES)

    def summary(self) -> Summary | None:
        """What a finished run wrote, or None."""
        return (
            schemas.read(path, schemas.summary)
            if (path := self.folder / "summary.json").exists()
            else None
        )

    def history(self) -> list[RoundRecord]:
        return schemas.read(self.folder / "rounds.jsonl", schemas.rounds)

    def tables(self) -> dict[str, dict[str, Any]]:
        """What experiment.toml says."""
        return schemas.read(self.folder / "experiment.toml", schemas.tables, safe_read.MOST_TOML)

    def write_experiment(self, tables: dict[str, dict[str, Any]]) -> None:
        known = {
            name: {key: value for key, value in table.items() if value is not None}
            for name, table in tables.items()
        }
        self._write("experiment.toml", tomli_w.dumps(known))

    def write_history(self, rows: list[RoundRecord]) -> None:
        self._write("rounds.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def append_round(self, row: RoundRecord) -> None:
        append(self.folder / "rounds.jsonl", json.dumps(row))

    def write_clients(self, columns: dict[str, list[Any]]) -> None:
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

    def write_summary(self, summary: Summary) -> None:
        self._write("summary.json", json.dumps(summary, indent=2) + "\n")

    def write_comparison(self, comparison: dict[str, Any]) -> None:
        self._write("comparison.json", json.dumps(comparison, indent=2) + "\n")

    def comparison(self) -> dict[str, Any]:
        """What comparison.json says."""
        return schemas.read(self.folder / "comparison.json", schemas.comparison)

    def read_clients(self, number: int) -> dict[str, list[Any]]:
        """The columns of clients.csv of a run with this number of clients."""
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
        shape: tuple[int, ...],
        classes: int | None,
    ) -> None:
        """models/models.safetensors: `models/…`, a row for each model; `fixed/…`, what all share
        and none trains (buffers, frozen weights); `assignment`, the row each client uses (-1:
        none); `clusters`.
        """
        with translate_os_errors(self.folder / "models"):
            (self.folder / "models").mkdir(exist_ok=True)
        metadata = {"shape": shape, "classes": classes}
        tensors = {
            "assignment": assignment,
            "clusters": clusters,
            **add_prefix("models", models),
            **add_prefix("fixed", fixed),
        }
        write_tensors(self.folder / "models" / "models.safetensors", tensors, metadata)

    def save_checkpoint(self, point: Checkpoint) -> None:
        checkpoint.save(self.folder / "checkpoint", point)

    def latest_checkpoint(self) -> Checkpoint | None:
        return checkpoint.latest(self.folder / "checkpoint")

    def _write(self, name: str, text: str) -> None:
        write_text(self.folder / name, text)


@contextmanager
def resumable(store: RunDirectory | None) -> Iterator[None]:
    """A context in which a WriteError also says from which checkpoint the run can be resumed."""
    try:
        yield
    except WriteError as error:
        if store is None:
            raise
        raise WriteError(f"{error} {_left(store)}") from error


def _left(store: RunDirectory) -> str:
    """What a run that has just broken can be resumed from."""
    try:
        # corrupt checkpoints were already reported at start-up
        with warnings.catch_warnings(action="ignore"):
            found = store.latest_checkpoint()
    except InvalidInputError as error:
        return str(error)
    if found is None:
        return "No checkpoint yet; resuming will restart the run."
    return f"The last checkpoint is of round {found.round}; resuming continues from there."


class StoredModels:
    """The models of a finished run, read from disk one row at a time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "models" / "models.safetensors"
        if not self.path.exists():
            raise InvalidInputError(
                f"{folder}: no finished run (there is no models/models.safetensors); run it, or"
                " resume it with --resume."
            )
        try:
            safe_read.size(self.path)  # no more: rows are read one at a time
            with safe_open(self.path, framework="pt") as file:
                metadata = read_metadata(file)
                self.assignment: Tensor = file.get_tensor("assignment")
                self.clusters: Tensor = file.get_tensor("clusters")
                stored = list(file.keys())
                names = [name for name in stored if name.startswith("fixed/")]
                self.fixed: Tree = {
                    name.removeprefix("fixed/"): file.get_tensor(name) for name in names
                }
                shapes = [
                    file.get_slice(name).get_shape()
                    for name in stored
                    if name.startswith("models/")
                ]
            self.shape: tuple[int, ...] = tuple(metadata["shape"])
            self.classes: int | None = metadata["classes"]
            self._check(shapes)
        except InvalidInputError:
            raise
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise InvalidInputError(f"{self.path}: damaged ({error}).") from error

    def _check(self, shapes: list[list[int]]) -> None:
        """Check what `row` and the building of the model rely on: a file from elsewhere may hold
        anything.
        """
        rows = {shape[0] if shape else 0 for shape in shapes}
        if (
            len(rows) > 1
            or self.assignment.ndim != 1
            or self.assignment.shape != self.clusters.shape
        ):
            raise ValueError("its models are not equally many, or clients and clusters are not")
        for name, value, most in (
            ("assignment", self.assignment, min(rows, default=0)),
            ("clusters", self.clusters, 2**63),
        ):
            if value.dtype != torch.int64 or (
                len(value) and not -1 <= int(value.min()) <= int(value.max()) < most
            ):
                raise ValueError(f"'{name}' has other numbers than -1 … {most - 1}")
        if not all(
            type(side) is int and side > 0
            for side in (*self.shape, 1 if self.classes is None else self.classes)
        ):
            raise ValueError(
                f"shape {self.shape} and classes {self.classes} are no whole numbers above 0"
            )

    def weights_of(self, client: int) -> Tree | None:
        """All weights of this client's model, or None where the run has none of it."""
        row = int(self.assignment[client])
        return self.fixed | self.row(row) if row >= 0 else None

    def row(self, number: int) -> Tree:
        with safe_open(self.path, framework="pt") as file:
            names = [name for name in list(file.keys()) if name.startswith("models/")]
            return {
                name.removeprefix("models/"): torch.as_tensor(file.get_slice(name)[number])
                for name in names
            }
