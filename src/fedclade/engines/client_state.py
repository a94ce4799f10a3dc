"""The state that clients keep between rounds. It is committed together with the round."""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.core.pytree import Tree, tree_index
from fedclade.errors import InvalidInputError


class _Slots:
    """Rows of some clients. Memory grows with the number of clients that have written, not with the
    number of all clients.
    """

    def __init__(self, like: Tree, clients: int) -> None:
        device = next(iter(like.values())).device
        self.slot = torch.full((clients,), -1, dtype=torch.int64, device=device)
        self.rows: Tree = {name: value.new_empty((0, *value.shape)) for name, value in like.items()}
        self.used = 0

    def reserve(self, ids: Tensor) -> None:
        """Allocate the rows of these clients, so that `write` allocates nothing."""
        used = self.used + int((self.slot[ids] < 0).sum())
        for name, value in self.rows.items():
            if len(value) < used:
                capacity = min(len(self.slot), max(2 * len(value), used))
                self.rows[name] = torch.cat(
                    [value, value.new_empty((capacity - len(value), *value.shape[1:]))]
                )

    def write(self, ids: Tensor, rows: Tree) -> None:
        self.reserve(ids)
        new = ids[self.slot[ids] < 0]
        self.slot[new] = torch.arange(self.used, self.used + len(new), device=ids.device)
        self.used += len(new)
        for name, value in self.rows.items():
            value[self.slot[ids]] = rows[name]

    def written(self) -> Tensor:
        """The ids of the clients that have a row."""
        return torch.nonzero(self.slot >= 0).flatten()

    def read(self, ids: Tensor) -> Tree:
        return tree_index(self.rows, self.slot[ids])

    def clear(self) -> None:
        self.slot.fill_(-1)
        self.used = 0


class ClientStateStore:
    """The client state of a simulated federation: read, write, then commit or roll back with the
    round.

    Later calls of the same round read the state that was written. A commit makes it permanent, so a
    round that is repeated starts from the state of the round before.

    Args:
        initial: the state with which every client starts.
        clients: the number of clients.
    """

    def __init__(self, initial: Tree, clients: int) -> None:
        self.initial = initial
        self.version = 0  # the round after which this state was committed
        self._clients = clients
        self._committed = _Slots(initial, clients) if initial else None
        self._pending = _Slots(initial, clients) if initial else None

    def read(self, ids: Tensor) -> Tree:
        if self._committed is None or self._pending is None:
            return {}
        rows = {
            name: value.expand(len(ids), *value.shape).clone()
            for name, value in self.initial.items()
        }
        for slots in (self._committed, self._pending):
            places = torch.nonzero(slots.slot[ids] >= 0).flatten()
            if len(places):
                for name, value in slots.read(ids[places]).items():
                    rows[name][places] = value
        return rows

    def reserve(self, ids: Tensor) -> None:
        """Allocate the memory for a `write` of these clients."""
        if self._pending is not None:
            self._pending.reserve(ids)

    def write(self, ids: Tensor, rows: Tree) -> None:
        if self._pending is None or rows.keys() != self.initial.keys():
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
        self._pending.write(ids, rows)

    def commit(self, version: int) -> None:
        if self._committed is not None and self._pending is not None:
            ids = self._pending.written()
            if len(ids):
                self._committed.write(ids, self._pending.read(ids))
            self._pending.clear()
        self.version = version

    def rollback(self) -> None:
        if self._pending is not None:
            self._pending.clear()

    def tensors(self) -> Tree:
        """The committed state, for a checkpoint: a row for each client that has written, and their
        ids.
        """
        if self._committed is None:
            return {}
        ids = self._committed.written()
        return {
            "ids": ids,
            **{f"rows/{name}": value for name, value in self._committed.read(ids).items()},
        }

    def retain(self, tensors: Tree) -> None:
        """Do nothing: `tensors` are the whole state."""

    def restore(self, tensors: Tree, version: int) -> None:
        """Load the client state that `tensors` returned."""
        if tensors:
            fresh = ClientStateStore(self.initial, self._clients)
            assert fresh._committed is not None
            device = fresh._committed.slot.device
            rows = {name: tensors[f"rows/{name}"].to(device) for name in self.initial}
            fresh._committed.write(tensors["ids"].to(device), rows)
            self._committed, self._pending = fresh._committed, fresh._pending
        self.version = version
