"""Torch's own generator, started from a key: for functions of others that draw from it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# All threads share the generator. A thread that started it must be the only one that draws.
_lock = threading.RLock()


@contextmanager
def seeded_generator(key: Tensor) -> Iterator[None]:
    """In this context torch's generator draws numbers that depend on the key alone. Its state is
    restored at the end.

    Args:
        key: one key. The generator of its device is started too.
    """
    generators = [torch.default_generator]
    if key.device.type == "cuda":
        index = key.device.index
        generators.append(
            torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
        )
    with _lock:
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(int(key))
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
