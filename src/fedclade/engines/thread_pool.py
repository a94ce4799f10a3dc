"""Worker threads of the CPU: one a core, each with a chunk of clients of its own."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Have glibc keep what is freed. It returns blocks of some size to the system, and a round that
    gets its stacks anew, page by page, takes a fifth longer. The largest block it has seen freed
    tells it what is worth keeping, up to 32 MiB.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


class ThreadPool:
    """Does work on several items at a time. Torch runs on one thread in each: matrix products of a
    client's size are not worth more, and on several threads they would round by the size of a
    chunk.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None

    def in_order(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """work(item) for each item, in their order. Items are asked for here, one after another,
        and only a few ahead.
        """
        if self.count == 1:
            yield from map(work, items)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                self.count, "fedclade", initializer=torch.set_num_threads, initargs=(1,)
            )
        ahead: deque[Future[R]] = deque()
        try:
            for item in items:
                ahead.append(self._pool.submit(work, item))
                if len(ahead) > self.count:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        except BaseException as error:
            for future in ahead:
                future.cancel()
            # Where memory ran out, what still runs must have given back its own before fewer are
            # tried. An interrupt does not wait.
            if isinstance(error, Exception):
                wait(ahead)
            raise
