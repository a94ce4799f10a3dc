"""Runs with 10,000 and 100,000 clients from end to end: time of a round, and memory.

python benchmarks/many_clients.py [--methods fedavg,scaffold,ifca,clade] [--clients 10000,100000]
[--hidden 200] [--rounds 6] [--quick] [--out results/speed/many_clients_cpu.json]

Each client has 20 samples of 784 bytes in one of four groups with other labels, and three test
samples. An MLP of 784-HIDDEN-10 is trained on 1,000 clients a round, batch 10, one epoch. A sample
of 1,000 clients is evaluated every second round, and all clients at the end. The state of
SCAFFOLD's clients is on disk. Each run has a process of its own, because of its peak memory, and
writes a run directory with checkpoints; the runs with few and with many clients take turns. Rows of
other methods stay in the file. Clade trains its candidates for 20 rounds and then one of them.

The server's clustering is what Clade computes with the clients' signatures: all splits, the merging
of groups and the comparison with individuals. The signatures themselves are the clients' work.
"""

from __future__ import annotations

import argparse
import functools
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

import fedclade as fc
from fedclade.data import Clients, RaggedIndex
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info
from fedclade.methods import _class_prior, clade, clade_groups
from fedclade.methods.base import Method
from fedclade.training.config import EngineConfig, LocalConfig, TrainingConfig
from fedclade.training.runner import TrainingRun

SAMPLES, TEST_SAMPLES, INPUTS, CLASSES, GROUPS = 20, 3, 784, 10, 4
BLOCK = 10_000  # clients whose samples are drawn at a time
WARM_UP = 2  # rounds that load kernels
MOST_GB, MOST_RATIO = 4.0, 2.0
MOST_CLUSTERING_SECONDS, MOST_CLUSTERING_GB = 60.0, 2.0
SERVER_CLUSTERING = (
    (clade_groups, "split_groups"),
    (clade, "are_grouped"),
    (_class_prior, "merge_by_class_means"),
)

