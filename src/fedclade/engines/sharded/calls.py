"""What the leader asks of a worker, the answer, and both as bytes.

Leader and workers are processes of one run of one user, so calls are pickled. Messages from other
parties are not: see `engines.remote.messages`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PROTOCOL = 5  # the first with buffers outside of the pickle


@dataclass(frozen=True)
class Call:
    """A call of a worker's method.

    Args:
        name: the name of the method.
        arguments: its keyword arguments.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """The answer of a worker.

    Args:
        value: what the method returned.
        error: the exception that it raised.
        seconds: the time that it took.
    """

    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0


class _Pickler(pickle.Pickler):
    """Keeps the numbers of tensors outside of the pickle, without a copy."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        flat = value.detach().cpu().reshape(-1)
        if flat.stride(0) != 1:
            flat = flat.clone(memory_format=torch.contiguous_format)
        numbers = flat.view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(numbers.data), value.dtype, tuple(value.shape))


def encode(value: Any) -> list[np.ndarray]:
    """A value as arrays of bytes: the pickle, then the numbers of each tensor."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(file, _PROTOCOL, buffer_callback=buffers.append).dump(value)
    arrays = [np.frombuffer(buffer.raw(), np.uint8) for buffer in buffers]
    return [np.frombuffer(file.getbuffer(), np.uint8), *arrays]


def decode(arrays: Sequence[np.ndarray]) -> Any:
    """The value that `encode` encoded. Its tensors are on the CPU, in the memory of the arrays, or
    in a copy of arrays that are read-only.
    """
    first, *buffers = arrays
    writable = [array if array.flags.writeable else array.copy() for array in buffers]
    return pickle.loads(first.data, buffers=writable)


def _tensor(numbers: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    array = np.frombuffer(numbers, np.uint8)
    if not len(array):
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(array).view(dtype).reshape(shape)
