"""The personal layer on FedAvg: digits (seeds 10-14) and MNIST (seeds 10 and 11).

python benchmarks/personal_layer.py --data digits [--out results/methods/personal_layer.json]
python benchmarks/personal_layer.py --data mnist --data-root FOLDER

Digits: 20 clients with 64 images on average, 10 of them in a round, 40 rounds, MLP(64), lr 0.1.
MNIST: 8,000 training and 2,000 test images, 40 clients (60 writers), 10 in a round, 50 rounds,
MLP(100), lr 0.05. Both: batches of 10, two epochs, five epochs of fine-tuning. FOLDER has mnist.npz
with the writers. It takes about five minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedclade as fc
from fedclade.data.partitioning.base import Scheme
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info
from fedclade.training.config import EngineConfig
from fedclade.training.evaluation import evaluate
from fedclade.training.loop import start, train
from fedclade.training.metrics import summary_of
from fedclade.training.runner import TrainingRun
from fedclade.training.setup import prepare

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
    for seed in (10, 11):
        for name in ("writers", *FEDERATIONS):
            random = np.random.default_rng(seed)
            if name == "writers":
                yield name, seed, _writers(x, y, writer, random)
                continue
            train = random.permutation(len(x))[:8000]
            test = random.permutation(len(x_test))[:2000]
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
    """A row for each layer, and for Local. No layer changes the training, so there is one."""
    local = fc.LocalConfig(settings["lr"], settings["batch_size"], settings["epochs"])
    training = fc.TrainingConfig(
        settings["rounds"], settings["clients_per_round"], seed, settings["eval_every"]
    )
    plain = TrainingRun(
        fc.FedAvg(), clients, model, local, training, EngineConfig(), settings["device"]
    )
    setup = prepare(plain)
    progress = start(setup, None, None)
    train(setup, progress, [], None)
    summaries, columns = {}, {}
    for layer in LAYERS:
        made = prepare(replace(plain, personal=fc.PersonalConfig(layer)))  # type: ignore[arg-type]
        evaluation = evaluate(
            made, progress.clients, progress.state, progress.round, [], is_final=True
        )
        values = {name: evaluation.values[name] for name in ("accuracy", "loss")}
        summaries[layer] = summary_of(values, clients.metadata.test_samples)
        columns[layer] = values["accuracy"].numpy()
    alone = replace(plain, method=fc.Local()).run()
    summaries["local"] = dict(alone.summary)
    columns["local"] = np.array(alone.clients["accuracy"], np.float64)
    known = ~np.isnan(columns["none"])
    rows = []
    for name, summary in summaries.items():
        rows.append(
            {"layer": name}
            | {key: summary[key] for key in ("accuracy", "accuracy_worst10")}
            | {
                f"hurt_against_{base}": 100 * float((columns[name] < columns[other])[known].mean())
                for base, other in (("fedavg", "none"), ("local", "local"))
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", choices=("digits", "mnist"), required=True)
    parser.add_argument("--data-root", type=Path, default=Path())
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"digits": {**COMMON, **DIGITS}, "mnist": {**COMMON, **MNIST}}
    stored = read_results(args.out)["rows"] if args.out.exists() else []
    rows = [row for row in stored if row["data"] != args.data]
    federations = digits() if args.data == "digits" else mnist(args.data_root)
    model = fc.models.MLP(64 if args.data == "digits" else 100)
    for federation, seed, clients in federations:
        head = {"data": args.data, "federation": federation, "seed": seed}
        new = [head | row for row in measured(clients, model, seed, settings[args.data])]
        rows += new
        print(*head.values(), *(f"{r['layer']} {r['accuracy']:.1f}" for r in new), flush=True)
        write_results(args.out, {"about": environment_info(), "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
