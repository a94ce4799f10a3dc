"""All methods on the same eight small federations of digits. tools/docs/which_page.py writes the
tables of docs/which.md from the results.

python benchmarks/all_methods.py [--seeds 3] [--methods ditto fedrep]
    [--out results/methods/all_methods.json]

It takes an hour on one core. With --methods the rows of other methods stay as they are. FedBN is
left out: the model has no BatchNorm.

20 clients with 64 images on average, 10 of them in a round, 40 rounds, MLP(64), lr 0.1, batches of
10, two epochs, every method with its default settings. Methods that need the number of groups get
the true number, or 4 if there are no groups.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import fields, replace
from pathlib import Path

import torch

import fedclade as fc
from fedclade.data.partitioning.base import Scheme
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info
from fedclade.methods import METHODS

OUT = Path(__file__).resolve().parents[1] / "results" / "methods" / "all_methods.json"
SETTINGS = {
    "rounds": 40,
    "clients_per_round": 0.5,
    "lr": 0.1,
    "batch_size": 10,
    "epochs": 2,
    "eval_every": 0,
}
CLIENTS, HIDDEN, NO_GROUPS = 20, 64, 4
FEDERATIONS: dict[str, Scheme] = {
    "iid": fc.data.Iid(),
    "quantity skew": fc.data.QuantitySkew(alpha=0.5),
    "label clusters": fc.data.LabelClusters(clusters=5, classes=2),
    "any two classes": fc.data.Pathological(classes_per_client=2),
    "Dirichlet(0.1)": fc.data.Dirichlet(alpha=0.1),
    "labels swapped": fc.data.LabelSwap(clusters=4),
    "labels permuted": fc.data.LabelPermutation(clusters=4),
    "rotated": fc.data.Rotation(clusters=4),
}


def measured(federation: str, name: str, seed: int) -> dict[str, float | int | None] | None:
    clients = fc.data.partition(
        fc.data.load("digits"), FEDERATIONS[federation], clients=CLIENTS, seed=seed, probe=None
    )
    true = 0 if clients.groups is None else len(clients.groups.unique())
    method = METHODS[name]()
    if name == "oracle" and true < 2:
        return None
    if method.groups == "given" and "clusters" in {field.name for field in fields(method)}:
        method = replace(method, clusters=true if true > 1 else NO_GROUPS)
    summary = fc.run(
        method, clients, model=fc.models.MLP(HIDDEN), seed=seed, device="cpu", **SETTINGS
    ).summary
    return {
        key: summary[key]
        for key in ("accuracy", "accuracy_worst10", "clusters", "ari", "bytes_up", "bytes_down")
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    names = [name for name in METHODS if name != "fedbn"]
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # UMAP warns about few clients
    rows = []
    if args.out.exists():
        stored = read_results(args.out)["rows"]
        rows = [row for row in stored if row["method"] not in args.methods]
    for federation in FEDERATIONS:
        for name in args.methods:
            for seed in range(args.seeds):
                metrics = measured(federation, name, seed)
                if metrics is not None:
                    rows.append({"federation": federation, "method": name, "seed": seed, **metrics})
            if rows and rows[-1]["method"] == name:
                print(f"{federation}: {name} {rows[-1]['accuracy']:.1f}", flush=True)
    order = [(federation, name) for federation in FEDERATIONS for name in METHODS]
    rows.sort(key=lambda row: (order.index((row["federation"], row["method"])), row["seed"]))
    write_results(args.out, {"about": environment_info(), "settings": SETTINGS, "rows": rows})


if __name__ == "__main__":
    main()
