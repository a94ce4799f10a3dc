"""The clients per second of two shards, and of two independent processes on a core each.

python benchmarks/sharded_throughput.py [--data-root FOLDER] [--rounds 20] [--quick]
[--out results/speed/sharded_throughput_cpu.json]

The federation is FLT's Scenario 4: 2,400 ragged clients of emnist47, 480 of them a round, five
epochs with batch 10, an MLP of 784-200-47. A round trains them with FedAvg and takes the mean of
their models. Two simulators of one thread do it side by side, each alone, in a process on a core of
its own: together they set the pace that two cores have. The two ranks of torch.distributed and the
two actors of Ray share the clients of the round, and choose their cores. All take turns, round by
round; a ratio is the median of the rounds' ratios. Processor seconds are those of the processes
that train, without Ray's own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
import torch
from sharded_overhead import WARM_UP, start_ranks

import fedclade as fc
from fedclade.aggregation import weighted_mean
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.functional_model import Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.pytree import Tree, stack
from fedclade.core.rng import fold_in
from fedclade.engines.sharded.federation import ShardedSimulator
from fedclade.engines.sharded.process_group import RankWorkers
from fedclade.integrations.ray_workers import RayWorkers
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info
from fedclade.training.client_sampling import cohort_of
from fedclade.training.setup import module_for
from fedclade.training.shard_building import ExperimentSource, ShardPlan

SHARDS = 2
IN_A_ROUND = 0.2  # of the clients
LEAST = 0.9  # of the throughput of independent processes


def tables(quick: bool) -> dict[str, Any]:
    """Scenario 4 as an experiment file, or a small federation like it."""
    clients, groups, epochs = (40, 2, 1) if quick else (2_400, 10, 5)
    return {
        "data": {"name": "digits" if quick else "emnist47"},
        "partition": {"name": "power_law_clusters", "clients": clients, "clusters": groups},
        "model": {"name": "mlp", "hidden": 200},
        "method": {"name": "fedavg"},
        "local": {"lr": 0.01, "batch_size": 10, "epochs": epochs},
    }


class Rounds:
    """Rounds of FedAvg, the same on all engines."""

    def __init__(self, source: ExperimentSource) -> None:
        run = source.load("cpu")
        self.clients = run.clients
        objective = Objective(module_for(run.model, self.clients.metadata, 0))
        self._local = LocalTraining(
            objective, lr=run.local.lr, batch_size=run.local.batch_size, epochs=run.local.epochs
        )
        self._start = stack([objective.params()])

    @property
    def cohort(self) -> int:
        return int(len(self.clients) * IN_A_ROUND)

    def on(self, fed: Federation, number: int) -> Tree:
        """The model after one round from the initial model."""
        ids = cohort_of(fold_in(0, "round", number), len(fed.sizes), self.cohort)
        results = fed.map(
            sgd(self._local),
            ids,
            per_client=ModelAssignment.all_same(self._start, len(ids)),
            key=number,
            reduce=SegmentSum(fed.sizes[ids], 1, torch.zeros(len(ids), dtype=torch.int64)),
        )
        return weighted_mean(results.sums, results.total_weight, fallback=self._start)


def timed(work: Callable[[], Tree]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def independent(source: ExperimentSource, core: int, asked: Connection) -> None:
    """A process with a simulator of its own, on one core: runs the rounds that it is asked for."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    rounds = Rounds(source)
    fed = fc.Simulator(rounds.clients, threads=1)
    while (number := asked.recv()) is not None:
        asked.send(timed(lambda number=number: rounds.on(fed, number)))


def processor_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(source: ExperimentSource, number_of_rounds: int) -> dict[str, Any]:
    """The clients per second of each engine, and how they compare."""
    torch.set_num_threads(1)
    rounds, plan = Rounds(source), ShardPlan(source, SHARDS, "cpu", None, threads=1)
    with ExitStack() as stack_:
        ranks = start_ranks(SHARDS)
        for rank in ranks:
            stack_.callback(rank.wait)
        gloo = stack_.enter_context(closing(RankWorkers(lambda: plan.worker(0), plan, False)))
        on_ray = stack_.enter_context(closing(RayWorkers(plan, False)))
        actors = ray.get([actor.process_id.remote() for actor in on_ray.actors.values()])
        pipes, alone = [], []
        for core in sorted(os.sched_getaffinity(0))[:SHARDS]:
            here, there = get_context("spawn").Pipe()
            process = get_context("spawn").Process(
                target=independent, args=(source, core, there), daemon=True
            )
            process.start()
            stack_.callback(process.join)
            stack_.callback(here.send, None)
            pipes.append(here)
            alone.append(process.pid)

        def independently(number: int) -> float:
            """Rounds per second of all processes."""
            for pipe in pipes:
                pipe.send(number)
            return sum(1 / pipe.recv() for pipe in pipes)

        def sharded(workers: Any) -> Callable[[int], float]:
            fed = ShardedSimulator(workers, rounds.clients.metadata)
            return lambda number: 1 / timed(lambda: rounds.on(fed, number))

        engines = {
            "independent": (independently, alone),
            "gloo": (sharded(gloo), [os.getpid(), *(rank.pid for rank in ranks)]),
            "ray": (sharded(on_ray), [os.getpid(), *actors]),
        }
        pace: dict[str, list[float]] = {engine: [] for engine in engines}
        used = dict.fromkeys(engines, 0.0)
        for number in range(WARM_UP + number_of_rounds):
            for engine, (go, processes) in engines.items():
                before = sum(map(processor_seconds, processes))
                speed = go(number)
                if number >= WARM_UP:
                    pace[engine].append(speed)
                    used[engine] += sum(map(processor_seconds, processes)) - before
    # Independent processes run each round once for each of them.
    per_round = {engine: SHARDS if engine == "independent" else 1 for engine in engines}
    return {
        engine: {
            "clients a second": rounds.cohort * statistics.median(speeds),
            "processor seconds a round": used[engine] / number_of_rounds / per_round[engine],
            "relative to independent": statistics.median(
                mine / its for mine, its in zip(speeds, pace["independent"], strict=True)
            ),
        }
        for engine, speeds in pace.items()
    }


def claims(rows: dict[str, Any]) -> dict[str, Any]:
    """What must hold: sharing the clients of a round costs little."""
    return {
        f"{engine}: clients a second / those of independent processes": {
            "value": rows[engine]["relative to independent"],
            "at least": LEAST,
            "holds": rows[engine]["relative to independent"] >= LEAST,
        }
        for engine in ("gloo", "ray")
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--out", type=Path, default=Path("results/speed/sharded_throughput_cpu.json")
    )
    options = parser.parse_args()
    about = environment_info() | {"load before": round(os.getloadavg()[0], 1)}
    source = ExperimentSource.of(tables(options.quick), options.data_root, ())
    number_of_rounds = 2 if options.quick else options.rounds
    rows = measure(source, number_of_rounds)
    for engine, row in rows.items():
        print(engine, row)
    for name, claim in claims(rows).items():
        print(name, claim)
    results = {"about": about, "rounds": number_of_rounds, "claims": claims(rows)}
    write_results(options.out, {**results, "engines": rows})


if __name__ == "__main__":
    main()
