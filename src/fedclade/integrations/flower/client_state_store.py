"""The disk of a node: the state and the final models of its clients."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from fedclade.core.pytree import Tree, tree_index
from fedclade.engines.remote.node import StateSnapshot
from fedclade.engines.remote.node_policy import RefusedError
from fedclade.errors import FedcladeError, WriteError
from fedclade.io.atomic import atomic_write
from fedclade.io.file_names import safe_file_name

# Runs whose state is kept: an interrupted run may be resumed after another one was tried.
MAX_RUNS = 3
_log = logging.getLogger("fedclade")


class DiskStateStore:
    """Keeps one run's client state in `folder`/client_state/RUN and the clients' models in
    `folder`/models. Only the owner can read either.

    Args:
        folder: the folder of the node.
        run: the name of the run, which the server chooses.
        max_bytes: the most bytes of client state and models of all runs; None for no limit.
    """

    def __init__(self, folder: Path, run: str, max_bytes: int | None = None) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._state_folder = folder / "client_state" / safe_file_name(run)
        self._list = self._state_folder / "transactions.json"

    def load(self) -> tuple[Tree, list[StateSnapshot]]:
        if not self._list.exists():
            return {}, []
        try:
            listed = json.loads(self._list.read_text())
            return load_file(self._state_folder / "initial.safetensors"), [
                StateSnapshot(transaction_id, load_file(self._file(transaction_id, call)), call)
                for transaction_id, call in listed
            ]
        except (OSError, ValueError, SafetensorError) as error:
            raise FedcladeError(
                f"{self._state_folder}: the client state cannot be read ({error}).",
                str(self._state_folder),
            ) from error

    def save(self, initial: Tree, snapshots: list[StateSnapshot]) -> None:
        is_new = not self._list.exists()
        self._state_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        initial_file = self._state_folder / "initial.safetensors"
        if is_new or not initial_file.exists():
            self._write(initial_file, initial)
            self._remove_old_runs()
        for snapshot in snapshots:
            file = self._file(snapshot.transaction_id, snapshot.call)
            if not file.exists() or snapshot is snapshots[-1]:
                self._write(file, snapshot.client_state)
        # The list is written last: every file that it names is complete.
        names = [(snapshot.transaction_id, snapshot.call) for snapshot in snapshots]
        _replace(self._list, json.dumps(names).encode())
        listed = {self._file(*name) for name in names}
        for file in self._state_folder.glob("transaction-*"):
            if file not in listed:
                file.unlink(missing_ok=True)

    def save_models(self, names: list[str], models: Tree) -> None:
        folder = self.folder / "models"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for row, name in enumerate(names):
            self._write(
                folder / f"{safe_file_name(name)}.safetensors",
                tree_index(models, torch.tensor(row)),
            )

    def _write(self, path: Path, tensors: Tree) -> None:
        content = save({name: value.contiguous() for name, value in tensors.items()})
        if self.max_bytes is not None:
            kept = (*self.folder.glob("client_state/*/*"), *self.folder.glob("models/*"))
            used = sum(file.stat().st_size for file in kept if file != path)
            if used + len(content) > self.max_bytes:
                raise RefusedError(
                    f"policy.max_disk_mib = {self.max_bytes >> 20}: the server asks this node to"
                    f" keep {used + len(content):,} bytes.",
                    "policy.max_disk_mib",
                )
        _replace(path, content)

    def _file(self, transaction_id: str, call: int) -> Path:
        name = f"transaction-{safe_file_name(transaction_id)}-{call}.safetensors"
        return self._state_folder / name

    def _remove_old_runs(self) -> None:
        runs = sorted(self._state_folder.parent.iterdir(), key=lambda run: run.stat().st_mtime)
        for run in runs[:-MAX_RUNS]:
            shutil.rmtree(run, ignore_errors=True)


def _replace(path: Path, content: bytes) -> None:
    try:
        with atomic_write(path, len(content)) as part:
            part.touch(mode=0o600)  # before it has any content
            part.write_bytes(content)
    except WriteError as error:  # its text has a path of this machine
        _log.error("%s", error)
        raise RefusedError(
            "disk: this node cannot write the files of its clients; its log has the reason.", "disk"
        ) from error
