"""Chunks that fit into memory: one that does not is halved and its clients run again."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fedclade.errors import InvalidInputError

R = TypeVar("R")
# How torch says it where it has no error for it.
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "CUDA error: out of memory",
    "_STATUS_ALLOC_FAILED",
)


class OomRetry:
    """How many clients a device has room for at a time, as far as that is known: none is known
    until so many did not fit.

    Only the clients whose results were not there yet run again: sums are the same for every size of
    a chunk (`Simulator`), so the call ends as if it had been made with the smaller chunk. free:
    gives back what is kept for speed alone.
    """

    def __init__(self, device: torch.device, free: Callable[[], None]) -> None:
        self.device, self._free = device, free
        self.max_chunk: int | None = None

    def run_chunks(
        self, run: Callable[[Sequence[Tensor]], Iterable[R]], order: Tensor, width: int
    ) -> Iterator[tuple[Tensor, R]]:
        """Chunks of `order` of at most `width` places, each with its result; run(chunks) yields
        these one after another.
        """
        while len(order):
            chunks = torch.split(order, min(width, self.max_chunk or width))
            done = 0
            try:
                results = iter(run(chunks))
                for chunk in chunks:
                    yield chunk, next(results)  # kept nowhere here: the next chunk needs the memory
                    done += len(chunk)
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                tried = len(chunks[0])
                if tried == 1:
                    raise InvalidInputError(
                        f"memory: not even one client at a time fits into that of {self.device};"
                        " take a smaller model or local.batch_size, on the CPU engine.threads=1,"
                        " or a machine with more."
                    ) from error
            # Only here has the error gone, and with it what its frames held.
            order, self.max_chunk = order[done:], tried // 2
            warnings.warn(
                f"memory: {tried} clients at a time do not fit into that of {self.device}; those of"
                f" this step who were not done run again, {self.max_chunk} at a time"
                f" (engine.chunk={self.max_chunk} has it so from the start).",
                stacklevel=2,
            )
            self._free()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this is how torch or numpy say that there is no memory left."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        words in str(error) for words in _NO_MEMORY
    )
