"""Retry with smaller chunks when memory runs out."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fedclade.errors import FedcladeWarning, InvalidInputError

R = TypeVar("R")
# Messages of torch's errors that have no separate class.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "CUDA error: out of memory",
    "_STATUS_ALLOC_FAILED",
)


class OomRetry:
    """Halves the chunk size when memory runs out. Later calls use the smaller size too.

    Only clients without a result run again. Sums are the same for every chunk size (`exact_sum`),
    so the result is that of a call that started with the smaller chunk.

    Args:
        device: the device of the chunks.
        free_caches: frees memory that is used only for speed.
    """

    def __init__(self, device: torch.device, free_caches: Callable[[], None]) -> None:
        self.device, self._free_caches = device, free_caches
        self.max_chunk: int | None = None  # None: memory has not run out yet

    def run_chunks(
        self, run: Callable[[Sequence[Tensor]], Iterable[R]], order: Tensor, width: int
    ) -> Iterator[tuple[Tensor, R]]:
        """Chunks of `order`, each with its result.

        Args:
            run: yields the result of each chunk, in their order.
            order: the places of the clients.
            width: the number of places in a chunk, while memory suffices.
        """
        while len(order):
            chunks = torch.split(order, min(width, self.max_chunk or width))
            done = 0
            try:
                results = iter(run(chunks))
                for chunk in chunks:
                    # No local variable holds the result: the next chunk needs the memory.
                    yield chunk, next(results)
                    done += len(chunk)
                return
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                tried = len(chunks[0])
                if tried == 1:
                    raise InvalidInputError(
                        f"Out of memory on {self.device} with a single client. Use a smaller model,"
                        " a smaller local.batch_size, engine.threads=1 (on the CPU), or a machine"
                        " with more memory.",
                        "model",
                    ) from error
            # The except block has ended: the error and the tensors of its frames are freed.
            order, self.max_chunk = order[done:], tried // 2
            warnings.warn(
                FedcladeWarning(
                    f"Out of memory on {self.device} with {tried} clients per chunk; retrying the"
                    f" unfinished clients with {self.max_chunk}. Set engine.chunk={self.max_chunk}"
                    " to avoid this.",
                    "engine.chunk",
                ),
                stacklevel=2,
            )
            self._free_caches()
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or numpy raised this error because memory ran out."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        text in str(error) for text in _OUT_OF_MEMORY
    )
