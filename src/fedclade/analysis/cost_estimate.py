"""What a run would cost: its traffic and time, extrapolated from its first rounds."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median

from fedclade.io.schemas import RoundRecord
from fedclade.training.config import AUTO
from fedclade.training.lr_search import ROUNDS, grid
from fedclade.training.runner import TrainingRun

TIMED_ROUNDS = 20
TIMED_SECONDS = 20.0  # after which no further rounds are run


@dataclass(frozen=True)
class CostEstimate:
    """The estimated cost of a run.

    Args:
        clients: the number of clients.
        cohort: the number of clients in a round.
        rounds: the number of rounds.
        bytes_up: the bytes that clients send.
        bytes_down: the bytes that clients receive.
        seconds: the time.
        timed_rounds: the number of rounds that were run for this estimate.
        timed_seconds: the time that they took.
    """

    clients: int
    cohort: int
    rounds: int
    bytes_up: float
    bytes_down: float
    seconds: float
    timed_rounds: int
    timed_seconds: float


def estimate_cost(run: TrainingRun) -> CostEstimate:
    """Run the first rounds of a run in memory, and extrapolate.

    Round 1 includes what a method does once, and the last timed round an evaluation. The later half
    of the rounds between them stands for the rounds to come: in the first ones a method may admit
    the clients that it has not seen.

    Args:
        run: the run, whose clients are in this process.
    """
    assert run.clients is not None
    clients, settings = len(run.clients), run.settings
    searched = 0  # rounds that local.lr = "auto" runs first
    if run.local.lr == AUTO:
        values = grid(run.local)
        searched = len(values) * min(ROUNDS, settings.rounds)
        run = replace(run, local=replace(run.local, lr=values[len(values) // 2]))
    rounds, every = min(TIMED_ROUNDS, settings.rounds), settings.eval_every
    short = replace(settings, rounds=rounds, eval_every=0, patience=0, select="last")
    begin = time.perf_counter()

    def is_late(row: RoundRecord) -> bool:
        return time.perf_counter() - begin > TIMED_SECONDS

    history = replace(run, settings=short, profile=False).run(on_round=is_late).history
    spent = time.perf_counter() - begin
    evaluations = 1 + ((settings.rounds - 1) // every if every else 0)

    def total(values: list[float], later: int) -> float:
        between = values[1:-1]
        # After fewer than three rounds, the last one stands for all.
        usual = median(between[len(between) // 2 :] or values[-1:])
        evaluation = values[-1] - usual
        return sum(values) + later * usual + (evaluations - 1) * evaluation

    later = settings.rounds - len(history)
    return CostEstimate(
        clients,
        settings.cohort_size(clients),
        settings.rounds,
        total([row["bytes_up"] for row in history], later),
        total([row["bytes_down"] for row in history], later),
        total([row["seconds"] for row in history], later + searched),
        len(history),
        spent,
    )
