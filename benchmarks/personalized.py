"""Personalized methods on MNIST with 100 clients: two classes each, Dirichlet(0.1), Dirichlet(5).

python benchmarks/personalized.py --data-root FOLDER [--methods ditto fedrep]
    [--out results/methods/personalized.json]

10 clients in a round, 20 rounds, one epoch, MLP(64), lr 0.05, batches of 32, one seed, every method
with its default settings. It takes about ten minutes on one core. FOLDER has mnist.npz. With
--methods the rows of other methods stay as they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import fedclade as fc
from fedclade.data.partitioning.base import Scheme
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info
from fedclade.methods import METHODS

OUT = Path(__file__).resolve().parents[1] / "results" / "methods" / "personalized.json"
FEDERATIONS: dict[str, Scheme] = {
    "two classes": fc.data.Pathological(classes_per_client=2),
    "Dirichlet(0.1)": fc.data.Dirichlet(alpha=0.1),
    "Dirichlet(5)": fc.data.Dirichlet(alpha=5.0),
}
NAMES = (
    *("fedavg", "local", "fedavg_finetune", "ditto", "fedrep", "fedbabu", "fedala", "knn_per"),
    *("clade_groups", "clade"),
)
SETTINGS = {
    "rounds": 20,
    "clients_per_round": 0.1,
    "lr": 0.05,
    "batch_size": 32,
    "epochs": 1,
    "eval_every": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = fc.data.load("mnist", args.data_root)
    stored = read_results(args.out)["rows"] if args.out.exists() else []
    rows = [row for row in stored if row["method"] not in args.methods]
    order = [(federation, name) for federation in FEDERATIONS for name in NAMES]
    for federation, scheme in FEDERATIONS.items():
        clients = fc.data.partition(data, scheme, clients=100, seed=0)
        for name in args.methods:
            result = fc.run(
                METHODS[name](), clients, fc.models.MLP(64), seed=0, device="cpu", **SETTINGS
            )
            numbers = {key: result.summary[key] for key in ("accuracy", "accuracy_worst10")}
            rows.append({"federation": federation, "method": name, **numbers})
            print(rows[-1], flush=True)
    rows.sort(key=lambda row: order.index((row["federation"], row["method"])))
    write_results(args.out, {"about": environment_info(), "settings": SETTINGS, "rows": rows})


if __name__ == "__main__":
    main()
