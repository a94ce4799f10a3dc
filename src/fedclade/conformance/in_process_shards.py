"""A sharded simulator whose workers are in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedclade.conformance.in_process_workers import InProcessWorkers
from fedclade.core.program_serialization import NodeContext
from fedclade.core.pytree import Tree
from fedclade.data import Clients
from fedclade.engines.sharded.federation import ShardedSimulator
from fedclade.engines.sharded.placement import place_clients
from fedclade.engines.sharded.worker import ShardWorker
from fedclade.engines.simulator import Faults


def in_process_shards(
    clients: Clients,
    context: NodeContext,
    faults: Faults | None = None,
    shards: int = 2,
    folder: Path | None = None,
    **options: Any,
) -> ShardedSimulator:
    """A sharded simulator that can replace a simulator in a check.

    Args:
        clients: the clients' data.
        context: what every worker has: the objective, the encoder, the secret.
        faults: changes or drops replies, as in `Simulator`.
        shards: the number of workers, at most one for each client.
        folder: where the workers store the clients' state; None for memory.
        options: further options of the workers' simulators.
    """
    shards = min(shards, len(clients))
    placement = place_clients(clients.sizes, shards)

    def build(shard: int) -> ShardWorker:
        numbers = placement.ids_of(shard).tolist()

        def tamper(key: int, place: int, reply: Tree) -> Tree | None:
            return reply if faults is None else faults(key, numbers[place], reply)

        return ShardWorker(
            clients,
            shard,
            shards,
            context,
            {},
            None if folder is None else folder / str(shard),
            faults=None if faults is None else tamper,
            **options,
        )

    workers = InProcessWorkers(shards, build, state_outlasts_worker=folder is not None)
    return ShardedSimulator(workers, clients.metadata)
