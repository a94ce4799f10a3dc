"""Seconds per round of the simulator, through the public interface.

python benchmarks/engine.py [--device cpu|cuda] [--rounds 30] [--data-root FOLDER] [--only PART]
[--out results/speed/engine.json]

The first job is that of benchmarks/framework_comparison.py: 100 clients of 200 samples of 784
numbers, MLP 784-200-62, FedAvg with 20 clients a round, batch 10, learning rate 0.01, one epoch. It
runs twice: as a stack of layers with a hand-written gradient, and as a model that only autograd can
train (with a LayerNorm). On CUDA also 480 clients of 25 steps, the LEAF CNN with 40 clients of 50
steps, and FLT's Scenario 4 (2,400 ragged clients of emnist47, 480 a round, five epochs, 100 rounds,
all clients evaluated every ten). On the CPU pin the process (taskset -c 0) and run nothing else.
The first rounds, in which kernels are loaded and captured, are shown separately.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedclade as fc
from fedclade.data import Clients
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

WARM_UP = 4


def clients(count: int, samples: int, *shape: int) -> Clients:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = (
        torch.rand(count, samples, *shape, generator=generator),
        torch.randint(0, 62, (count, samples), generator=generator),
    )
    return fc.data.from_arrays(list(zip(inputs, labels, strict=True)))


def mlp(*between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 200), *between, nn.ReLU(), nn.Linear(200, 62))


def seconds(data: Clients, model: Any, rounds: int, device: str, cohort: int) -> dict[str, float]:
    """The seconds of the first rounds together, and the median and minimum of the others."""
    times: list[float] = []
    result = fc.run(
        fc.FedAvg(),
        data,
        model,
        rounds=WARM_UP + rounds,
        clients_per_round=cohort,
        lr=0.01,
        batch_size=10,
        eval_every=0,
        device=device,
        on_round=lambda row: times.append(row["seconds"]),
    )
    times = times[:-1]  # the last round is evaluated
    after = times[WARM_UP:]
    return {
        "first rounds": round(sum(times[:WARM_UP]), 4),
        "median": round(statistics.median(after), 5),
        "fastest": round(min(after), 5),
        "training loss": result.summary["train_loss"],
    }


def scenario4(root: str, device: str, model: fc.models.MLP) -> dict[str, float]:
    """The seconds of the whole run and of its parts."""
    emnist = fc.data.load("emnist47", root=root)
    data = fc.data.partition(emnist, fc.data.PowerLawClusters(), clients=2400, seed=0, probe=None)
    times: list[float] = []

    def train(rounds: int, **more: Any) -> fc.Result:
        return fc.run(
            fc.FedAvg(),
            data,
            model,
            rounds=rounds,
            clients_per_round=480,
            lr=0.01,
            batch_size=10,
            epochs=5,
            eval_every=10,
            device=device,
            **more,
        )

    result = train(100, on_round=lambda row: times.append(row["seconds"]))
    profile = train(5, profile=True).profile
    assert profile is not None
    looked_at = times[9::10]
    training = [seconds for number, seconds in enumerate(times) if number % 10 != 9]
    return {
        "all 100 rounds": round(sum(times), 3),
        "after the first ten": round(sum(times[10:]), 3),
        "a round": round(statistics.median(training), 5),
        "a round with evaluation": round(statistics.median(looked_at), 5),
        "steps for nobody, %": round(100 * profile.padded, 1),
        "accuracy": result.summary["accuracy"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--data-root")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, rounds = args.device, args.rounds
    jobs: dict[str, Callable[[], dict[str, float]]] = {
        "peers' job, dense": lambda: seconds(clients(100, 200, 784), mlp(), rounds, device, 20),
        "peers' job, any module": lambda: seconds(
            clients(100, 200, 784),
            mlp(nn.LayerNorm(200, elementwise_affine=False)),
            rounds,
            device,
            20,
        ),
    }
    if device != "cpu":
        jobs["480 MLP clients of 25 steps"] = lambda: seconds(
            clients(480, 250, 784), mlp(), rounds, device, 480
        )
        jobs["LEAF CNN, 40 clients of 50 steps"] = lambda: seconds(
            clients(40, 500, 1, 28, 28), fc.models.LeafCNN(), max(5, rounds // 4), device, 40
        )
    if args.data_root:
        jobs["Scenario 4, MLP(200)"] = lambda: scenario4(args.data_root, device, fc.models.MLP(200))
        jobs["Scenario 4, MLP(200, dropout=0.5)"] = lambda: scenario4(
            args.data_root, device, fc.models.MLP(200, dropout=0.5)
        )
    measured = {}
    for name, job in jobs.items():
        if args.only in name:
            measured[name] = job()
            print(f"{name}: {measured[name]}", flush=True)
    if args.out:
        write_results(args.out, {"about": environment_info(device), "seconds a round": measured})


if __name__ == "__main__":
    main()