METHODS: dict[str, Callable[[], Method]] = {
    "fedavg": fc.FedAvg,
    "scaffold": fc.SCAFFOLD,
    "ifca": lambda: fc.IFCA(clusters=GROUPS),
    "clade": fc.Clade,
}


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        method: the name of the method.
        clients: the number of clients.
        cohort: the number of clients in a round, and in the sample that is evaluated.
        hidden: the hidden units of the model.
        rounds: the number of rounds that are timed.
    """

    method: str
    clients: int
    cohort: int
    hidden: int
    rounds: int


def federation(clients: int) -> Clients:
    """Images are noise around the mean of their class; the groups give the classes other labels."""
    rng = np.random.default_rng(0)
    each = SAMPLES + TEST_SAMPLES
    means = rng.integers(0, 160, (CLASSES, INPUTS)).astype(np.uint8)
    x = np.empty((clients * each, INPUTS), np.uint8)
    y = rng.integers(0, CLASSES, clients * each)
    for begin in range(0, len(x), BLOCK * each):
        rows = slice(begin, begin + BLOCK * each)
        noise = rng.integers(0, 96, (len(y[rows]), INPUTS), dtype=np.uint8)
        np.add(means[y[rows]], noise, out=x[rows])
    group = np.arange(clients) % GROUPS
    labels = torch.from_numpy((y + group.repeat(each)) % CLASSES)
    rows = torch.arange(clients * each).view(clients, each)
    pool = torch.from_numpy(x)
    return Clients(
        pool,
        labels,
        _parts(rows[:, :SAMPLES]),
        pool,
        labels,
        _parts(rows[:, SAMPLES:]),
        test_part_id=torch.arange(clients),
        test_sample_id=torch.arange(len(pool)),
        groups=torch.from_numpy(group),
        classes=CLASSES,
    )


def _parts(rows: torch.Tensor) -> RaggedIndex:
    return RaggedIndex(rows.flatten(), rows.shape[1] * torch.arange(len(rows) + 1))


def add_processor_seconds(total: list[float], module: ModuleType, name: str) -> None:
    """Add to `total` the processor seconds of every call of this function."""
    function = getattr(module, name)

    @functools.wraps(function)
    def timed(*arguments: Any, **more: Any) -> Any:
        begin = time.process_time()
        result = function(*arguments, **more)
        total.append(time.process_time() - begin)
        return result

    setattr(module, name, timed)


def measured(job: Job) -> dict[str, Any]:
    """The seconds of each phase of a run, and its memory."""
    torch.set_num_threads(1)
    data = federation(job.clients)
    before = peak_gb()
    rounds = WARM_UP + job.rounds
    history: list[dict[str, Any]] = []
    processor: list[float] = []
    peaks: list[float] = []
    clustering: list[float] = []
    for module, name in SERVER_CLUSTERING:
        add_processor_seconds(clustering, module, name)

    def on_round(row: Any) -> None:
        history.append(row)
        processor.append(time.process_time())
        peaks.append(peak_gb())

    with tempfile.TemporaryDirectory() as folder:
        begin, begin_processor = time.perf_counter(), time.process_time()
        result = TrainingRun(
            METHODS[job.method](),
            data,
            fc.models.MLP(job.hidden),
            LocalConfig(lr=0.05, batch_size=10),
            TrainingConfig(
                rounds=rounds,
                clients_per_round=job.cohort,
                eval_clients=job.cohort,
                eval_every=2,
                checkpoint_every=0,
            ),
            EngineConfig(client_state="disk"),
            "cpu",
        ).run(Path(folder) / "run", on_round=on_round)
        seconds = time.perf_counter() - begin
        disk = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    processor = np.diff([begin_processor, *processor]).tolist()
    # Rounds without an evaluation and without the first capture.
    plain = [
        (row["seconds"], used)
        for row, used in zip(history[1:-1], processor[1:-1], strict=True)
        if "train_loss" not in row
    ]
    return {
        "method": job.method,
        "clients": job.clients,
        "cohort": job.cohort,
        "parameters": sum(v.numel() for v in result.module.parameters()),
        "rounds": rounds,
        "seconds a round": statistics.median(wall for wall, _ in plain),
        "processor seconds a round": statistics.median(used for _, used in plain),
        "seconds before the second round": history[0]["seconds"],
        "processor seconds before the second round": processor[0],
        "processor seconds of the server's clustering": sum(clustering),
        "peak GB before the second round": peaks[0],
        "seconds of the last round with its evaluation": history[-1]["seconds"],
        "seconds": seconds,
        "peak GB": peak_gb(),
        "peak GB of the data": before,
        "GB of the samples": job.clients * (SAMPLES + TEST_SAMPLES) * INPUTS / 1e9,
        "run directory GB": disk / 1e9,
        "accuracy of the sample": [
            row["accuracy"] for row in history[:-1] if row.get("accuracy") is not None
        ],
        "accuracy": result.summary["accuracy"],
        "clusters": result.summary["clusters"],
        "ari": result.summary["ari"],
    }


def peak_gb() -> float:
    """The peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def claims(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What must hold: the round does not slow down with the clients, and memory is bounded."""
    results: dict[str, Any] = {}

    def claim(name: str, value: float, most: float) -> None:
        results[name] = {"value": value, "at most": most, "holds": value <= most}

    for method in dict.fromkeys(row["method"] for row in rows):
        runs = sorted(
            (row for row in rows if row["method"] == method), key=lambda row: row["clients"]
        )
        few, many = runs[0], runs[-1]
        if few is many:
            continue
        clients = f"{many['clients']} clients"
        ratio = many["processor seconds a round"] / few["processor seconds a round"]
        claim(
            f"{method}: round with {many['clients']} / with {few['clients']} clients",
            ratio,
            MOST_RATIO,
        )
        if method in ("fedavg", "clade"):
            claim(f"{method}: peak memory with {clients}, GB", many["peak GB"], MOST_GB)
        if method == "clade":
            claim(
                f"{method}: processor seconds of the server's clustering with {clients}",
                many["processor seconds of the server's clustering"],
                MOST_CLUSTERING_SECONDS,
            )
            claim(
                f"{method}: peak before the second round with {clients}, without samples, GB",
                many["peak GB before the second round"] - many["GB of the samples"],
                MOST_CLUSTERING_GB,
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", default="fedavg,scaffold,ifca,clade")
    parser.add_argument("--clients", default="10000,100000")
    parser.add_argument("--hidden", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/speed/many_clients_cpu.json"))
    options = parser.parse_args()
    counts = [50, 100] if options.quick else [int(n) for n in options.clients.split(",")]
    cohort = 10 if options.quick else 1_000
    methods = options.methods.split(",")
    earlier = read_results(options.out)["runs"] if options.out.exists() else []
    rows = [row for row in earlier if row["method"] not in methods]
    for method in methods:
        for clients in counts:
            job = Job(method, clients, cohort, options.hidden, options.rounds)
            with get_context("spawn").Pool(1) as process:
                rows.append(process.apply(measured, (job,)))
            print(rows[-1], flush=True)
            write_results(
                options.out, {"about": environment_info(), "claims": claims(rows), "runs": rows}
            )


if __name__ == "__main__":
    main()
