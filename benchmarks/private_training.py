"""What differential privacy of whole clients costs: accuracy by ε, with and without groups.

python benchmarks/private_training.py --data-root FOLDER --out PART.json [--device cuda]
    [--data mnist emnist62] [--federations labels rotation dirichlet]
    [--methods fedavg clade_groups oracle local] [--epsilons none 8 4 2 1] [--seeds 0 1]
python benchmarks/private_training.py --merge PART.json … --out results/private_training.json

A part that is begun is continued: runs that it has are not repeated. tools/docs/privacy_page.py
writes the tables of docs/privacy.md from results/private_training.json.

FOLDER has mnist.npz and emnist62.npz. 1,000 clients, 200 of them a round on average; an MLP of 64
hidden units, lr 0.1, batches of 10; 30 rounds of MNIST, 60 of emnist62. labels: five groups of two
classes (emnist62: of twelve). rotation: four groups, whose images are turned by a multiple of 90°.
dirichlet: classes in shares from Dirichlet(0.5), so there are no groups.
"""

from __future__ import annotations

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import fedclade as fc
from fedclade.engines.device import pick_device
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info

Row = dict[str, Any]
ROUNDS = {"mnist": 30, "emnist62": 60}
CLASSES = {"mnist": 2, "emnist62": 12}  # of a group
FEDERATIONS = ("labels", "rotation", "dirichlet")
METHODS: dict[str, fc.Method] = {
    "fedavg": fc.FedAvg(),
    "clade_groups": fc.CladeGroups(signature_epsilon=3.0),
    "oracle": fc.Oracle(),
    "local": fc.Local(),
}
EPSILONS = ("none", "8", "4", "2", "1")
KEY = ("data", "federation", "method", "epsilon", "seed")


def federation(data: fc.data.Dataset, name: str, seed: int, clients: int) -> fc.data.Clients:
    schemes = {
        "labels": fc.data.LabelClusters(clusters=5, classes=CLASSES[data.name]),
        "rotation": fc.data.Rotation(clusters=4),
        "dirichlet": fc.data.Dirichlet(0.5),
    }
    return fc.data.partition(data, schemes[name], clients=clients, seed=seed, probe=None)


def is_run(federation: str, method: str, epsilon: str) -> bool:
    if method == "local":
        return epsilon == "none"  # nothing is sent
    return method != "oracle" or federation != "dirichlet"


def measured(clients: fc.data.Clients, row: Row, rounds: int, device: str) -> Row:
    """The numbers of one run."""
    begin = time.perf_counter()
    epsilon = row["epsilon"]
    summary = fc.run(
        METHODS[row["method"]],
        clients,
        fc.models.MLP(64),
        seed=row["seed"],
        device=device,
        rounds=rounds,
        clients_per_round=0.2,
        eval_every=0,
        privacy=fc.PrivacyConfig(epsilon=None if epsilon == "none" else float(epsilon)),
    ).summary
    return row | {
        "accuracy": summary["accuracy"],
        "worst": summary["accuracy_worst10"],
        "ari": summary["ari"],
        "groups": summary["clusters"],
        "noise_multiplier": summary.get("privacy", {}).get("noise_multiplier"),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs of all parts in one order; of equal runs the last one."""
    rows = {tuple(row[key] for key in KEY): row for part in parts for row in part["runs"]}
    order = {
        "data": tuple(ROUNDS),
        "federation": FEDERATIONS,
        "method": tuple(METHODS),
        "epsilon": EPSILONS,
    }

    def place(row: Row) -> list[int]:
        return [order[key].index(row[key]) if key in order else row[key] for key in KEY]

    return parts[-1] | {"runs": sorted(rows.values(), key=place)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data", nargs="+", choices=ROUNDS, default=list(ROUNDS))
    parser.add_argument("--federations", nargs="+", choices=FEDERATIONS, default=FEDERATIONS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--epsilons", nargs="+", choices=EPSILONS, default=EPSILONS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--clients", type=int, default=1000, help="fewer for a trial")
    parser.add_argument("--rounds", type=int, help="fewer for a trial")
    parser.add_argument("--merge", nargs="+", type=Path, default=[])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.merge:
        write_results(args.out, merged([read_results(path) for path in args.merge]))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows: list[Row] = read_results(args.out)["runs"] if args.out.exists() else []
    about = environment_info(pick_device(args.device).type)
    known = {tuple(row[key] for key in KEY) for row in rows}
    for name in args.data:
        data = fc.data.load(name, args.data_root)
        for kind in args.federations:
            for seed in args.seeds:
                clients = federation(data, kind, seed, args.clients)
                for method in args.methods:
                    for epsilon in args.epsilons:
                        key = (name, kind, method, epsilon, seed)
                        if key in known or not is_run(kind, method, epsilon):
                            continue
                        row = dict(zip(KEY, key, strict=True))
                        rounds = args.rounds or ROUNDS[name]
                        rows.append(measured(clients, row, rounds, args.device))
                        print(rows[-1], flush=True)
                        write_results(args.out, {"about": about, "delta": 1e-5, "runs": rows})


if __name__ == "__main__":
    main()
