"""Time and memory of the simulator against the number of all clients, the cohort and the
parameters.

python benchmarks/simulator_scaling.py [--device cpu|cuda] [--quick]
[--out results/speed/simulator_scaling_cpu.json]

Clients have 20 samples of 784 bytes; FedAvg trains an MLP on them, batch 10, one epoch. Each point
is measured in a separate process, because of its peak memory. All points are measured several times
in turn, and the smallest median counts, so that other load of the machine affects all of them
equally. On the CPU there is a worker per core: pin the process (taskset -c 0) and run nothing else.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import fedclade as fc
from fedclade.data import Clients, RaggedIndex
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

T = TypeVar("T")

SAMPLES, INPUTS, CLASSES = 20, 784, 62
HIDDEN = 200
WARM_UP = 4  # rounds in which kernels are loaded and captured
MOST_GROWTH, MOST_GB, MOST_MAP_MS = 1.3, 3.0, 5.0  # what a run must not exceed, see `claims`
MOST_A_CLIENT = 1.1  # linear in the cohort, but for noise


@dataclass(frozen=True)
class Point:
    clients: int
    cohort: int
    hidden: int


@dataclass(frozen=True)
class Sizes:
    """The sizes that are varied, one at a time; the others are `base`, `cohort` and HIDDEN."""

    clients: tuple[int, ...]
    base: int  # number of clients that round times are compared with
    cohort: int
    cohorts: tuple[int, ...]
    hidden: tuple[int, ...]
    rounds: int
    repeats: int

    def studies(self) -> dict[str, list[Point]]:
        return {
            "clients": [Point(clients, self.cohort, HIDDEN) for clients in self.clients],
            "cohort": [Point(self.base, cohort, HIDDEN) for cohort in self.cohorts],
            "parameters": [Point(self.base, self.cohort, hidden) for hidden in self.hidden],
        }


FULL = Sizes(
    (100, 1_000, 10_000, 100_000),
    1_000,
    100,
    (10, 30, 100, 300),
    (20, 200, 1_000, 4_000),
    rounds=15,
    repeats=3,
)
QUICK = Sizes((100, 1_000), 100, 10, (10, 30), (20, 200), rounds=2, repeats=1)


def alone(function: Callable[..., T], *arguments: object, start: str = "spawn") -> T:
    """The result of the function in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context(start)) as process:
        return process.submit(function, *arguments).result()


def peak_mb() -> float:
    """The peak memory of this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def now(device: str) -> float:
    """The time after the device has finished all its work."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def federation(clients: int) -> Clients:
    """Clients with random pixels: consecutive rows of one pool, without an array per client."""
    rng, rows = np.random.default_rng(0), clients * SAMPLES
    x = torch.from_numpy(rng.integers(0, 256, (rows, INPUTS), dtype=np.uint8))
    y = torch.from_numpy(rng.integers(0, CLASSES, rows))
    train = RaggedIndex(torch.arange(rows), SAMPLES * torch.arange(clients + 1))
    no_test_data = torch.full((clients,), -1)
    return Clients(
        x,
        y,
        train,
        x[:0],
        y[:0],
        RaggedIndex.of([]),
        test_part_id=no_test_data,
        test_sample_id=no_test_data[:0],
        classes=CLASSES,
    )


def measured(point: Point, rounds: int, device: str) -> dict[str, float]:
    """Seconds of a training round (median, fastest) and of the evaluation of all clients, and the
    memory of the whole run.
    """
    torch.set_num_threads(1)
    data = federation(point.clients)
    ends: list[float] = []

    def on_round(row: dict[str, Any]) -> None:
        ends.append(now(device))

    fc.run(
        fc.FedAvg(),
        data,
        fc.models.MLP(point.hidden),
        rounds=WARM_UP + rounds + 1,
        clients_per_round=point.cohort,
        lr=0.01,
        batch_size=10,
        eval_every=0,
        device=device,
        on_round=on_round,
    )
    *times, last = np.diff(
        ends[WARM_UP - 1 :]
    ).tolist()  # all clients are evaluated in the last round
    row = {
        "seconds": statistics.median(times),
        "fastest": min(times),
        "evaluation": last - statistics.median(times),
        "peak MB": peak_mb(),
        "data MB": (
            sum(value.nbytes for value in (data.x, data.y, data.train.index, data.train.offsets))
            / 1e6
        ),
    }
    if device != "cpu":
        row["cuda MB"] = torch.cuda.max_memory_allocated() / 1e6
    return row


