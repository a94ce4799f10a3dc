"""Workers that are the ranks of torch.distributed, as `torchrun` starts them.

Rank 0 leads, and has the first shard; each other rank serves one shard. All messages go through
gloo: they are bytes on the CPU, also where clients are on GPUs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fedclade.engines.sharded.calls import Answer, Call, decode, encode
from fedclade.engines.sharded.worker import ShardWorker
from fedclade.engines.sharded.worker_transport import WorkerDiedError
from fedclade.errors import FedcladeError

_LEADER = 0
_ALIGNMENT = 64  # of each tensor in a message, in bytes
# While the leader works alone, the others wait: there is no time after which they should give up.
# If a process ends, its connections end with it.
_WAIT = timedelta(days=30)
_BUILD, _STOP = "build", "stop"


def rank() -> int:
    """The number of this process; the one with 0 leads."""
    return int(os.environ["RANK"])


def count() -> int:
    """The number of processes on all machines."""
    return int(os.environ["WORLD_SIZE"])


def local_rank() -> int:
    """The number of this process on its machine."""
    return int(os.environ["LOCAL_RANK"])


def local_count() -> int:
    """The number of processes on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"])


class RankWorkers:
    """The workers of all ranks, for rank 0.

    Args:
        build: makes this rank's worker. Every other rank gets `plan`, to make its own.
        plan: what the other ranks make their workers of.
        state_outlasts_worker: whether the workers' state is on disk.
    """

    name = "torchrun"

    def __init__(
        self, build: Callable[[], ShardWorker], plan: Any, state_outlasts_worker: bool
    ) -> None:
        self.count, self.state_outlasts_worker = count(), state_outlasts_worker
        _join()
        call = Call(_BUILD, {"plan": plan})
        try:
            for other in range(1, self.count):
                self._send(other, call)
            self._own = build()
            for other in range(1, self.count):
                answer = self._receive(other)
                if isinstance(answer, WorkerDiedError):
                    self.replace(other)
                elif answer.error is not None:
                    raise answer.error
        except BaseException:
            self.close()
            raise

    def call(self, calls: Mapping[int, Call]) -> dict[int, Answer | WorkerDiedError]:
        """Call the other ranks, and work meanwhile."""
        sent = {other: self._send(other, call) for other, call in calls.items() if other}
        answers: dict[int, Answer | WorkerDiedError] = {}
        if _LEADER in calls:
            own = decode(encode(calls[_LEADER]))  # the worker may overwrite what it gets
            answers[_LEADER] = decode(encode(self._own.answer(own)))
        for other, error in sent.items():
            answers[other] = self._receive(other) if error is None else error
        return answers

    def replace(self, worker: int) -> None:
        """Raise: torchrun ends all ranks if one of them ends."""
        raise FedcladeError(
            f"torchrun: rank {worker} ended during the run; its own message says why. Run the same"
            " command with --resume to continue from the last checkpoint.",
            "torchrun",
        )

    def close(self) -> None:
        """Let the other ranks end."""
        for other in range(1, self.count):
            self._send(other, Call(_STOP))

    def _send(self, other: int, call: Call) -> WorkerDiedError | None:
        try:
            _send(encode(call), other)
        except RuntimeError as error:
            return WorkerDiedError(_first_line(error))
        return None

    def _receive(self, other: int) -> Answer | WorkerDiedError:
        try:
            answer: Answer = decode(_receive(other))
        except RuntimeError as error:
            return WorkerDiedError(_first_line(error))
        return answer


def serve(build: Callable[[Any], ShardWorker]) -> None:
    """Answer the calls of rank 0 until it lets this rank end.

    Args:
        build: makes this rank's worker of the leader's plan.
    """
    _join()
    worker: ShardWorker | None = None
    try:
        while True:
            call: Call = decode(_receive(_LEADER))
            if call.name == _STOP:
                return
            if call.name == _BUILD:
                answer = Answer()
                try:
                    worker = build(call.arguments["plan"])
                except Exception as error:
                    answer = Answer(error=error)
            else:
                assert worker is not None
                answer = worker.answer(call)
            _send(encode(answer), _LEADER)
    except RuntimeError as error:
        raise FedcladeError(
            f"torchrun: rank 0 ended before the run ({_first_line(error)}).", "torchrun"
        ) from error


def _join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=_WAIT)


def _send(arrays: Sequence[np.ndarray], other: int) -> None:
    """Send arrays of bytes: their number, their sizes, and all in one tensor."""
    sizes = torch.tensor([len(array) for array in arrays])
    body = torch.empty(sum(map(_padded, sizes.tolist())), dtype=torch.uint8)
    begin = 0
    for array in arrays:
        body.numpy()[begin : begin + len(array)] = array
        begin += _padded(len(array))
    for tensor in (torch.tensor([len(arrays)]), sizes, body):
        dist.send(tensor, other)


def _receive(other: int) -> list[np.ndarray]:
    number = torch.zeros(1, dtype=torch.int64)
    dist.recv(number, other)
    sizes = torch.zeros(int(number), dtype=torch.int64)
    dist.recv(sizes, other)
    body = torch.empty(sum(map(_padded, sizes.tolist())), dtype=torch.uint8)
    dist.recv(body, other)
    arrays, begin = [], 0
    for size in sizes.tolist():
        arrays.append(body.numpy()[begin : begin + size])
        begin += _padded(size)
    return arrays


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
