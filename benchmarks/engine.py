"""Seconds a round of the simulator, through the public interface.

python benchmarks/engine.py [--device cpu|cuda] [--rounds 30] [--out benchmarks/results/engine.json]

The job that peers were measured with: 100 clients of 200 samples of 784 numbers, MLP 784-200-62, FedAvg with 20 clients a round, batch 10,
learning rate 0.01, one epoch; as a stack of layers that the dense path knows (CPU), and as a model that only autograd can train (a
LayerNorm more). Then the LEAF CNN with 40 clients of 500 images. On the CPU one thread; pin it (taskset -c 0) and leave the
machine alone. The first rounds, in which kernels are loaded and captured, are shown apart.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fedclade as fc
from fedclade.data import Clients

WARM_UP = 4


def clients(count: int, samples: int, *shape: int) -> Clients:
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.rand(count, samples, *shape, generator=generator), torch.randint(0, 62, (count, samples), generator=generator)
    return fc.data.from_arrays(list(zip(inputs, labels, strict=True)))


def seconds(data: Clients, model: Any, rounds: int, device: str, cohort: int) -> dict[str, float]:
    """Of the first rounds together, and of the median and the fastest of the others."""
    torch.manual_seed(0)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    vectors, images = clients(100, 200, 784), clients(40, 500, 1, 28, 28)
    dense = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 62))
    other = nn.Sequential(nn.Linear(784, 200), nn.LayerNorm(200, elementwise_affine=False), nn.ReLU(), nn.Linear(200, 62))
    jobs: dict[str, tuple[Clients, Any, int, int]] = {
        "peers' job, dense": (vectors, dense, given.rounds, 20),
        "peers' job, any module": (vectors, other, given.rounds, 20),
    }
    if given.device != "cpu":
        jobs["LEAF CNN, 40 clients of 500 images"] = (images, fc.models.LeafCNN(), max(5, given.rounds // 4), 40)
    measured = {}
    for name, (data, model, rounds, cohort) in jobs.items():
        measured[name] = seconds(data, model, rounds, given.device, cohort)
        print(f"{name}: {measured[name]}", flush=True)
    device = torch.cuda.get_device_name() if given.device != "cpu" else platform.processor() or platform.machine()
    about = {"device": device, "torch": torch.__version__, "fedclade": fc.__version__, "python": platform.python_version()}
    if given.out:
        given.out.write_text(json.dumps({"about": about, "seconds a round": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
