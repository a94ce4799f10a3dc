"""Baselines where published tables have them wrong or unstable: SCAFFOLD under label skew, IFCA's
dependence on where it starts.

python benchmarks/baselines.py scaffold --data-root FOLDER [--seeds 3] [--device cuda] [--jobs 8]
python benchmarks/baselines.py ifca [--seeds 10]

The first is on MNIST, Dirichlet(0.1) over 100 clients (FOLDER has mnist.npz), the second on digits,
rotations and label clusters. Each prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor

import torch

import fedclade as fc
from fedclade.data import Clients, Dirichlet, LabelClusters, Rotation, load, partition

METHODS: dict[str, fc.Method] = {
    "FedAvg": fc.FedAvg(),
    "FedProx, μ = 0.01": fc.FedProx(mu=0.01),
    "FedNova": fc.FedNova(),
    "SCAFFOLD": fc.SCAFFOLD(),
    "SCAFFOLD, clients alike": fc.SCAFFOLD(weights="clients"),
    "SCAFFOLD, option I": fc.SCAFFOLD(option=1),
}


def scaffold(seeds: int, root: str | None, device: str, jobs: int) -> None:
    print(
        "| local epochs | method | accuracy % after 25 | 50 | 75 | 100 rounds |\n| --- | --- | ---"
        " | --- | --- | --- |"
    )
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for epochs in (1, 5):
            ends = {
                name: [
                    pool.submit(curve, name, epochs, seed, root, device) for seed in range(seeds)
                ]
                for name in METHODS
            }
            for name, curves in ends.items():
                points = zip(*(done.result() for done in curves), strict=True)
                print(f"| {epochs} | {name} | {' | '.join(map(spread, points))} |", flush=True)


def curve(name: str, epochs: int, seed: int, root: str | None, device: str) -> list[float]:
    """The accuracy after every 25 rounds."""
    torch.set_num_threads(1)
    clients = partition(load("mnist", root), Dirichlet(alpha=0.1), clients=100, seed=seed)
    settings = {
        "rounds": 100,
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


def ifca(seeds: int) -> None:
    options = {
        "as it is": {},
        "restarts=4": {"num_restarts": 4},
        "warm_up=5": {"warm_up": 5},
        'share="trunk"': {"shared_layers": "trunk"},
        'share="trunk", restarts=4': {"shared_layers": "trunk", "num_restarts": 4},
    }
    federations = {
        "rotations, 4 groups": Rotation(clusters=4),
        "label clusters, 5 groups": LabelClusters(clusters=5, classes=2),
    }
    print(
        "| federation | participation | IFCA | seeds with ARI 1 | ARI | accuracy % |\n| --- | --- |"
        " --- | --- | --- | --- |"
    )
    for federation, scheme in federations.items():
        for share in (1.0, 0.5):
            for name, given in options.items():
                ends = []
                for seed in range(seeds):
                    clients: Clients = partition(load("digits"), scheme, clients=40, seed=seed)
                    method = fc.IFCA(clusters=scheme.clusters, **given)  # type: ignore[arg-type]
                    ends.append(
                        fc.run(
                            method,
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
                found = sum(end["ari"] == 1 for end in ends)
                columns = [spread([end[key] for end in ends]) for key in ("ari", "accuracy")]
                print(
                    f"| {federation} | {share:.0%} | {name} | {found} of {seeds} |"
                    f" {' | '.join(columns)} |",
                    flush=True,
                )


def spread(values: list[float] | tuple[float, ...]) -> str:
    """Mean and, over several seeds, the range."""
    mean = statistics.fmean(values)
    return (
        f"{mean:.2f}" if len(values) == 1 else f"{mean:.2f} ({min(values):.2f}–{max(values):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("scaffold", "ifca"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--data-root")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (scaffold)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.what == "scaffold":
        scaffold(given.seeds, given.data_root, given.device, given.jobs)
    else:
        ifca(given.seeds)


if __name__ == "__main__":
    main()
