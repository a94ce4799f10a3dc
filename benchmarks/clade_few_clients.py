"""How Clade chooses among its candidates with few clients, where no test shows groups.

python benchmarks/clade_few_clients.py [--seeds 10 11 12 13 14] [--clients 4 6]
    [--out results/methods/clade_few_clients.json]

Digits with 200 images for each client, all of them in each round, 40 rounds; else as
benchmarks/all_methods.py. "fewest" is the rule for clients that differ each in its own way: of
candidates within one standard error the one with the fewest models. "best" is Clade's rule below
eight clients: the best score. It takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from advice_federations import OwnAngle
from all_methods import HIDDEN, SETTINGS

import fedclade as fc
from fedclade.data.partitioning.base import Scheme
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

OUT = Path(__file__).resolve().parents[1] / "results" / "methods" / "clade_few_clients.json"
IMAGES = 200
FEDERATIONS: dict[str, Scheme] = {
    "iid": fc.data.Iid(),
    "label clusters": fc.data.LabelClusters(clusters=2, classes=5),
    "any five classes": fc.data.Pathological(classes_per_client=5),
    "Dirichlet(0.1)": fc.data.Dirichlet(alpha=0.1),
    "Dirichlet(0.5)": fc.data.Dirichlet(alpha=0.5),
    "labels swapped": fc.data.LabelSwap(clusters=2),
    "labels permuted": fc.data.LabelPermutation(clusters=2),
    "rotated": fc.data.Rotation(clusters=2),
    "own angle, up to 45": OwnAngle(45.0),
    "own angle, up to 20": OwnAngle(20.0),
}


def clients_of(federation: str, clients: int, seed: int) -> fc.data.Clients:
    digits = fc.data.load("digits")
    kept = np.random.default_rng([seed, 7]).permutation(len(digits.x_train))[: IMAGES * clients]
    some = fc.data.dataset(
        digits.x_train[kept], digits.y_train[kept], digits.x_test, digits.y_test, name="digits"
    )
    return fc.data.partition(some, FEDERATIONS[federation], clients, seed, probe=None)


def measured(rule: str, clients: fc.data.Clients, seed: int) -> fc.Result:
    settings = SETTINGS | {"clients_per_round": 1.0, "seed": seed, "device": "cpu"}
    method = fc.FedAvg() if rule == "fedavg" else fc.Clade()
    fewest = 0 if rule == "fewest" else 8
    with patch("fedclade.methods._candidates.FEWEST", fewest):
        return fc.run(method, clients, fc.models.MLP(HIDDEN), **settings)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[10, 11, 12, 13, 14])
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 6])
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for count in args.clients:
        for federation in FEDERATIONS:
            for seed in args.seeds:
                clients = clients_of(federation, count, seed)
                for rule in ("fedavg", "fewest", "best"):
                    summary = measured(rule, clients, seed).summary
                    head = {"clients": count, "federation": federation, "seed": seed, "rule": rule}
                    rows.append(head | {key: summary[key] for key in ("accuracy", "clusters")})
            last = rows[-3 * len(args.seeds) :]
            means = {
                rule: np.mean([row["accuracy"] for row in last if row["rule"] == rule])
                for rule in ("fedavg", "fewest", "best")
            }
            print(count, federation, *(f"{k} {v:.1f}" for k, v in means.items()), flush=True)
            write_results(args.out, {"about": environment_info(), "rows": rows})


if __name__ == "__main__":
    main()
