"""Workers of a sharded run, made from the run itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedclade.data.federated_dataset import Clients
from fedclade.engines.device import pick_device
from fedclade.engines.sharded.worker import ShardWorker
from fedclade.registry import import_file
from fedclade.training import experiment_file
from fedclade.training.setup import client_side

if TYPE_CHECKING:
    from fedclade.training.runner import TrainingRun


@dataclass(frozen=True)
class ExperimentSource:
    """An experiment that every process reads by itself, with its data.

    Args:
        tables: the experiment file.
        data_root: the folder to search first for data sets.
        imports: Python files that register methods, models or data.
    """

    tables: dict[str, experiment_file.Table]
    data_root: str | None = None
    imports: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        tables: dict[str, experiment_file.Table],
        data_root: str | None,
        imports: Sequence[str],
    ) -> ExperimentSource:
        """The source with absolute paths: a worker may have another working directory."""
        root = None if data_root is None else str(Path(data_root).resolve())
        return cls(tables, root, tuple(str(Path(file).resolve()) for file in imports))

    def load(self, device: str) -> TrainingRun:
        """The run of this experiment."""
        for file in self.imports:
            import_file(file)
        experiment = experiment_file.experiment(self.tables)
        return experiment.to_run(experiment.clients(self.data_root), device)


@dataclass(frozen=True)
class ShardPlan:
    """How the workers of a run are made. It is sent to each of them.

    Args:
        source: the experiment.
        shards: the number of shards.
        device: the device of the workers.
        state_folder: where the workers store the clients' state; None for memory.
        threads: the threads of each worker on the CPU.
    """

    source: ExperimentSource
    shards: int
    device: str
    state_folder: Path | None
    threads: int

    def worker(self, shard: int) -> ShardWorker:
        """The worker of a shard, in the process that calls this."""
        return worker_of(self.source.load(self.device), shard, self)


def worker_of(run: TrainingRun, shard: int, plan: ShardPlan) -> ShardWorker:
    """The worker of a shard of a run that is in this process."""
    clients = run.clients
    assert isinstance(clients, Clients)
    device = pick_device(run.device)
    side = client_side(run, clients.metadata, device)
    return ShardWorker(
        clients,
        shard,
        plan.shards,
        side.context(),
        side.metrics,
        None if plan.state_folder is None else plan.state_folder / str(shard),
        device=str(device),
        **replace(run.engine, threads=plan.threads).simulator_options(),
    )
