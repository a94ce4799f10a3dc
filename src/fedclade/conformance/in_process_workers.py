"""Workers in this process, for a sharded simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fedclade.engines.sharded.calls import Answer, Call, decode, encode
from fedclade.engines.sharded.worker import ShardWorker
from fedclade.engines.sharded.worker_transport import WorkerDiedError


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
