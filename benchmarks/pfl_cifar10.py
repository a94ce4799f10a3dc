"""pfl-research's benchmark on CIFAR-10: fedclade and peers in turns, on one device.

python benchmarks/pfl_cifar10.py [--device cpu|cuda] [--data-root FOLDER] [--peers pfl flower]
[--rounds 1500] [--peer-rounds 160] [--turns 5] [--peers-path FOLDER]
[--out results/speed/pfl_cifar10.json]

The job is that of benchmarks/image_classification/configs/baseline.yaml in apple/pfl-research:
1,000 clients with 50 training images each, 50 clients a round, one epoch of SGD with batch 10 and
learning rate 0.1, the same weight for each client, a CNN of 1.63 million weights with dropout, and
an evaluation on all test images in every tenth round. fedclade and pfl have the same clients,
initial weights and clients of each round; fedclade shuffles a client's images, pfl does not. Both
use TF32 on CUDA. Flower's simulation, which runs on the CPU only, selects its own clients of each
round. On the CPU all use the cores of this process; pfl uses one thread.

Each framework has a process of its own, and they take turns of some rounds while the other waits.
fedclade runs `--rounds` rounds and a peer, which is slower, `--peer-rounds`. The seconds per round
are those of a turn divided by its rounds, with their evaluations; the first rounds, which load and
capture kernels, are counted apart. A ratio is the median of the ratios of the turns. Accuracies
are compared after the same rounds: those of the peer's last turn.

`--peers-path` is a folder of unpacked packages for machines without a network; without it the
peers' environments are made in .bench/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from framework_comparison import ENVIRONMENT, ROOT, WORK, Framework, Worker
from frameworks.cifar10_job import EVERY
from frameworks.environments import python_of

import fedclade as fc
from fedclade.core.rng import fold_in
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info
from fedclade.training.client_sampling import cohort_of

CLIENTS, COHORT, SEED = 1_000, 50, 0
FOLDER = WORK / "pfl_cifar10"
LEAST_RATIO, MOST_POINTS = 20.0, 1.0


@dataclass
class Course:
    """What one framework did.

    Args:
        about: its versions.
        first: the seconds of the first rounds.
        turns: the seconds of the rounds of each turn.
        accuracies: the accuracy after some rounds, in percent.
    """

    about: dict[str, Any]
    first: list[float]
    turns: list[list[float]] = field(default_factory=list)
    accuracies: dict[int, float] = field(default_factory=dict)

    def seconds_a_round(self) -> list[float]:
        return [statistics.fmean(turn) for turn in self.turns]

    def median_seconds(self) -> list[float]:
        """Of each turn: most of its rounds have no evaluation."""
        return [statistics.median(turn) for turn in self.turns]


def write_job(data_root: str | None, clients: int, samples: int, rounds: int) -> None:
    """The images divided at random, as in the benchmark, and the clients that fedclade draws."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    data = fc.data.load("cifar10", root=data_root)
    images, test_images = (x.movedim(1, -1).numpy() for x in (data.x_train, data.x_test))
    order = np.random.default_rng(SEED).permutation(len(images))[: clients * samples]
    tests = len(test_images) // clients * clients  # fedclade's clients share them evenly
    mean, deviation = mean_and_deviation(images)
    arrays = {
        "x": images[order].reshape(clients, samples, *images.shape[1:]),
        "y": data.y_train.numpy()[order].reshape(clients, samples),
        "x_test": test_images[:tests],
        "y_test": data.y_test.numpy()[:tests],
        "mean": mean,
        "deviation": deviation,
        "cohorts": np.stack([cohort(number, clients) for number in range(1, rounds + 1)]),
    }
    torch.manual_seed(SEED)
    module = fc.models.PflCNN().build((3, 32, 32), 10)
    for number, value in enumerate(module.parameters()):
        arrays[f"weight{number}"] = value.detach().numpy()
    for name, values in arrays.items():
        np.save(FOLDER / f"{name}.npy", values)


def mean_and_deviation(images: Any) -> tuple[Any, Any]:
    """Of the bytes of each channel."""
    counts = np.stack(
        [np.bincount(images[..., channel].ravel(), minlength=256) for channel in range(3)]
    )
    values, total = np.arange(256), counts.sum(1)
    mean = counts @ values / total
    return mean, np.sqrt(counts @ values**2 / total - mean**2)


def cohort(number: int, clients: int) -> Any:
    """The clients of a round of fedclade's run."""
    key = fold_in(fold_in(SEED, "round", number), "cohort")
    return cohort_of(key, clients, min(COHORT, clients)).numpy()


