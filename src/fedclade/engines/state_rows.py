"""Where the rows of client state are: in memory, or in a file."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fedclade.core.pytree import Tree, tree_index
from fedclade.errors import WriteError
from fedclade.io.atomic import translate_os_errors


class StateRows(Protocol):
    """Numbered slots, each with one row of a tree."""

    def reserve(self, slots: int) -> None:
        """Allocate at least this number of slots."""

    def read(self, slots: Tensor) -> Tree:
        """The rows in these slots, in tensors that nothing else uses."""

    def write(self, slots: Tensor, rows: Tree) -> None: ...


class RowsInMemory:
    """Rows in memory, on the device of `like`.

    Args:
        like: one row.
        most: the largest number of slots.
    """

    def __init__(self, like: Tree, most: int) -> None:
        self._most = most
        self.rows: Tree = {name: value.new_empty((0, *value.shape)) for name, value in like.items()}

    def reserve(self, slots: int) -> None:
        for name, value in self.rows.items():
            if len(value) < slots:
                capacity = min(self._most, max(2 * len(value), slots))
                self.rows[name] = torch.cat(
                    [value, value.new_empty((capacity - len(value), *value.shape[1:]))]
                )

    def read(self, slots: Tensor) -> Tree:
        return tree_index(self.rows, slots)

    def write(self, slots: Tensor, rows: Tree) -> None:
        for name, value in self.rows.items():
            value[slots] = rows[name]


class RowsInFile:
    """Rows in a file, one record each. The memory that this takes does not grow with the slots: the
    system keeps as much of the file in memory as there is room.

    Reads and writes are system calls, not accesses to mapped memory: a full disk is then an error,
    and the pages do not count as memory of this process.

    Args:
        like: one row.
        path: the file. A file that is there keeps its rows.
    """

    def __init__(self, like: Tree, path: Path) -> None:
        self._like, self._path = like, path
        sizes = [value.numel() * value.element_size() for value in like.values()]
        self._ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
        self._slots = 0
        with translate_os_errors(path):
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", 0)

    @property
    def _record(self) -> int:
        return self._ends[-1]

    def reserve(self, slots: int) -> None:
        if slots > self._slots:
            size = (slots - self._slots) * self._record
            with translate_os_errors(self._path, size):
                _allocate(self._file.fileno(), self._slots * self._record, size)
            self._slots = slots

    def read(self, slots: Tensor) -> Tree:
        records = torch.empty((len(slots), self._record), dtype=torch.uint8)
        for record, offset in self._records(records, slots):
            self._in_full(os.preadv, record, offset)
        return {
            name: records[:, begin:end]
            .contiguous()
            .view(-1)
            .view(value.dtype)
            .reshape(len(slots), *value.shape)
            .to(value.device)
            for (name, value), (begin, end) in zip(
                self._like.items(), pairwise(self._ends), strict=True
            )
        }

    def write(self, slots: Tensor, rows: Tree) -> None:
        columns = [
            rows[name].detach().to("cpu", value.dtype).reshape(len(slots), math.prod(value.shape))
            for name, value in self._like.items()
        ]
        records = torch.cat([column.contiguous().view(torch.uint8) for column in columns], 1)
        with translate_os_errors(self._path, records.nbytes):
            for record, offset in self._records(records, slots):
                self._in_full(os.pwritev, record, offset)

    def _records(self, records: Tensor, slots: Tensor) -> Iterator[tuple[memoryview, int]]:
        """Each record as bytes, and its offset in the file."""
        for record, slot in zip(records.numpy(), slots.tolist(), strict=True):
            yield record.data, slot * self._record

    def _in_full(
        self, move: Callable[[int, list[memoryview], int], int], record: memoryview, offset: int
    ) -> None:
        """Read or write a whole record. One call of the system moves 2 GiB at most on Linux."""
        done = 0
        while done < len(record):
            moved = move(self._file.fileno(), [record[done:]], offset + done)
            if not moved:
                raise WriteError(
                    f"{self._path}: the client state is not complete: another program has cut the"
                    " file. Continue the run from its last checkpoint (--resume).",
                    str(self._path),
                )
            done += moved


def _allocate(file: int, begin: int, size: int) -> None:
    """Give a file room for these bytes."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, begin, size)
    elif os.fstat(file).st_size < begin + size:
        # macOS: there a full disk is an error of the write.
        os.ftruncate(file, begin + size)
