"""The workers as the leader sees them, and workers in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from fedclade.engines.sharded.calls import Answer, Call, decode, encode
from fedclade.engines.sharded.worker import ShardWorker


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


class InProcessWorkers:
    """Workers in this process, called one after another: for tests and checks. Calls are encoded
    like those to another process.

    Args:
        count: the number of workers.
        build: makes the worker of a shard.
        state_outlasts_worker: whether the workers' state is on disk.
    """

    name = "sharded"

    def __init__(
        self,
        count: int,
        build: Callable[[int], ShardWorker],
        state_outlasts_worker: bool = False,
    ) -> None:
        self.count, self._build = count, build
        self.state_outlasts_worker = state_outlasts_worker
        self.workers: dict[int, ShardWorker] = {}
        # Whether a worker dies before, or after, it does the work of a call.
        self.dies_before: Callable[[int, Call], bool] = lambda worker, call: False
        self.dies_after: Callable[[int, Call], bool] = lambda worker, call: False
        for worker in range(count):
            self.replace(worker)

    def call(self, calls: Mapping[int, Call]) -> dict[int, Answer | WorkerDiedError]:
        return {worker: self._answer(worker, call) for worker, call in calls.items()}

    def _answer(self, worker: int, call: Call) -> Answer | WorkerDiedError:
        if worker not in self.workers:
            return WorkerDiedError("it is dead")
        if self.dies_before(worker, call):
            del self.workers[worker]
            return WorkerDiedError("it died before the call")
        answer: Answer = decode(encode(self.workers[worker].answer(decode(encode(call)))))
        if self.dies_after(worker, call):
            del self.workers[worker]
            return WorkerDiedError("it died before its answer arrived")
        return answer

    def replace(self, worker: int) -> None:
        self.workers[worker] = self._build(worker)