def in_turns(
    frameworks: dict[str, tuple[Framework, int]], peers_path: Path | None, warm_up: int, turns: int
) -> dict[str, Course]:
    """What each framework did, by its name and its number of rounds. One works at a time."""
    courses: dict[str, Course] = {}
    variables = ENVIRONMENT
    if peers_path is not None:
        variables = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([*sys.path, str(peers_path)])}
    with ExitStack() as stack:
        workers = {}
        for name, (framework, _) in frameworks.items():
            needed = framework.environment if peers_path is None else None
            python = python_of(needed) if needed is not None else Path(sys.executable)
            worker = stack.enter_context(Worker(framework, python, FOLDER, variables))
            workers[name], about = worker, worker.about()
            courses[name] = Course(about, worker.run(warm_up))
            print(f"{name}: {about}, first rounds {sum(courses[name].first):.2f} s", flush=True)
        for turn in range(turns):
            for name, (_, rounds) in frameworks.items():
                courses[name].turns.append(workers[name].run((rounds - warm_up) // turns))
                mean = statistics.fmean(courses[name].turns[-1])
                print(f"turn {turn + 1} of {turns}: {name} {mean:.4f} s a round", flush=True)
        for name, worker in workers.items():
            outcome = worker.finish()
            pairs = zip(outcome["rounds"].tolist(), outcome["accuracies"].tolist(), strict=True)
            courses[name].accuracies = dict(pairs)
    return courses


def ratios_of(peer: Sequence[float], ours: Sequence[float]) -> list[float]:
    return [its / our for its, our in zip(peer, ours, strict=True)]


def compared(ours: Course, peer: Course, has_targets: bool) -> dict[str, Any]:
    """The ratios of the seconds, and both accuracies after the same rounds."""
    ratios = ratios_of(peer.seconds_a_round(), ours.seconds_a_round())
    training = ratios_of(peer.median_seconds(), ours.median_seconds())
    common = sorted(set(ours.accuracies) & set(peer.accuracies))
    last = common[-len(peer.turns[-1]) // EVERY :]
    mine, its = (
        statistics.fmean(course.accuracies[number] for number in last) for course in (ours, peer)
    )
    speed: dict[str, Any] = {"value": statistics.median(ratios), "by turn": ratios}
    accuracy: dict[str, Any] = {"rounds": last, "fedclade": mine, "peer": its}
    if has_targets:
        speed |= {"at least": LEAST_RATIO, "holds": speed["value"] >= LEAST_RATIO}
        accuracy |= {"at most apart": MOST_POINTS, "holds": abs(mine - its) <= MOST_POINTS}
    return {
        "times as long": speed,
        "times as long, without evaluation": {
            "value": statistics.median(training),
            "by turn": training,
        },
        "accuracy after the same rounds": accuracy,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-root")
    parser.add_argument("--peers", nargs="+", choices=["pfl", "flower"], default=["pfl"])
    parser.add_argument("--rounds", type=int, default=1_500)
    parser.add_argument("--peer-rounds", type=int, default=160)
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--peers-path", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "speed" / "pfl_cifar10.json")
    args = parser.parse_args()
    for name in ("rounds", "peer_rounds"):
        if getattr(args, name) <= args.warm_up or (getattr(args, name) - args.warm_up) % args.turns:
            parser.error(f"--{name.replace('_', '-')} less --warm-up must be a multiple of --turns")
    if "flower" in args.peers and args.device != "cpu":
        parser.error("--peers flower runs on the CPU; use --device cpu")
    write_job(args.data_root, args.clients, args.samples, args.rounds)
    cores = tuple(sorted(os.sched_getaffinity(0)))

    def framework(name: str, environment: str | None, rounds: int, *more: str) -> Framework:
        script = f"cifar10_{name}_worker.py"
        return Framework(f"{name} cifar10", script, cores, environment, (str(rounds), *more))

    frameworks = {"fedclade": (framework("fedclade", None, args.rounds, args.device), args.rounds)}
    for peer in args.peers:
        frameworks[peer] = (framework(peer, peer, args.peer_rounds), args.peer_rounds)
    os.environ["PFL_PYTORCH_DEVICE"] = args.device
    courses = in_turns(frameworks, args.peers_path, args.warm_up, args.turns)
    results: dict[str, Any] = {
        "about": environment_info(args.device),
        "job": {
            "clients": args.clients,
            "samples": args.samples,
            "cohort": len(cohort(1, args.clients)),
            "evaluation every": EVERY,
        },
    }
    for peer in args.peers:
        outcome = compared(courses["fedclade"], courses[peer], has_targets=args.device != "cpu")
        results[f"{peer} against fedclade"] = outcome
        print(peer, outcome, flush=True)
    for name, course in courses.items():
        rounds = frameworks[name][1]
        results[name] = {
            **course.about,
            "rounds": rounds,
            "seconds of the first rounds": sum(course.first),
            "first rounds": args.warm_up,
            "seconds a round": statistics.median(course.seconds_a_round()),
            # Nine of ten rounds have no evaluation.
            "median seconds of a round": statistics.median(
                second for turn in course.turns for second in turn
            ),
            "cores": len(cores),
            "seconds a round by turn": course.seconds_a_round(),
            "seconds of all rounds": sum(course.first) + sum(map(sum, course.turns)),
            "accuracy": {str(number): value for number, value in course.accuracies.items()},
        }
    write_results(args.out, results)


if __name__ == "__main__":
    main()
