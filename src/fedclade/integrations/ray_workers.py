"""Workers that are Ray actors, on this machine or on those of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from fedclade.engines.sharded.calls import Answer, Call, decode, encode
from fedclade.engines.sharded.worker import ShardWorker
from fedclade.engines.sharded.worker_transport import WorkerDiedError
from fedclade.engines.worker_threads import cores
from fedclade.errors import FedcladeError

_WAIT = 120.0  # seconds for a worker to start


class Plan(Protocol):
    """Makes a worker in the process that calls it."""

    @property
    def shards(self) -> int: ...

    @property
    def device(self) -> str: ...

    @property
    def threads(self) -> int: ...

    def worker(self, shard: int) -> ShardWorker: ...


class _Actor:
    """One worker in a process of its own. Calls and answers are encoded here, so that Ray sends the
    numbers of tensors without a copy.
    """

    def process_id(self) -> int:
        return os.getpid()

    def build(self, plan: list[np.ndarray], shard: int) -> list[np.ndarray]:
        try:
            self._worker: ShardWorker = decode(plan).worker(shard)
        except Exception as error:
            return encode(Answer(error=error))
        return encode(Answer())

    def answer(self, call: list[np.ndarray]) -> list[np.ndarray]:
        return encode(self._worker.answer(decode(call)))


class RayWorkers:
    """One actor for each shard. RAY_ADDRESS names a running cluster; without it Ray starts on this
    machine, and ends with these workers.

    Args:
        plan: makes the workers; it is sent to each actor.
        state_outlasts_worker: whether the workers' state is on a disk that all workers can read.
    """

    name = "ray"

    def __init__(self, plan: Plan, state_outlasts_worker: bool) -> None:
        self.count, self.state_outlasts_worker = plan.shards, state_outlasts_worker
        self._plan, self._is_own = plan, not ray.is_initialized()
        if self._is_own:
            _start_ray(self.count)
        options: dict[str, Any] = {
            "num_cpus": 1 if _is_local() else plan.threads,
            "num_gpus": 1 if plan.device.startswith("cuda") else 0,
            "scheduling_strategy": "SPREAD",
            "max_restarts": 0,
        }
        self._new_actor = ray.remote(_Actor).options(**options).remote
        self.actors: dict[int, Any] = {}
        try:
            self._start(range(self.count))
        except BaseException:
            self.close()
            raise

    def call(self, calls: Mapping[int, Call]) -> dict[int, Answer | WorkerDiedError]:
        """Call the actors at the same time."""
        sent = {
            worker: self.actors[worker].answer.remote(encode(call))
            for worker, call in calls.items()
        }
        return {worker: _answer(reference) for worker, reference in sent.items()}

    def replace(self, worker: int) -> None:
        """Start another actor in place of one that died."""
        self._start([worker])

    def close(self) -> None:
        """End the actors, and Ray if it started with them."""
        for actor in self.actors.values():
            ray.kill(actor)
        self.actors = {}
        if self._is_own:
            ray.shutdown()

    def _start(self, workers: range | list[int]) -> None:
        plan = encode(self._plan)
        starting, building = [], {}
        for worker in workers:
            actor: Any = self._new_actor()
            self.actors[worker] = actor
            starting.append(actor.process_id.remote())
            building[worker] = actor.build.remote(plan, worker)
        self._wait_for_processes(starting)
        for worker, reference in building.items():
            answer = _answer(reference)
            if isinstance(answer, WorkerDiedError):
                raise FedcladeError(
                    f"--engine ray: worker {worker} ended before it had its clients ({answer})."
                    " Memory may be too small for this number of shards.",
                    "engine.shards",
                )
            if answer.error is not None:
                raise answer.error

    def _wait_for_processes(self, starting: list[Any]) -> None:
        """Wait until Ray has started the actors' processes. The time that they then take to read
        their data has no limit.
        """
        try:
            ray.get(starting, timeout=_WAIT)
        except GetTimeoutError as error:
            resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            raise FedcladeError(
                f"engine.shards = {self.count}: Ray did not start {len(starting)} workers within"
                f" {_WAIT:g} s. The cluster has {resources.get('CPU', 0):g} CPUs and"
                f" {resources.get('GPU', 0):g} GPUs; each worker needs one of them. Use fewer"
                " shards, or add machines.",
                "engine.shards",
            ) from error
        except RayError:
            pass  # the answer to `build` says the same


def _answer(reference: Any) -> Answer | WorkerDiedError:
    try:
        answer: Answer = decode(ray.get(reference))
    except RayError as error:
        return WorkerDiedError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    return answer


def _is_local() -> bool:
    return "RAY_ADDRESS" not in os.environ


def _start_ray(shards: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's 15 leaves its workers hardly any time on cores that other processes use.
    os.environ.setdefault("RAY_worker_niceness", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if _is_local():  # a running cluster has its own size
        options |= {"num_cpus": max(shards, cores()), "include_dashboard": False}
    ray.init(**options)
