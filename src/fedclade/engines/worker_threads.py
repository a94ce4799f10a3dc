"""Worker threads on the CPU: one for each core, each with its own chunk of clients."""

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
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def keep_freed_memory() -> None:
    """Make glibc keep freed memory. By default it returns large blocks to the system. A round then
    takes a fifth longer, since it has to get them back page by page. glibc raises its threshold to
    the largest block that was freed, up to 32 MiB.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


class ThreadPool:
    """Runs a function on several items at a time. Torch uses one thread in each worker: a client's
    matrix products are too small for more threads, and with more threads their rounding would
    depend on the chunk size.

    Args:
        count: the number of workers; 1 runs the function in the calling thread.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool: ThreadPoolExecutor | None = None

    def in_order(self, work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """work(item) for each item, in the order of the items. The calling thread reads the items
        one after another, only a few ahead of the results.

        Args:
            work: the function.
            items: the items.
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
            # If memory ran out, here or in the caller, which then closes this generator, the
            # running workers must free their memory before a retry. An interrupt does not wait.
            if not isinstance(error, KeyboardInterrupt):
                wait(ahead)
            raise
