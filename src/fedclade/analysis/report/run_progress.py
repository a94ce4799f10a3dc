"""How far unfinished runs are, and how long they will take."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedclade.analysis.report.load import PlannedRun, StoredRun
from fedclade.analysis.report.metric import short


@dataclass(frozen=True)
class Progress:
    """The progress of all runs of a page.

    Args:
        finished: the number of finished runs.
        runs: the number of runs, with those that have not begun.
        share: the share of all rounds that are done.
        seconds_left: an estimate from the rounds so far; None before the first round.
        current: the name of the run that is running; None between two runs.
        round: its last finished round.
        rounds: its number of rounds.
    """

    finished: int
    runs: int
    share: float
    seconds_left: float | None
    current: str | None
    round: int
    rounds: int

    def in_words(self) -> str:
        parts = []
        if self.runs > 1:
            number = self.finished + (self.current is not None)
            name = f" ({self.current})" if self.current is not None else ""
            parts.append(f"Run {max(1, number)} of {self.runs}{name}")
        if self.current is not None:
            parts.append(f"round {self.round} of {self.rounds}")
        text = ", ".join(parts)
        return f"{text[0].upper()}{text[1:]}."

    def to_json(self) -> dict[str, Any]:
        return {
            "share": short(self.share),
            "text": self.in_words(),
            # Only a live page shows it: nobody knows whether another run goes on.
            "left": None if self.seconds_left is None else duration(self.seconds_left),
            "finished": self.finished,
            "runs": self.runs,
        }


def progress_of(runs: Sequence[StoredRun], planned: Sequence[PlannedRun]) -> Progress | None:
    """The progress of the runs; None if all are finished.

    Args:
        runs: the runs that have begun.
        planned: all runs of the comparison; empty for other pages.
    """
    begun = {run.name: run for run in runs}
    plan = planned or [PlannedRun(run.name, run.title, run.rounds_planned) for run in runs]
    if all(run.name in begun and begun[run.name].summary is not None for run in plan):
        return None
    done = total = 0
    seconds_left: float | None = 0.0
    for run in plan:
        stored = begun.get(run.name)
        rounds = _rounds_done(stored, run)
        done, total = done + rounds, total + run.rounds
        pace = _pace([stored] if stored is not None else [], run.title) or _pace(runs, run.title)
        if rounds < run.rounds:
            seconds_left = (
                None
                if pace is None or seconds_left is None
                else seconds_left + (run.rounds - rounds) * pace
            )
    current = next((run for run in runs if run.summary is None), None)
    return Progress(
        finished=sum(run.summary is not None for run in runs),
        runs=len(plan),
        share=done / total if total else 0.0,
        seconds_left=seconds_left,
        current=None if current is None else current.name,
        round=0 if current is None else current.round_reached,
        rounds=0 if current is None else current.rounds_planned,
    )


def _rounds_done(stored: StoredRun | None, run: PlannedRun) -> int:
    if stored is None:
        return 0
    # A run may stop early; it is done all the same.
    return run.rounds if stored.summary is not None else min(stored.round_reached, run.rounds)


def _pace(runs: Sequence[StoredRun], title: str) -> float | None:
    """Mean seconds of a round, of runs of the same title or of any run. First rounds do not count
    where there are others: they also have what a method does once.
    """
    same = [run for run in runs if run.title == title and run.rounds]
    chosen = same or [run for run in runs if run.rounds]
    seconds = [row["seconds"] for run in chosen for row in run.rounds[1:] or run.rounds]
    return statistics.fmean(seconds) if seconds else None


def duration(seconds: float) -> str:
    """A time that is left, as a person says it."""
    if seconds < 60:
        return f"about {max(1, round(seconds))} s"
    if seconds < 3600:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.1f} h"
