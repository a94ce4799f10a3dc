"""A run with several simulators side by side: actors of Ray, or the processes of torchrun."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from fedclade.data.federated_dataset import Clients
from fedclade.engines.sharded.federation import ShardedSimulator, ShardTimes
from fedclade.engines.sharded.process_group import (
    RankWorkers,
    count,
    local_count,
    local_rank,
    rank,
    serve,
)
from fedclade.engines.worker_threads import cores
from fedclade.errors import InvalidInputError, require
from fedclade.training.result import Result
from fedclade.training.runner import TrainingRun, state_folder
from fedclade.training.shard_building import ExperimentSource, ShardPlan, worker_of

if TYPE_CHECKING:
    from fedclade.integrations.ray_workers import RayWorkers

Launcher: TypeAlias = Literal["ray", "torchrun"]


def run_sharded(
    launcher: Launcher,
    run: TrainingRun,
    source: ExperimentSource,
    folder: Path,
    start: Callable[[TrainingRun], Result],
) -> tuple[Result, ShardTimes]:
    """Start the workers, run, and end them.

    Args:
        launcher: what starts the workers.
        run: the run.
        source: the same experiment, which each worker reads by itself.
        folder: the run directory. The clients' state is stored in it while the run lasts, so it
            must be on a disk that all workers share if a worker shall be replaced by one on another
            machine.
        start: runs what it gets, with the workers as its federation.

    Returns:
        The result, and how long the workers computed.
    """
    clients = run.clients
    assert isinstance(clients, Clients)
    plan = _plan(launcher, run, source, len(clients))
    with state_folder(folder) as state:
        is_on_disk = run.engine.client_state != "memory"
        plan = replace(plan, state_folder=state.resolve() if is_on_disk else None)
        workers = _on_ray(plan) if launcher == "ray" else _on_ranks(plan, run)
        with closing(workers):
            federation = ShardedSimulator(workers, clients.metadata)
            return start(replace(run, federation=federation)), federation.times


def serve_rank() -> None:
    """Serve one shard as a rank of torchrun, until rank 0 has finished its run."""
    serve(lambda plan: replace(plan, device=_rank_device(plan.device)).worker(rank()))


def _plan(
    launcher: Launcher, run: TrainingRun, source: ExperimentSource, clients: int
) -> ShardPlan:
    given, gpus = run.engine.shards, _gpus(run.device)
    if launcher == "torchrun":
        shards, on_machine, device = count(), local_count(), run.device
        require(
            given in (None, shards),
            "engine.shards",
            given,
            f"torchrun started {shards} processes; leave it out",
        )
    else:
        shards = given or gpus or min(cores(), clients)
        on_machine, device = shards, "cuda" if gpus else "cpu"
    require(
        shards <= clients,
        "engine.shards",
        shards,
        f"must be at most the number of clients, {clients}",
    )
    threads = run.engine.threads or max(1, cores() // on_machine)
    return ShardPlan(source, shards, device, None, threads)


def _on_ray(plan: ShardPlan) -> RayWorkers:
    if importlib.util.find_spec("ray") is None:
        raise InvalidInputError(
            "--engine ray: Ray is not installed. Install it with: pip install 'fedclade[ray]'",
            "--engine",
        )
    if " " in sys.executable:  # Ray would wait forever for its workers
        raise InvalidInputError(
            f"--engine ray: the path of Python has a space ({sys.executable}), so Ray cannot start"
            " workers. Install Python in another folder.",
            "--engine",
        )
    from fedclade.integrations.ray_workers import RayWorkers

    return RayWorkers(plan, plan.state_folder is not None)


def _on_ranks(plan: ShardPlan, run: TrainingRun) -> RankWorkers:
    own = replace(run, device=_rank_device(run.device))
    return RankWorkers(lambda: worker_of(own, 0, plan), plan, plan.state_folder is not None)


def _gpus(device: str) -> int:
    """The number of GPUs of this machine that the workers use."""
    return torch.cuda.device_count() if device == "auto" or device.startswith("cuda") else 0


def _rank_device(device: str) -> str:
    """The device of this rank: the ranks of a machine share its GPUs evenly."""
    gpus = _gpus(device)
    return f"cuda:{local_rank() % gpus}" if gpus else device
