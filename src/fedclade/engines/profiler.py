"""What clients cost: how many steps they make and, on request, where the time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch


class Profiler:
    """Counts steps of single clients: those that were asked for, and those computed, some for
    nobody where a stack was too wide.

    With `on` it also adds up the seconds of each phase. To time a phase is to wait for a GPU before
    and after it, so a profiled run is slower. Workers add up their own seconds.
    """

    def __init__(self, device: torch.device, on: bool = False) -> None:
        self.on = on
        self.seconds: dict[str, float] = {}
        self.asked = self.computed = 0
        self._device = device
        self._lock = Lock()
        self._within: str | None = None

    def count(self, asked: int, computed: int) -> None:
        with self._lock:
            self.asked += asked
            self.computed += computed

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens here as `name`."""
        if not self.on or self._within is not None:
            yield
            return
        begin = self._now()
        try:
            yield
        finally:
            spent = self._now() - begin
            with self._lock:
                self.seconds[name] = self.seconds.get(name, 0.0) + spent

    @contextmanager
    def whole(self, name: str) -> Iterator[None]:
        """Time what happens here as `name`, and no phases within."""
        with self.phase(name):
            outer, self._within = self._within, name
            try:
                yield
            finally:
                self._within = outer

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
