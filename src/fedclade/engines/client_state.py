"""The state that clients keep between rounds. It is committed together with the round."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedclade.core.program import TEMPORARY
from fedclade.core.pytree import Tree, add_prefix, strip_prefix
from fedclade.engines.state_rows import RowsInFile, RowsInMemory, StateRows
from fedclade.errors import FedcladeError, InvalidInputError
from fedclade.io.atomic import atomic_write, translate_os_errors

_BLOCK = 256  # rows that are copied at a time


class ClientStateStore:
    """The client state of a simulated federation: read, write, then commit or roll back with the
    round.

    Later calls of the same round read the state that was written. A commit makes it permanent, so a
    round that is repeated starts from the state of the round before.

    A client's row is in a slot. What is written in a round goes to other slots, so a commit copies
    nothing: it replaces the clients' slots and frees the old ones. Memory grows with the number of
    clients that have written, not with the number of all clients.

    Temporary state, see `TEMPORARY`, needs no declaration. It has a row for every client.

    Args:
        initial: the state with which every client starts.
        clients: the number of clients.
        folder: where the rows are stored; None for memory. In a folder the committed state outlasts
            this process.
        version: the committed version in the folder to open; None to start with no rows.
    """

    def __init__(
        self, initial: Tree, clients: int, folder: Path | None = None, version: int | None = None
    ) -> None:
        self.initial = initial
        self.version = version or 0  # the round after which this state was committed
        self.temporary: Tree = {}
        self._clients, self._folder = clients, folder
        if initial:
            self._device = next(iter(initial.values())).device
            self._start(version)

    def _start(self, version: int | None) -> None:
        """Start with the rows of a version in the folder, or with none."""
        # (clients,) the slot of each client; -1: none
        self._committed = torch.full((self._clients,), -1, dtype=torch.int64, device=self._device)
        self._pending = self._committed.clone()
        self.rows: StateRows
        if self._folder is None:
            self.rows = RowsInMemory(self.initial, 2 * self._clients)
        else:
            self._open(self._folder, version)
            self.rows = RowsInFile(self.initial, self._folder / "rows")
        # A slot below `_used` is of a client, or it is free.
        self._used = int(self._committed.max()) + 1
        is_free = torch.ones(self._used, dtype=torch.bool, device=self._device)
        is_free[self._committed[self._committed >= 0]] = False
        self._free = torch.nonzero(is_free).flatten()
        self.rows.reserve(self._used)

    def read(self, ids: Tensor) -> Tree:
        temporary = {name: value[ids] for name, value in self.temporary.items()}
        if not self.initial:
            return temporary
        slots = torch.where(self._pending >= 0, self._pending, self._committed)
        return self._read(ids, slots) | temporary

    def _read(self, ids: Tensor, slots: Tensor) -> Tree:
        slots = slots[ids]
        written = torch.nonzero(slots >= 0).flatten()
        if len(written) == len(ids):
            return self.rows.read(slots)
        rows = {
            name: value.expand(len(ids), *value.shape).clone()
            for name, value in self.initial.items()
        }
        if len(written):
            for name, value in self.rows.read(slots[written]).items():
                rows[name][written] = value
        return rows

    def reserve(self, ids: Tensor) -> None:
        """Allocate the memory for a `write` of these clients."""
        if self.initial:
            self.rows.reserve(self._slots_with(ids))

    def _slots_with(self, ids: Tensor) -> int:
        """The number of slots after a `write` of these clients."""
        new = int((self._pending[ids] < 0).sum())
        return self._used + max(0, new - len(self._free))

    def write(self, ids: Tensor, rows: Tree) -> None:
        temporary = _temporary_part(rows)
        for name, value in temporary.items():
            if name not in self.temporary:
                self.temporary[name] = value.new_zeros(self._clients, *value.shape[1:])
            self.temporary[name][ids] = value
        rows = {name: value for name, value in rows.items() if name not in temporary}
        if temporary and not rows:
            return
        if not self.initial or rows.keys() != self.initial.keys():
            raise InvalidInputError(
                f"initial_client_state: a program wrote the client state {sorted(rows)}, but the"
                f" method declared {sorted(self.initial)}. Use the same names in both.",
                "initial_client_state",
            )
        for name, value in rows.items():
            if value.shape[1:] != self.initial[name].shape:
                written, declared = tuple(value.shape[1:]), tuple(self.initial[name].shape)
                raise InvalidInputError(
                    f"initial_client_state: a program wrote the client state '{name}' of shape"
                    f" {written}, but the method declared {declared}. Use the same shape in both.",
                    "initial_client_state",
                )
        self.rows.reserve(self._slots_with(ids))
        new = ids[self._pending[ids] < 0]
        reused, self._free = self._free[: len(new)], self._free[len(new) :]
        end = self._used + len(new) - len(reused)
        fresh = torch.arange(self._used, end, device=self._device)
        self._used = end
        self._pending[new] = torch.cat([reused, fresh])
        self.rows.write(self._pending[ids], rows)

    def commit(self, version: int) -> None:
        self.temporary = {}
        if self.initial:
            ids = torch.nonzero(self._pending >= 0).flatten()
            replaced = self._committed[ids]
            self._committed[ids] = self._pending[ids]
            self._pending[ids] = -1
            if self._folder is not None:
                self._write_index(self._folder, version)
            self._free = torch.cat([self._free, replaced[replaced >= 0]])
        self.version = version

    def rollback(self) -> None:
        self.temporary = {}
        if self.initial:
            ids = torch.nonzero(self._pending >= 0).flatten()
            self._free = torch.cat([self._free, self._pending[ids]])
            self._pending[ids] = -1

    def tensors(self) -> Tree:
        """The committed state, for a checkpoint: a row for each client that has written, and their
        ids.
        """
        if not self.initial:
            return {}
        ids = torch.nonzero(self._committed >= 0).flatten()
        rows = self._read(ids, self._committed)
        return {"ids": ids, **{f"rows/{name}": value for name, value in rows.items()}}

    def retain(self, tensors: Tree) -> None:
        """Do nothing: `tensors` are the whole state."""

    def restore(self, tensors: Tree, version: int) -> None:
        """Load the client state that `tensors` returned, and temporary state if it is there."""
        if self.initial:
            ids, rows = tensors["ids"], {name: tensors[f"rows/{name}"] for name in self.initial}
            self._start(None)
            for begin in range(0, len(ids), _BLOCK):
                block = slice(begin, begin + _BLOCK)
                part = {name: value[block].to(self._device) for name, value in rows.items()}
                self.write(ids[block].to(self._device), part)
            self.commit(version)
        self.temporary = _temporary_part(tensors)
        self.version = version

    def _open(self, folder: Path, version: int | None) -> None:
        """Read the slots of a committed version, and remove what is not of it."""
        with translate_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if version is not None:
                path = _index_path(folder, version)
                if not path.exists():
                    raise FedcladeError(
                        f"{folder}: it has no client state of round {version}. Continue the run"
                        " from its last checkpoint (--resume).",
                        "client_state",
                    )
                self._committed = torch.from_numpy(np.load(path)).to(self._device)
            else:
                (folder / "rows").unlink(missing_ok=True)
            for path in folder.glob("slots-*.npy"):
                if version is None or path != _index_path(folder, version):
                    path.unlink()

    def _write_index(self, folder: Path, version: int) -> None:
        """Make this version the last one. The one before it stays: a commit may have ended in this
        process and not in others.
        """
        with atomic_write(_index_path(folder, version)) as temporary, temporary.open("wb") as file:
            np.save(file, self._committed.cpu().numpy())
        versions = {_index_path(folder, self.version), _index_path(folder, version)}
        for path in set(folder.glob("slots-*.npy")) - versions:
            path.unlink()


def _temporary_part(tree: Tree) -> Tree:
    return add_prefix(TEMPORARY, strip_prefix(TEMPORARY, tree))


def _index_path(folder: Path, version: int) -> Path:
    return folder / f"slots-{version}.npy"
