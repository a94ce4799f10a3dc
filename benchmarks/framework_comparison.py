"""fedclade and other frameworks: seconds per round of the same job, measured in turns.

python benchmarks/framework_comparison.py [--rounds 40] [--repeats 5] [--cores 0,1] [--skip-flower]
[--only pfl …] [--out results/speed/framework_comparison_cpu.json]

The job: 100 clients of 200 samples of 784 numbers, 62 classes, MLP 784-200-62, FedAvg with 20
clients a round, batch 10, learning rate 0.01, one epoch of plain SGD. All frameworks have the same
data and initial weights. fedjax, pfl and the plain loop also have the same clients in each round;
fedclade and Flower sample their own. Each framework shuffles in its own way (pfl does not shuffle).

Every framework runs in its own process (benchmarks/frameworks/) and environment (.bench/), bound to
its cores, with one compute thread. The frameworks take turns of a few rounds while the others wait,
so that a temporary slowdown of the machine affects all of them. A ratio is the median of the ratios
of the turns. The first rounds, in which code is compiled and memory is allocated, do not count, and
neither does the last, after which fedclade evaluates; no framework evaluates in between. One
function computes the final loss on the training data of all clients from the weights of each
framework, to check that all did the same work.

Section one: one core. Section two: fedclade on two cores and on one. Section three: fedclade and
Flower's simulation, both on two. Ray's processes stay alive between turns. That slows fedclade more
than the few percent of a core that they use, because work on two cores waits for the slower one. A
framework that cannot be installed or fails is omitted, and the reason is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from frameworks.environments import FOLDER, BuildError, python_of
from frameworks.worker import NAMES
from torch import nn

from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

ROOT = Path(__file__).parents[1]
WORKERS = Path(__file__).parent / "frameworks"
WORK = FOLDER / "work"
JOB = WORK / "job.npz"

WARM_UP = 4
CLIENTS, SAMPLES, COHORT = 100, 200, 20
INPUTS, HIDDEN, CLASSES = 784, 200, 62
PATIENCE = 300  # seconds without an answer after which a worker has failed
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # jax uses as many threads as it has cores. With its flags for one thread, fedjax takes 1.2
    # times as long, because they select other matrix products.
    "XLA_FLAGS": "",
    # No telemetry, no check for newer versions.
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


@dataclass(frozen=True)
class Framework:
    name: str
    script: str
    cores: tuple[int, ...]
    environment: str | None = None  # None: the one that this script runs in
    arguments: tuple[str, ...] = ()


@dataclass
class Entry:
    """The results of a framework: its times by turn, and its final loss."""

    about: dict[str, Any]
    first: list[float] = field(default_factory=list)
    turns: list[list[float]] = field(default_factory=list)
    loss: float = float("nan")

    @property
    def seconds(self) -> list[float]:
        return [second for turn in self.turns for second in turn]

    def ratios(self, ours: Entry) -> list[float]:
        return [
            statistics.median(mine) / statistics.median(other)
            for mine, other in zip(self.turns, ours.turns, strict=True)
        ]


class WorkerError(Exception):
    """A framework is omitted; the message is one line with the reason."""


class Worker:
    """The process of a framework; frameworks/worker.py describes the protocol."""

    def __init__(
        self,
        framework: Framework,
        python: Path,
        job: Path = JOB,
        variables: Mapping[str, str] = ENVIRONMENT,
    ) -> None:
        name = framework.name.replace(" ", "_").replace(",", "")
        self.weights, self.log = WORK / f"{name}.npz", WORK / f"{name}.log"
        self.weights.unlink(missing_ok=True)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    str(python),
                    str(WORKERS / framework.script),
                    str(job),
                    str(self.weights),
                    *framework.arguments,
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **variables},
                preexec_fn=lambda: os.sched_setaffinity(0, framework.cores),
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._questions, self._answers = self.process.stdin, self.process.stdout

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(PATIENCE)

    def about(self) -> dict[str, Any]:
        return dict(self._answer())

    def run(self, rounds: int) -> list[float]:
        with suppress(BrokenPipeError):  # the process has ended and will not answer
            self._questions.write(f"{rounds}\n")
            self._questions.flush()
        return list(self._answer())

    def finish(self) -> dict[str, np.ndarray]:
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(PATIENCE)
        if self.process.poll() != 0 or not self.weights.exists():
            raise self._failure()
        with np.load(self.weights) as file:
            return dict(file)

    def _answer(self) -> Any:
        ready, _, _ = select.select([self._answers], [], [], PATIENCE)
        line = self._answers.readline() if ready else ""
        if not line:
            raise self._failure()
        return json.loads(line)

    def _failure(self) -> WorkerError:
        lines = self.log.read_text().strip().splitlines()
        return WorkerError(
            f"{lines[-1] if lines else 'no answer'} (see {self.log.relative_to(ROOT)})"
        )


def write_job(rounds: int) -> None:
    """Classes are noisy copies of prototypes, so that the loss still falls after twenty rounds."""
    random = torch.Generator().manual_seed(0)
    prototypes = 0.5 * torch.randn(CLASSES, INPUTS, generator=random)
    y = torch.randint(0, CLASSES, (CLIENTS, SAMPLES), generator=random)
    x = prototypes[y] + 0.5 * torch.randn(CLIENTS, SAMPLES, INPUTS, generator=random)
    cohorts = torch.stack(
        [torch.randperm(CLIENTS, generator=random)[:COHORT].sort().values for _ in range(rounds)]
    )
    torch.manual_seed(0)
    first = nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    ).state_dict()
    arrays = {"x": x, "y": y, "cohorts": cohorts, **{name: first[name] for name in NAMES}}
    np.savez(JOB, **{name: value.numpy() for name, value in arrays.items()})


def mean_loss(weights: dict[str, np.ndarray]) -> float:
    """The mean loss on the training data of all clients."""
    with np.load(JOB) as file:
        x, y = torch.tensor(file["x"]).flatten(0, 1), torch.tensor(file["y"]).flatten()
    first, first_bias, last, last_bias = (torch.tensor(weights[name]) for name in NAMES)
    return F.cross_entropy(
        F.linear(F.relu(F.linear(x, first, first_bias)), last, last_bias), y
    ).item()


def in_turns(
    frameworks: list[Framework], rounds: int, repeats: int
) -> tuple[dict[str, Entry], dict[str, str]]:
    """The results of each framework, and why some are omitted. Only one process works at a time."""
    pythons: dict[str, Path] = {}
    workers: dict[str, Worker] = {}
    entries: dict[str, Entry] = {}
    left_out: dict[str, str] = {}

    @contextmanager
    def or_omitted(name: str) -> Iterator[None]:
        try:
            yield
        except (BuildError, WorkerError) as why:
            left_out[name] = str(why)
            entries.pop(name, None)
            if name in workers:
                workers.pop(name).stop()
            print(f"{name} is omitted: {why}", flush=True)

    for framework in frameworks:
        with or_omitted(framework.name):
            pythons[framework.name] = (
                python_of(framework.environment) if framework.environment else Path(sys.executable)
            )
    with ExitStack() as stack:
        for framework in frameworks:
            name = framework.name
            if name in pythons:
                with or_omitted(name):
                    workers[name] = stack.enter_context(Worker(framework, pythons[name]))
                    entries[name] = Entry({"cores": list(framework.cores), **workers[name].about()})
                    entries[name].first = workers[name].run(WARM_UP)
        for turn in range(repeats):
            for name, worker in list(workers.items()):
                with or_omitted(name):
                    entries[name].turns.append(worker.run(rounds // repeats))
            medians = ", ".join(
                f"{name} {statistics.median(entry.turns[-1]):.3f}"
                for name, entry in entries.items()
            )
            print(f"turn {turn + 1} of {repeats}: {medians}", flush=True)
        for name, worker in list(workers.items()):
            with or_omitted(name):
                worker.run(1)
                entries[name].loss = mean_loss(worker.finish())
    return entries, left_out


def table(entries: dict[str, Entry], ours: Entry) -> str:
    lines = [
        f"{'':24}{'s a round':>10}{'quartiles':>16}{'× fedclade':>12}{'turns':>14}"
        f"{'final loss':>12}"
        "  cores  threads, versions"
    ]
    for name, entry in entries.items():
        low, middle, high = statistics.quantiles(entry.seconds, n=4)
        ratios = entry.ratios(ours)
        versions = ", ".join(f"{what} {number}" for what, number in entry.about["versions"].items())
        lines.append(
            f"{name:24}{middle:10.4f}{f'{low:.4f}–{high:.4f}':>16}"
            f"{statistics.median(ratios):12.2f}{f'{min(ratios):.2f}–{max(ratios):.2f}':>14}"
            f"{entry.loss:12.4f}{len(entry.about['cores']):7}"
            f"  {entry.about['threads']}, {versions}"
        )
    return "\n".join(lines)


def summary(entry: Entry, ours: Entry) -> dict[str, Any]:
    return {
        **entry.about,
        "median": statistics.median(entry.seconds),
        "times fedclade's": statistics.median(entry.ratios(ours)),
        "final loss": entry.loss,
        "seconds of the first rounds": entry.first,
        "seconds by turn": entry.turns,
    }


def about() -> dict[str, Any]:
    job = {
        "clients": CLIENTS,
        "samples": SAMPLES,
        "cohort": COHORT,
        "network": [INPUTS, HIDDEN, CLASSES],
        "warm-up rounds": WARM_UP,
    }
    return {"about": environment_info(), "load before": os.getloadavg()[0], "job": job}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds of each framework")
    parser.add_argument("--repeats", type=int, default=5, help="number of turns")
    parser.add_argument(
        "--cores",
        default=",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2]),
        help="one; two for all sections",
    )
    parser.add_argument("--skip-flower", action="store_true")
    parser.add_argument("--only", nargs="+", help="fedclade and these frameworks; all by default")
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "results" / "speed" / "framework_comparison_cpu.json",
    )
    args = parser.parse_args()
    if args.rounds < 2 or args.repeats < 1 or args.rounds % args.repeats:
        parser.error("--rounds must be a multiple of --repeats, and at least 2")
    cores = tuple(int(core) for core in args.cores.split(","))
    one, two = cores[:1], cores[:2]

    sections = {
        "one core": [
            Framework("fedclade", "fedclade_worker.py", one),
            Framework("fedclade, any module", "fedclade_worker.py", one, arguments=("any",)),
            Framework("fedjax", "fedjax_worker.py", one, "fedjax"),
            Framework("pfl", "pfl_worker.py", one, "pfl"),
            Framework("plain loop", "loop_worker.py", one),
        ]
    }
    if len(two) == 2:
        ours = Framework("fedclade", "fedclade_worker.py", two)
        sections["two cores"] = [ours, Framework("fedclade, one core", "fedclade_worker.py", one)]
        if not args.skip_flower:
            sections["two cores, with Flower"] = [
                ours,
                Framework("Flower simulation", "flower_worker.py", two, "flower"),
            ]
    if args.only:
        wanted = {"fedclade", *args.only}
        sections = {
            title: [framework for framework in frameworks if framework.name in wanted]
            for title, frameworks in sections.items()
        }
        unknown = wanted - {each.name for section in sections.values() for each in section}
        if unknown:
            parser.error(f"--only: no framework of these sections is named {sorted(unknown)}")
    WORK.mkdir(parents=True, exist_ok=True)
    write_job(WARM_UP + args.rounds + 1)
    with np.load(JOB) as file:
        print(f"loss of the initial weights: {mean_loss(dict(file)):.4f}", flush=True)

    results: dict[str, Any] = {**about(), "sections": {}}
    if results["load before"] > 0.5:
        print(
            f"The machine is busy (load {results['load before']:.1f}): times on two cores will"
            " be wrong.",
            flush=True,
        )
    for title, frameworks in sections.items():
        print(f"\n{title}", flush=True)
        entries, left_out = in_turns(frameworks, args.rounds, args.repeats)
        if "fedclade" not in entries:
            sys.exit(1)
        first = entries["fedclade"]
        print(table(entries, first), flush=True)
        results["sections"][title] = {"left out": left_out} | {
            name: summary(entry, first) for name, entry in entries.items()
        }
    write_results(args.out, results)
    print(f"\n{args.out}")


if __name__ == "__main__":
    main()
