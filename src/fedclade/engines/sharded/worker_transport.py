"""The workers as the leader sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fedclade.engines.sharded.calls import Answer, Call


class WorkerDiedError(Exception):
    """A worker ended before it answered."""


class Workers(Protocol):
    """One worker for each shard, in other processes or on other machines."""

    name: str  # of the engine, in summaries
    count: int
    state_outlasts_worker: bool  # whether a worker that replaces another finds its state

    def call(self, calls: Mapping[int, Call]) -> dict[int, Answer | WorkerDiedError]:
        """Call several workers at the same time.

        Args:
            calls: the call of each worker, by its number.
        """

    def replace(self, worker: int) -> None:
        """Start another worker in place of one that died. A `FedcladeError` if it cannot be."""
