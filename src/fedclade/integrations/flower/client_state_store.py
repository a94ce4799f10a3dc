"""The disk of a site: what its clients remember, and the models they were given."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from fedclade.core.pytree import Tree, tree_index
from fedclade.engines.remote.node import StateSnapshot
from fedclade.errors import FedcladeError
from fedclade.io.atomic import atomic_write

RUNS = 3  # of which memory is kept: an interrupted run may be resumed after another was tried


class DiskKeeper:
    """One run's memory in `folder`/memory/RUN, its clients' models in `folder`/models. Only the
    owner may read either.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder
        self._memory = folder / "memory" / _safe(run)

    def load(self) -> tuple[Tree, list[StateSnapshot]]:
        listed = self._memory / "turns.json"
        if not listed.exists():
            return {}, []
        try:
            turns = json.loads(listed.read_text())
            return load_file(self._memory / "initial.safetensors"), [
                StateSnapshot(turn, load_file(self._file(turn))) for turn in turns
            ]
        except (OSError, ValueError, SafetensorError) as error:
            raise FedcladeError(
                f"{self._memory}: what the clients remember cannot be read ({error})."
            ) from error

    def save(self, initial: Tree, kept: list[StateSnapshot]) -> None:
        new = not (self._memory / "turns.json").exists()
        self._memory.mkdir(parents=True, exist_ok=True, mode=0o700)
        first = self._memory / "initial.safetensors"
        if new or not first.exists():
            _write(first, initial)
            self._let_go_of_old_runs()
        for each in kept:
            if not self._file(each.transaction_id).exists() or each is kept[-1]:
                _write(self._file(each.transaction_id), each.memory)
        # The list comes last: what it names is whole.
        _replace(
            self._memory / "turns.json", json.dumps([each.transaction_id for each in kept]).encode()
        )
        listed = {self._file(each.transaction_id) for each in kept}
        for file in self._memory.glob("turn-*"):
            if file not in listed:
                file.unlink(missing_ok=True)

    def deliver(self, names: list[str], models: Tree) -> None:
        folder = self.folder / "models"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for row, name in enumerate(names):
            _write(folder / f"{_safe(name)}.safetensors", tree_index(models, torch.tensor(row)))

    def _file(self, turn: str) -> Path:
        return self._memory / f"turn-{_safe(turn)}.safetensors"

    def _let_go_of_old_runs(self) -> None:
        runs = sorted(self._memory.parent.iterdir(), key=lambda run: run.stat().st_mtime)
        for run in runs[:-RUNS]:
            shutil.rmtree(run, ignore_errors=True)


def _safe(name: str) -> str:
    """A file name of our own making: what came from elsewhere decides no path."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:60]
    return (
        plain
        if plain == name
        else f"{plain}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
    )


def _write(path: Path, tensors: Tree) -> None:
    _replace(path, save({name: value.contiguous() for name, value in tensors.items()}))


def _replace(path: Path, content: bytes) -> None:
    with atomic_write(path, len(content)) as part:
        part.touch(mode=0o600)  # before anything is in it
        part.write_bytes(content)
