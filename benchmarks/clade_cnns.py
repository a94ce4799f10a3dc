"""Clade and its rivals with convolutional and recurrent networks, one federation at a time.

python benchmarks/clade_cnns.py --data-root DIR --federation permuted --methods clade oracle
    --seeds 10 11 12 --out PART.json
python benchmarks/clade_cnns.py --merge PART.json … --out results/methods/clade_cnns.json

DIR has cifar10.npz, emnist62.npz and shakespeare.csv. No constant of Clade was chosen on any of
these federations. A method's name may end in "+server" for Clade's server optimizer and its mean
over rounds.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from clade import SERVER

import fedclade as fc
from fedclade.data import Clients, Dataset
from fedclade.data.partitioning.base import Scheme
from fedclade.engines.device import pick_device
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info
from fedclade.methods import METHODS

TRAIN, TEST = 20_000, 4_000
NO_GROUPS = 4  # what a method that needs a number of groups gets where there are none
SUMMARY = ("accuracy", "accuracy_worst10", "clusters", "ari", "bytes_up", "bytes_down")


@dataclass(frozen=True)
class Federation:
    """Clients, their model and how they train."""

    clients: Callable[[str, int], Clients]
    model: Any
    settings: dict[str, Any]


def _of(
    data: str, scheme: Scheme, clients: int, probe: int | None = None, some: bool = True
) -> Any:
    """Clients of `some` random images of a data set, or of all of them."""

    def make(root: str, seed: int) -> Clients:
        whole = fc.data.load(data, root)
        images = _some(whole, seed) if some else whole
        return fc.data.partition(images, scheme, clients, seed, probe=probe)

    return make


def _some(whole: Dataset, seed: int) -> Dataset:
    rng = np.random.default_rng([seed, 7])
    train = rng.permutation(len(whole.x_train))[:TRAIN]
    test = rng.permutation(len(whole.x_test))[:TEST]
    arrays = (whole.x_train[train], whole.y_train[train], whole.x_test[test], whole.y_test[test])
    return fc.data.dataset(*arrays, name=whole.name)


LENET = fc.models.LeNet5(centred=True)
LENET_SETTINGS = {
    "rounds": 60, "clients_per_round": 0.2, "lr": 0.05, "batch_size": 10, "epochs": 5,
}  # fmt: skip
GMCC_SETTINGS = {
    "rounds": 15, "clients_per_round": 1.0, "lr": 0.1, "batch_size": 64, "epochs": 5,
}  # fmt: skip
LABEL_CLUSTERS = fc.data.LabelClusters(clusters=5, classes=2)
FEDERATIONS = {
    # CFL's Figure 8
    "permuted": Federation(
        _of("cifar10", fc.data.LabelPermutation(clusters=4), 20, some=False),
        fc.models.CflCNN(centred=True),
        {"rounds": 200, "clients_per_round": 1.0, "lr": 0.1, "batch_size": 100, "epochs": 3},
    ),
    "label clusters": Federation(_of("cifar10", LABEL_CLUSTERS, 50), LENET, LENET_SETTINGS),
    "any two classes": Federation(
        _of("cifar10", fc.data.Pathological(classes_per_client=2), 100), LENET, LENET_SETTINGS
    ),
    "Dirichlet(0.1)": Federation(
        _of("cifar10", fc.data.Dirichlet(alpha=0.1), 100), LENET, LENET_SETTINGS
    ),
    "iid": Federation(_of("cifar10", fc.data.Iid(), 50), LENET, LENET_SETTINGS),
    # FedGMCC's Table I
    "EMD 17": Federation(
        _of("emnist62", fc.data.FeatureClusters(emd=2.7), 10, probe=80_000, some=False),
        fc.models.GmccCNN(),
        GMCC_SETTINGS,
    ),
    "EMD 49": Federation(
        _of("emnist62", fc.data.FeatureClusters(), 10, probe=80_000, some=False),
        fc.models.GmccCNN(),
        GMCC_SETTINGS,
    ),
    "roles": Federation(
        _of("shakespeare", fc.data.NaturalId(key="role"), 100, some=False),
        fc.models.LstmLanguageModel(embedding=8, hidden=256),
        {"rounds": 60, "clients_per_round": 0.1, "lr": 0.8, "batch_size": 10, "epochs": 1},
    ),
}


def measured(federation: Federation, method: str, seed: int, root: str, device: str) -> Any:
    """The numbers of one run."""
    clients = federation.clients(root, seed)
    true = 0 if clients.groups is None else len(clients.groups.unique())
    made = METHODS[method.removesuffix("+server")]()
    if made.groups == "given" and "clusters" in {field.name for field in fields(made)}:
        made = replace(made, clusters=true if true > 1 else NO_GROUPS)
    settings = federation.settings | {"eval_every": 0}
    if method.endswith("+server"):
        settings |= SERVER
    begin = time.perf_counter()
    result = fc.run(made, clients, federation.model, seed=seed, device=device, **settings)
    row = {key: result.summary[key] for key in SUMMARY if key in result.summary}
    return row | {"seconds": round(time.perf_counter() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--federation", choices=FEDERATIONS)
    parser.add_argument("--methods", nargs="+", default=["clade"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[10])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--merge", type=Path, nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = read_results(args.out)["rows"] if args.out.exists() else []
    parts = [read_results(path) for path in args.merge]
    about = parts[-1]["about"] if parts else environment_info(pick_device(args.device).type)
    for row in (row for part in parts for row in part["rows"]):
        key = (row["federation"], row["method"], row["seed"])
        rows = [old for old in rows if (old["federation"], old["method"], old["seed"]) != key]
        rows.append(row)
    for method in args.methods if args.federation else []:
        for seed in args.seeds:
            row = {"federation": args.federation, "method": method, "seed": seed}
            federation = FEDERATIONS[args.federation]
            rows.append(row | measured(federation, method, seed, args.data_root, args.device))
            print(rows[-1], flush=True)
            write_results(args.out, {"about": about, "rows": rows})
    if parts:
        rows.sort(key=lambda row: (row["federation"], row["method"], row["seed"]))
        write_results(args.out, {"about": about, "rows": rows})


if __name__ == "__main__":
    main()
