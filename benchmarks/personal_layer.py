"""The personal layer on FedAvg: digits (seeds 10-14) and MNIST (seeds 10 and 11).

python benchmarks/personal_layer.py --data-root FOLDER
    [--out results/methods/personal_layer.json]

Digits: 20 clients with 64 images on average, 10 of them in a round, 40 rounds, MLP(64), lr 0.1.
MNIST: 8,000 training and 2,000 test images, 40 clients (60 writers), 10 in a round, 50 rounds,
MLP(100), lr 0.05. Both: batches of 10, two epochs, five epochs of fine-tuning. FOLDER has mnist.npz
with the writers. It takes about a quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedclade as fc
from fedclade.data.partitioning.base import Scheme
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

OUT = Path(__file__).resolve().parents[1] / "results" / "methods" / "personal_layer.json"
FEDERATIONS: dict[str, Scheme] = {
    "iid": fc.data.Iid(),
    "quantity skew": fc.data.QuantitySkew(alpha=0.5),
    "Dirichlet(0.1)": fc.data.Dirichlet(alpha=0.1),
    "two classes": fc.data.Pathological(classes_per_client=2),
    "Dirichlet(5)": fc.data.Dirichlet(alpha=5.0),
    "rotated": fc.data.Rotation(clusters=4),
}
LAYERS = ("none", "finetune", "interpolate", "knn", "auto")
COMMON = {"batch_size": 10, "epochs": 2, "eval_every": 0, "device": "cpu"}
DIGITS = {"rounds": 40, "clients_per_round": 0.5, "lr": 0.1}
MNIST = {"rounds": 50, "clients_per_round": 10, "lr": 0.05}
WRITERS = 60


def digits() -> Iterator[tuple[str, int, fc.data.Clients]]:
    data = fc.data.load("digits")
    for name, scheme in FEDERATIONS.items():
        for seed in range(10, 15):
            yield name, seed, fc.data.partition(data, scheme, clients=20, seed=seed)


def mnist(root: Path) -> Iterator[tuple[str, int, fc.data.Clients]]:
    with np.load(root / "mnist.npz") as arrays:
        x, y, writer, x_test, y_test = (
            arrays[name] for name in ("x_train", "y_train", "writer_train", "x_test", "y_test")
        )
    for name in (*FEDERATIONS, "writers"):
        for seed in (10, 11):
            random = np.random.default_rng(seed)
            if name == "writers":
                yield name, seed, _writers(x, y, writer, random)
                continue
            train, test = random.permutation(len(x))[:8000], random.permutation(len(x_test))[:2000]
            data = fc.data.dataset(x[train], y[train], x_test[test], y_test[test], "mnist")
            yield name, seed, fc.data.partition(data, FEDERATIONS[name], clients=40, seed=seed)


def _writers(x: Any, y: Any, writer: Any, random: np.random.Generator) -> fc.data.Clients:
    """Three quarters of a writer's images are for training."""
    clients = []
    for each in random.permutation(np.unique(writer))[:WRITERS]:
        rows = random.permutation(np.flatnonzero(writer == each))
        train, test = rows[: 3 * len(rows) // 4], rows[3 * len(rows) // 4 :]
        clients.append((x[train], y[train], x[test], y[test]))
    return fc.data.from_arrays(clients)


def measured(clients: fc.data.Clients, model: Any, seed: int, settings: Any) -> list[Any]:
    """A row for each layer, and for Local."""
    runs = {
        layer: fc.run(
            fc.FedAvg(),
            clients,
            model,
            seed=seed,
            personal=fc.PersonalConfig(layer),  # type: ignore[arg-type]
            **COMMON,
            **settings,
        )
        for layer in LAYERS
    }
    runs["local"] = fc.run(fc.Local(), clients, model, seed=seed, **COMMON, **settings)
    columns = {name: np.array(run.clients["accuracy"], np.float64) for name, run in runs.items()}
    known = ~np.isnan(columns["none"])
    rows = []
    for name, run in runs.items():
        hurt = {
            f"hurt_against_{base}": 100 * float((columns[name] < columns[other])[known].mean())
            for base, other in (("fedavg", "none"), ("local", "local"))
        }
        numbers = {
            key: run.summary[key]
            for key in ("accuracy", "accuracy_worst10", "bytes_up", "bytes_down", "seconds")
        }
        rows.append({"layer": name, **numbers, **hurt})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Any] = []
    settings = {"digits": {**COMMON, **DIGITS}, "mnist": {**COMMON, **MNIST}}
    for data, federations, model, own in (
        ("digits", digits(), fc.models.MLP(64), DIGITS),
        ("mnist", mnist(args.data_root), fc.models.MLP(100), MNIST),
    ):
        for federation, seed, clients in federations:
            head = {"data": data, "federation": federation, "seed": seed}
            new = [head | row for row in measured(clients, model, seed, own)]
            rows += new
            print(*head.values(), *(f"{r['layer']} {r['accuracy']:.1f}" for r in new), flush=True)
            write_results(
                args.out, {"about": environment_info(), "settings": settings, "rows": rows}
            )


if __name__ == "__main__":
    main()
