"""What is done after each round: log, history file, checkpoints, the user's function."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from fedclade.engines.profiler import Profiler
from fedclade.io.checkpoint import BestRound, Checkpoint, flatten
from fedclade.io.run_dir import RunDirectory
from fedclade.io.schemas import RoundRecord
from fedclade.training import plot_data
from fedclade.training.setup import RunSetup

if TYPE_CHECKING:
    from fedclade.training.loop import Progress

OnRound = Callable[[RoundRecord], bool | None]
"""A function of each round's row of the history. If it returns True, the run stops."""
_log = logging.getLogger("fedclade")


class Callback(Protocol):
    """Called after each round with its record, which is already in the history."""

    def after_round(self, row: RoundRecord) -> None: ...


class LogRound:
    """Logs each round to the logger "fedclade": evaluated rounds at level INFO, others at DEBUG."""

    def after_round(self, row: RoundRecord) -> None:
        evaluated = row.get("train_loss") is not None
        numbers = ", ".join(
            f"{name} {row[name]:.4f}"
            for name in ("accuracy", "loss", "train_loss", "validation_loss", "epsilon")
            if row.get(name) is not None
        )
        _log.log(
            logging.INFO if evaluated else logging.DEBUG,
            "round %d: %d clients, %d groups, %d failures, %.2f s%s",
            row["round"],
            row["clients"],
            row["clusters"],
            len(row["failures"]),
            row["seconds"],
            f", {numbers}" if numbers else "",
        )


@dataclass(frozen=True)
class HistoryFile:
    """Appends each round to rounds.jsonl."""

    store: RunDirectory
    clock: Profiler

    def after_round(self, row: RoundRecord) -> None:
        with self.clock.whole("saving"):
            self.store.append_round(row)


@dataclass(frozen=True)
class CheckpointFiles:
    """Writes a checkpoint and the clients' features every `run.checkpoint_every` rounds."""

    setup: RunSetup
    store: RunDirectory
    progress: Progress

    def after_round(self, row: RoundRecord) -> None:
        if not self.setup.is_due(row["round"], self.setup.training.checkpoint_every):
            return
        self.save()

    def save(self) -> None:
        """Write a checkpoint and the clients' features now."""
        with self.setup.engine.clock.whole("saving"):
            self._save()
            features = plot_data.collect(self.progress.state, self.setup.label_counts)
            plot_data.write(self.store.folder, features)

    def save_after_interrupt(self) -> None:
        """Write a checkpoint of the last complete round, if both the state and the client state
        belong to it: the interrupted round may have changed the client state.
        """
        history = self.progress.history
        if history and self.setup.engine.client_state.version == self.progress.round:
            self._save()

    def _save(self) -> None:
        best = self.progress.best
        self.store.save_checkpoint(
            Checkpoint(
                self.progress.round,
                flatten(self.progress.state),
                self.setup.engine.client_state.tensors(),
                self.progress.history,
                self.setup.fingerprint,
                None
                if best is None
                else BestRound(best.round, best.loss, flatten(best.state), best.memory),
            )
        )


@dataclass(frozen=True)
class CallFunction:
    """Calls the user's `on_round`, and stops the run if it returns True."""

    function: OnRound
    progress: Progress

    def after_round(self, row: RoundRecord) -> None:
        answer = self.function(row)
        # Other values stop nothing: a function may return, say, the number of bytes it wrote.
        if isinstance(answer, bool | np.bool_) and answer:
            self.progress.stopped = "on_round"
