"""What several simulators add to a round: Ray's actors and torch.distributed's ranks.

python benchmarks/sharded_overhead.py [--shards 1,2,4] [--rounds 40] [--quick]
[--out results/speed/sharded_overhead_cpu.json]

A round is FedAvg's: 20 of 100 clients with 200 samples of 784 numbers train an MLP of 784-200-62,
batch 10, one epoch, and their models are summed. All engines take turns, round by round, in one run
of this script, and give the same bytes. The overhead of a round is its time without that of its
slowest worker, which each worker measures: encoding, sending, waiting for a core, merging the sums.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedclade as fc
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.functional_model import Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.pytree import Tree, stack
from fedclade.engines.sharded.federation import ShardedSimulator
from fedclade.engines.sharded.process_group import RankWorkers
from fedclade.integrations.ray_workers import RayWorkers
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info
from fedclade.training import experiment_file
from fedclade.training.setup import module_for
from fedclade.training.shard_building import ExperimentSource, ShardPlan

CLIENTS, COHORT, SAMPLES, INPUTS, CLASSES, HIDDEN = 100, 20, 200, 784, 62, 200
WARM_UP = 3
SERVE = "from fedclade.integrations.sharded_run import serve_rank; serve_rank()"


def experiment_tables(folder: Path) -> dict[str, Any]:
    """The job as an experiment file, which workers read too."""
    rng = np.random.default_rng(0)
    count = CLIENTS * SAMPLES
    x = rng.standard_normal((count, INPUTS), dtype=np.float32)
    y = rng.integers(0, CLASSES, count)
    np.savez(folder / "job.npz", x_train=x, y_train=y, x_test=x[:100], y_test=y[:100])
    return {
        "data": {"name": str(folder / "job.npz")},
        "partition": {"name": "iid", "clients": CLIENTS},
        "model": {"name": "mlp", "hidden": HIDDEN},
        "method": {"name": "fedavg"},
        "local": {"lr": 0.1, "batch_size": 10},
    }


def start_ranks(count: int) -> list[subprocess.Popen[bytes]]:
    """Start the other ranks, and make this process rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    os.environ.update(common, RANK="0", LOCAL_RANK="0")
    return [
        subprocess.Popen(
            [sys.executable, "-c", SERVE],
            env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(1, count)
    ]


def a_round(fed: Federation, local: LocalTraining, number: int) -> Callable[[], Tree]:
    """One round of FedAvg on this federation."""
    params = local.objective.params()
    ids = torch.arange(number % (CLIENTS // COHORT), CLIENTS, CLIENTS // COHORT)

    def go() -> Tree:
        return fed.map(
            sgd(local),
            ids,
            per_client=ModelAssignment.all_same(stack([params]), len(ids)),
            key=number,
            reduce=SegmentSum(fed.sizes[ids], 1, torch.zeros(len(ids), dtype=torch.int64)),
        ).sums

    return go


def measure(shards: list[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each engine: seconds and overhead of a round."""
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as name:
        tables = experiment_tables(Path(name))
        experiment = experiment_file.experiment(tables)
        clients = experiment.clients()
        run = experiment.to_run(clients, "cpu")
        objective = Objective(module_for(run.model, clients.metadata, 0))
        local = LocalTraining(objective, lr=0.1, batch_size=10)
        source = ExperimentSource.of(tables, None, ())
        for count in shards:
            plan = ShardPlan(source, count, "cpu", None, threads=1)
            workers: dict[str, Any] = {"ray": RayWorkers(plan, False)}
            others: list[subprocess.Popen[bytes]] = []
            if count == max(shards):  # a process has one process group
                others = start_ranks(count)
                workers["gloo"] = RankWorkers(lambda plan=plan: plan.worker(0), plan, False)
            feds: dict[str, Any] = {
                engine: ShardedSimulator(each, clients.metadata) for engine, each in workers.items()
            }
            feds["simulator"] = fc.Simulator(clients, threads=1)
            rows += take_turns(feds, local, count, rounds)
            for each in workers.values():
                each.close()
            for other in others:
                other.wait()
    return rows


def take_turns(
    feds: dict[str, Any], local: LocalTraining, shards: int, rounds: int
) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {engine: [] for engine in feds}
    overhead: dict[str, list[float]] = {engine: [] for engine in feds}
    for number in range(WARM_UP + rounds):
        sums = {}
        for engine, fed in feds.items():
            go = a_round(fed, local, number)
            begin = time.perf_counter()
            sums[engine] = go()
            spent = time.perf_counter() - begin
            if number >= WARM_UP:
                seconds[engine].append(spent)
                slowest = fed.times.slowest if isinstance(fed, ShardedSimulator) else spent
                overhead[engine].append(spent - slowest)
        for values in sums.values():
            for name, value in values.items():
                assert torch.equal(value, sums["simulator"][name]), "engines differ"
    return [
        {
            "engine": engine,
            "shards": shards if engine != "simulator" else 1,
            "ms a round": 1e3 * statistics.median(times),
            "fastest ms": 1e3 * min(times),
            "overhead ms": 1e3 * statistics.median(overhead[engine]),
            "least overhead ms": 1e3 * min(overhead[engine]),
            "relative to the simulator": statistics.median(
                mine / its for mine, its in zip(times, seconds["simulator"], strict=True)
            ),
        }
        for engine, times in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", default="1,2,4")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/speed/sharded_overhead_cpu.json"))
    options = parser.parse_args()
    shards = [2] if options.quick else [int(count) for count in options.shards.split(",")]
    load = os.getloadavg()[0]
    rows = measure(shards, 2 if options.quick else options.rounds)
    for row in rows:
        print(row)
    about = environment_info() | {"load before": round(load, 1)}
    write_results(options.out, {"about": about, "rounds": options.rounds, "engines": rows})


if __name__ == "__main__":
    main()
