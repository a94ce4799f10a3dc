"""Baselines for which published tables are wrong or unstable: SCAFFOLD under label skew, and IFCA
from different initial models.

python benchmarks/baselines.py scaffold --data-root FOLDER [--seeds 3] [--device cuda] [--jobs 8]
python benchmarks/baselines.py ifca [--seeds 10]

The first is on MNIST, Dirichlet(0.1) over 100 clients (FOLDER has mnist.npz), the second on digits,
rotations and label clusters. They write results/methods/scaffold.json and ifca.json;
tools/docs/method_tables.py writes the tables of docs/methods/baselines.md and ifca.md from them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import torch

import fedclade as fc
from fedclade.data import Dirichlet, LabelClusters, Rotation, load, partition
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

RESULTS = Path(__file__).resolve().parents[1] / "results" / "methods"
Row = dict[str, Any]
LOOKS = (25, 50, 75, 100)  # rounds
METHODS: dict[str, fc.Method] = {
    "FedAvg": fc.FedAvg(),
    "FedProx, μ = 0.01": fc.FedProx(mu=0.01),
    "FedNova": fc.FedNova(),
    "SCAFFOLD": fc.SCAFFOLD(),
    "SCAFFOLD, clients alike": fc.SCAFFOLD(weights="clients"),
    "SCAFFOLD, option I": fc.SCAFFOLD(option=1),
}


def scaffold(seeds: int, root: str | None, device: str, jobs: int) -> list[Row]:
    rows = []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for epochs in (1, 5):
            pending = {
                name: [
                    pool.submit(curve, name, epochs, seed, root, device) for seed in range(seeds)
                ]
                for name in METHODS
            }
            for name, curves in pending.items():
                points = zip(*(done.result() for done in curves), strict=True)
                accuracy = dict(zip(LOOKS, map(spread, points), strict=True))
                rows.append({"epochs": epochs, "method": name, "accuracy": accuracy})
                print(rows[-1], flush=True)
    return rows


def curve(name: str, epochs: int, seed: int, root: str | None, device: str) -> list[float]:
    """The accuracy after every 25 rounds."""
    torch.set_num_threads(1)
    clients = partition(
        load("mnist", root), Dirichlet(alpha=0.1), clients=100, seed=seed, probe=None
    )
    settings = {
        "rounds": LOOKS[-1],
        "clients_per_round": 10,
        "lr": 0.05,
        "batch_size": 32,
        "eval_every": 25,
    }
    result = fc.run(
        METHODS[name],
        clients,
        fc.models.MLP(200),
        epochs=epochs,
        seed=seed,
        device=device,
        **settings,
    )
    return [row["accuracy"] for row in result.history if "accuracy" in row]


def ifca(seeds: int) -> list[Row]:
    options: dict[str, dict[str, Any]] = {
        "as it is": {},
        "num_restarts=4": {"num_restarts": 4},
        "warm_up=5": {"warm_up": 5},
        'shared_layers="trunk"': {"shared_layers": "trunk"},
        'shared_layers="trunk", num_restarts=4': {"shared_layers": "trunk", "num_restarts": 4},
    }
    federations = {
        "rotations, 4 groups": Rotation(clusters=4),
        "label clusters, 5 groups": LabelClusters(clusters=5, classes=2),
    }
    rows = []
    for (federation, scheme), share, (name, settings) in product(
        federations.items(), (1.0, 0.5), options.items()
    ):
        summaries = []
        for seed in range(seeds):
            clients = partition(load("digits"), scheme, clients=40, seed=seed, probe=None)
            summaries.append(
                fc.run(
                    fc.IFCA(clusters=scheme.clusters, **settings),
                    clients,
                    fc.models.MLP(64),
                    rounds=30,
                    clients_per_round=share,
                    lr=0.1,
                    epochs=2,
                    eval_every=0,
                    seed=seed,
                ).summary
            )
        rows.append(
            {
                "federation": federation,
                "participation": share,
                "options": name,
                "exact": sum(summary["ari"] == 1 for summary in summaries),
                "ari": spread([summary["ari"] for summary in summaries]),
                "accuracy": spread([summary["accuracy"] for summary in summaries]),
            }
        )
        print(rows[-1], flush=True)
    return rows


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean and range over seeds."""
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("scaffold", "ifca"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-root")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (scaffold)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = (
        scaffold(args.seeds, args.data_root, args.device, args.jobs)
        if args.what == "scaffold"
        else ifca(args.seeds)
    )
    content = {"about": environment_info(), "seeds": args.seeds, "rows": rows}
    write_results(RESULTS / f"{args.what}.json", content)


if __name__ == "__main__":
    main()
