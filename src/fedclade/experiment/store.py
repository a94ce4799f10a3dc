"""A run directory: what a run leaves on disk, and how it is read back."""

from __future__ import annotations

import csv
import io
import json
import os
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedclade.client.tree import Tree, prefixed
from fedclade.errors import InvalidInput
from fedclade.experiment import checkpoint
from fedclade.experiment.checkpoint import Checkpoint, read_about, write_tensors
from fedclade.experiment.files import whole

T = TypeVar("T")
_RUN_FILES = ("experiment.toml", "rounds.jsonl", "summary.json", "checkpoint")


class RunStore:
    """The folder of one run: experiment.toml, rounds.jsonl, clients.csv, summary.json, models/, checkpoint/."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @staticmethod
    def open(folder: str | os.PathLike[str], resume: bool) -> RunStore:
        """A folder to write a run to. One that holds a run already is refused unless it is resumed."""
        path = Path(folder)
        if path.exists() and not path.is_dir():
            raise InvalidInput(f"out = '{path}': it is a file; give a folder.")
        store = RunStore(path)
        if store.holds_run() and not resume:
            raise InvalidInput(f"out = '{path}': it already holds a run; give another folder, or resume it (--resume, resume=True).")
        return store

    def begin(self, tables: dict[str, dict[str, Any]], history: list[dict[str, Any]]) -> None:
        """Make the folder and write how the run begins: nothing of an earlier end is left."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidInput(f"out = '{self.folder}': it cannot be made ({error.strerror}).") from error
        (self.folder / "summary.json").unlink(missing_ok=True)
        self.write_experiment(tables)
        self.write_history(history)

    def holds_run(self) -> bool:
        return any((self.folder / name).exists() for name in _RUN_FILES)

    def summary(self) -> dict[str, Any] | None:
        """What a finished run wrote, or None."""
        return self._read("summary.json", json.loads) if (self.folder / "summary.json").exists() else None

    def history(self) -> list[dict[str, Any]]:
        return self._read("rounds.jsonl", lambda text: [json.loads(line) for line in text.splitlines()])

    def tables(self) -> dict[str, dict[str, Any]]:
        """What experiment.toml says; one that was cut short is noticed by its last table."""

        def parse(text: str) -> dict[str, dict[str, Any]]:
            tables = tomllib.loads(text)
            if not {"model", "engine"} <= tables.keys():
                raise ValueError("a table is missing")
            return tables

        return self._read("experiment.toml", parse)

    def write_experiment(self, tables: dict[str, dict[str, Any]]) -> None:
        known = {name: {key: value for key, value in table.items() if value is not None} for name, table in tables.items()}
        self._write("experiment.toml", tomli_w.dumps(known))

    def write_history(self, rows: list[dict[str, Any]]) -> None:
        self._write("rounds.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def append_round(self, row: dict[str, Any]) -> None:
        with (self.folder / "rounds.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def write_clients(self, columns: dict[str, list[Any]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        self._write("clients.csv", text.getvalue())

    def write_summary(self, summary: dict[str, Any]) -> None:
        self._write("summary.json", json.dumps(summary, indent=2) + "\n")

    def write_comparison(self, comparison: dict[str, Any]) -> None:
        self._write("comparison.json", json.dumps(comparison, indent=2) + "\n")

    def comparison(self) -> dict[str, Any]:
        """What comparison.json says."""

        def parse(text: str) -> dict[str, Any]:
            found = json.loads(text)
            if not isinstance(found, dict):
                raise ValueError("it holds no table")
            return found

        return self._read("comparison.json", parse)

    def read_clients(self, number: int) -> dict[str, list[Any]]:
        """The columns of clients.csv, which has a line for each of so many clients; an empty place is None."""

        def columns(text: str) -> dict[str, list[Any]]:
            header, *rows = list(csv.reader(text.splitlines()))
            if len(rows) != number:
                raise ValueError(f"it has {len(rows)} clients, the run {number}")
            values = [[json.loads(value) if value else None for value in row] for row in rows]
            return dict(zip(header, map(list, zip(*values, strict=True)), strict=True))

        return self._read("clients.csv", columns)

    def write_models(
        self, models: Tree, fixed: Tree, assignment: Tensor, clusters: Tensor, shape: tuple[int, ...], classes: int | None
    ) -> None:
        """models/models.safetensors: `models/…`, a row for each model; `fixed/…`, what all share and none trains (buffers, frozen
        weights); `assignment`, the row each client uses (-1: none); `clusters`."""
        (self.folder / "models").mkdir(exist_ok=True)
        about = {"shape": shape, "classes": classes}
        tensors = {"assignment": assignment, "clusters": clusters, **prefixed("models", models), **prefixed("fixed", fixed)}
        write_tensors(self.folder / "models" / "models.safetensors", tensors, about)

    def save_checkpoint(self, point: Checkpoint) -> None:
        checkpoint.save(self.folder / "checkpoint", point)

    def latest_checkpoint(self) -> Checkpoint | None:
        return checkpoint.latest(self.folder / "checkpoint")

    def _read(self, name: str, parse: Callable[[str], T]) -> T:
        try:
            return parse((self.folder / name).read_text())
        except (OSError, ValueError) as error:
            raise InvalidInput(f"{self.folder / name}: missing or damaged ({error}).") from error

    def _write(self, name: str, text: str) -> None:
        with whole(self.folder / name) as temporary:
            temporary.write_text(text)


class StoredModels:
    """The models of a finished run, read from disk one row at a time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "models" / "models.safetensors"
        if not self.path.exists():
            raise InvalidInput(f"{folder}: no finished run (there is no models/models.safetensors); run it, or resume it with --resume.")
        try:
            with safe_open(self.path, framework="pt") as file:
                about = read_about(file)
                self.assignment: Tensor = file.get_tensor("assignment")
                self.clusters: Tensor = file.get_tensor("clusters")
                names = [name for name in file.keys() if name.startswith("fixed/")]  # noqa: SIM118 (not a mapping)
                self.fixed: Tree = {name.removeprefix("fixed/"): file.get_tensor(name) for name in names}
            self.shape: tuple[int, ...] = tuple(about["shape"])
            self.classes: int | None = about["classes"]
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise InvalidInput(f"{self.path}: damaged ({error}).") from error

    def row(self, number: int) -> Tree:
        with safe_open(self.path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith("models/")]  # noqa: SIM118 (not a mapping)
            return {name.removeprefix("models/"): torch.as_tensor(file.get_slice(name)[number]) for name in names}
