"""The cost of the clients' work: the number of steps and, on request, the time of each phase."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch

# The phases, with their descriptions.
_ROUND = {
    "clients": "the clients' work",
    "replies": "checking replies",
    "sums": "adding to the sums of all chunks",
}
_CLIENT_WORK = {
    "models": "stacking models and client state",
    "plan": "assigning samples to batches",
    "steps": "training steps",
    "subtotals": "summing the replies of a chunk",
}
_LAYER = {"personal layer": "making the models of the personal layer"}  # if there is one
_OUTSIDE_ROUNDS = {"evaluation": "evaluation of all clients", "saving": "checkpoints and files"}


class Profiler:
    """Counts the steps of single clients: those that were requested, and those that were computed.
    The second number is larger if a stack was wider than its number of active clients.

    Each worker thread adds its seconds.

    Args:
        device: the device of the work.
        on: whether to add up the seconds of each phase. Timing waits for the GPU before and after a
            phase, so a profiled run is slower.
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
        """Time the block as `name`."""
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
        """Time the block as `name`, without the phases inside it."""
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


class Line(NamedTuple):
    """A phase: its name, a description, its seconds, and whether they are part of the line
    above.
    """

    phase: str
    description: str
    seconds: float
    within: bool = False


@dataclass(frozen=True)
class Profile:
    """The seconds of each phase of a run, the numbers of requested and computed steps, and how
    clients run: together or one by one.
    """

    lines: list[Line]
    rounds: int
    workers: int
    asked: int
    computed: int
    execution: str

    @classmethod
    def from_profiler(
        cls, profiler: Profiler, rounds: int, workers: int, execution: str
    ) -> Profile:
        """The profile of a run. The server's own part of a round is the remainder."""
        seconds = profiler.seconds

        def lines(phases: dict[str, str], within: bool = False) -> list[Line]:
            return [
                Line(phase, description, seconds.get(phase, 0.0), within)
                for phase, description in phases.items()
            ]

        clients, *others = lines(_ROUND)
        server = seconds.get("round", 0.0) - sum(line.seconds for line in (clients, *others))
        return cls(
            [
                clients,
                *lines(_CLIENT_WORK, within=True),
                *others,
                Line("server", "the method's work on the server", server),
                *(line for line in lines(_LAYER) if line.seconds),
                *lines(_OUTSIDE_ROUNDS),
            ],
            rounds,
            workers,
            profiler.asked,
            profiler.computed,
            execution,
        )

    @property
    def padded(self) -> float:
        """The steps that were computed without a request, as a share of the requested steps."""
        return self.computed / self.asked - 1 if self.asked else 0.0

    def __str__(self) -> str:
        total = sum(line.seconds for line in self.lines if not line.within) or 1.0
        width = max(len(line.phase) for line in self.lines) + 4
        text = [f"{'phase':{width}}{'seconds':>9}{'ms/round':>12}{'share':>8}"]
        for line in self.lines:
            name = ("  " if line.within else "") + line.phase
            per_round, share = line.seconds / max(1, self.rounds), line.seconds / total
            numbers = f"{line.seconds:9.3f}{1000 * per_round:12.2f}{100 * share:7.1f}%"
            text.append(f"{name:{width}}{numbers}  {line.description}")
        if self.workers > 1:
            text.append(f"The indented phases of clients are sums over {self.workers} workers.")
        text.append(f"{self.asked:,} client steps, plus {100 * self.padded:.1f}% padding.")
        text.append(self.execution)
        return "\n".join(text)