def empty_map(clients: int, asked: int, calls: int, device: str) -> float:
    """Milliseconds of a call of `map` with a program that does nothing."""
    torch.set_num_threads(1)
    fed, ids = (
        fc.Simulator(federation(clients), device=device),
        torch.arange(asked) * (clients // asked),
    )
    nothing = fc.core.Program(
        lambda *_: ({}, {}),
        lambda shared, const, carry, batch: carry,
        lambda *_: ({}, None),
        fc.core.Batches.whole(),
        "nothing",
    )
    times = []
    for key in range(WARM_UP + calls):
        begin = now(device)
        fed.map(nothing, ids, key=key)
        times.append(now(device) - begin)
    return 1e3 * statistics.median(times[WARM_UP:])


def parameters(hidden: int) -> int:
    return sum(
        value.numel() for value in fc.models.MLP(hidden).build((INPUTS,), CLASSES).parameters()
    )


def least(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    """The run with the smallest median, with the medians of all and the largest peak memory."""
    best = min(runs, key=lambda run: run["seconds"])
    return {
        **best,
        "peak MB": max(run["peak MB"] for run in runs),
        "medians": [run["seconds"] for run in runs],
    }


def measure(sizes: Sizes, device: str) -> dict[str, list[dict[str, Any]]]:
    """A row for each point of each study."""
    studies = sizes.studies()
    runs: dict[Point, list[dict[str, float]]] = {
        point: [] for points in studies.values() for point in points
    }
    for _ in range(sizes.repeats):
        for point, points in runs.items():
            points.append(alone(measured, point, sizes.rounds, device))
            print(
                f"{point}: {1e3 * points[-1]['seconds']:.2f} ms a round,"
                f" {points[-1]['peak MB']:.0f} MB",
                flush=True,
            )

    def row(point: Point) -> dict[str, Any]:
        best, count = least(runs[point]), parameters(point.hidden)
        each = {
            "ms a client": 1e3 * best["seconds"] / point.cohort,
            "ns a parameter": 1e9 * best["seconds"] / count,
        }
        return {
            "clients": point.clients,
            "cohort": point.cohort,
            "parameters": count,
            **best,
            **each,
        }

    rows = {name: [row(point) for point in points] for name, points in studies.items()}
    calls = 5 * sizes.rounds
    rows["empty map"] = [
        {
            "clients": clients,
            "cohort": sizes.cohort,
            "ms a call": alone(empty_map, clients, sizes.cohort, calls, device),
        }
        for clients in (sizes.base, sizes.clients[-1])
    ]
    return rows


def claims(rows: dict[str, list[dict[str, Any]]], base: int) -> dict[str, dict[str, Any]]:
    """The claims about scaling, and whether they hold."""
    by_clients, cohorts = rows["clients"], rows["cohort"]
    most = by_clients[-1]
    start = next(row for row in by_clients if row["clients"] == base)
    growth = [
        larger["ms a client"] / smaller["ms a client"] for smaller, larger in pairwise(cohorts)
    ]
    measured_and_bound = {
        f"round with {most['clients']} clients / with {base}": (
            most["seconds"] / start["seconds"],
            MOST_GROWTH,
        ),
        f"peak memory with {most['clients']} clients, GB": (most["peak MB"] / 1e3, MOST_GB),
        "time a client, larger / smaller cohort, at worst": (max(growth), MOST_A_CLIENT),
        "empty map, ms": (rows["empty map"][0]["ms a call"], MOST_MAP_MS),
    }
    return {
        name: {"value": value, "at most": bound, "holds": value <= bound}
        for name, (value, bound) in measured_and_bound.items()
    }


def table(title: str, rows: Sequence[dict[str, Any]]) -> str:
    """A table of the numbers; the names come from the first row, and lists are omitted."""
    names = [name for name, value in rows[0].items() if not isinstance(value, list)]
    cells = [names, *([_shown(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join([f"\n{title}", *("  ".join(map(str.rjust, line, widths)) for line in cells)])


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,.4g}" if isinstance(value, float) and value < 1e4 else f"{value:,.0f}"
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = QUICK if args.quick else FULL
    rows = measure(sizes, args.device)
    checked = claims(rows, sizes.base)
    print(
        *(
            table(f"against {name}" if name != "empty map" else name, points)
            for name, points in rows.items()
        ),
        sep="\n",
    )
    print(table("claims", [{"claim": name, **claim} for name, claim in checked.items()]))
    if args.out:
        write_results(args.out, {"about": environment_info(args.device), "claims": checked, **rows})


if __name__ == "__main__":
    main()
