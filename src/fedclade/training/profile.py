"""Where the time of a run went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fedclade.engines.profiler import Profiler

# What the clock calls it, and what a reader should know.
_ROUND = {
    "clients": "the clients' work",
    "replies": "looking at replies",
    "sums": "adding replies up",
}
_WITHIN = {
    "models": "models and memory, laid side by side",
    "plan": "which samples are in which batch",
    "steps": "training steps",
}
_BESIDES = {"evaluation": "evaluation of all clients", "saving": "checkpoints and files"}


class Line(NamedTuple):
    """A phase: what it is, its seconds, and whether they are part of the line above."""

    phase: str
    what: str
    seconds: float
    within: bool = False


@dataclass(frozen=True)
class Profile:
    """Seconds of each phase of a run, and how many of the steps that were computed nobody had asked
    for.
    """

    lines: list[Line]
    rounds: int
    workers: int
    asked: int
    computed: int

    @property
    def padded(self) -> float:
        """Steps computed for nobody, as a share of those that were asked for."""
        return self.computed / self.asked - 1 if self.asked else 0.0

    def __str__(self) -> str:
        total = sum(line.seconds for line in self.lines if not line.within) or 1.0
        width = max(len(line.phase) for line in self.lines) + 4
        text = [f"{'phase':{width}}{'seconds':>9}{'ms a round':>12}{'share':>8}"]
        for line in self.lines:
            name = ("  " if line.within else "") + line.phase
            per_round, share = line.seconds / max(1, self.rounds), line.seconds / total
            numbers = f"{line.seconds:9.3f}{1000 * per_round:12.2f}{100 * share:7.1f}%"
            text.append(f"{name:{width}}{numbers}  {line.what}")
        if self.workers > 1:
            text.append(
                f"Seconds within the clients' work are those of {self.workers} workers together."
            )
        text.append(
            f"{self.asked:,} client steps; {100 * self.padded:.1f}% more were computed for nobody."
        )
        return "\n".join(text)


def profile_of(clock: Profiler, rounds: int, workers: int) -> Profile:
    """What a run's clock says. The server's own part of a round is what is left of it."""
    seconds = clock.seconds

    def lines(phases: dict[str, str], within: bool = False) -> list[Line]:
        return [
            Line(phase, what, seconds.get(phase, 0.0), within) for phase, what in phases.items()
        ]

    server = seconds.get("round", 0.0) - sum(line.seconds for line in lines(_ROUND))
    every = []
    for line in lines(_ROUND):
        every += [line, *(lines(_WITHIN, within=True) if line.phase == "clients" else [])]
    return Profile(
        [*every, Line("server", "the method's own mathematics", server), *lines(_BESIDES)],
        rounds,
        workers,
        clock.asked,
        clock.computed,
    )
