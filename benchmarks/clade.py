"""Clade against its strongest rivals, on seeds and data on which it was not tuned.

python benchmarks/clade.py [--data-root FOLDER] [--data digits mnist fashion_mnist]
    [--out results/methods/clade.json]

The constants of Clade were chosen on digits, seeds 0 to 2, and looked at on MNIST, seed 0. On these
seeds of digits the rivals of each federation are chosen: the strongest method of
results/methods/all_methods.json, and the strongest of FedAvg and the other averaging methods with
the server's optimizer and the mean over rounds of Clade. Reported are digits, seeds 10 to 19, and
MNIST and Fashion-MNIST (8,000 training and 2,000 test images), seeds 10 to 14. Rows that are in
the file already are not measured again. FOLDER has mnist.npz and fashion_mnist.npz.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from all_methods import CLIENTS, FEDERATIONS, HIDDEN, NO_GROUPS, SETTINGS

import fedclade as fc
from fedclade.data import Clients, Dataset
from fedclade.data.partitioning.base import Scheme, Split, blocks
from fedclade.data.partitioning.transforms import relabel, rotate
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info
from fedclade.methods import METHODS

OUT = Path(__file__).resolve().parents[1] / "results" / "methods" / "clade.json"
SERVER = {"server_optimizer": "nesterov", "serve": "mean"}
PLAIN_SERVER = {"server_optimizer": "fedavg", "serve": "last"}
TUNED_ON, REPORTED = range(3), {"digits": range(10, 20)}
FEW_SEEDS = range(10, 15)
IMAGES = {"rounds": 50, "clients_per_round": 0.25, "lr": 0.05, "batch_size": 10, "epochs": 2}
TRAIN, TEST, IMAGE_CLIENTS, WRITERS = 8_000, 2_000, 40, 60
WITH_SERVER = ("fedavg", "scaffold", "ditto", "fedrep", "lg_fedavg", "fedsem", "oracle")


@dataclass(frozen=True)
class GroupsAndMixtures:
    """Four groups at once with a class mixture for each client, Dirichlet(0.3): labels permuted
    or images rotated.
    """

    kind: str
    name: ClassVar[str] = "groups_and_mixtures"

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        split = fc.data.Dirichlet(alpha=0.3).split(data, clients, rng)
        classes = data.classes or 0
        permutations = [rng.permutation(classes) for _ in range(3)]
        tables = np.stack([np.arange(classes), *permutations])
        transform = relabel(tables) if self.kind == "permuted" else rotate(4)
        return replace(split, groups=rng.permutation(blocks(clients, 4)), transform=transform)


IMAGE_FEDERATIONS: dict[str, Scheme] = {
    **FEDERATIONS,
    "Dirichlet(0.5)": fc.data.Dirichlet(alpha=0.5),
    "Dirichlet(5)": fc.data.Dirichlet(alpha=5.0),
    "mixtures, permuted": GroupsAndMixtures("permuted"),
    "mixtures, rotated": GroupsAndMixtures("rotated"),
}


@lru_cache(maxsize=2)
def loaded(name: str, root: str) -> Dataset:
    return fc.data.load(name, root)


@lru_cache(maxsize=2)
def clients_of(data: str, federation: str, seed: int, root: str) -> Clients:
    if data == "digits":
        digits = fc.data.load("digits")
        return fc.data.partition(digits, FEDERATIONS[federation], CLIENTS, seed, probe=None)
    if federation == "writers":
        by_writer = fc.data.NaturalId(key="writer", test_fraction=0.25)
        return fc.data.partition(loaded(data, root), by_writer, WRITERS, seed, probe=None)
    whole, rng = loaded(data, root), np.random.default_rng([seed, 7])
    train = rng.permutation(len(whole.x_train))[:TRAIN]
    test = rng.permutation(len(whole.x_test))[:TEST]
    some = fc.data.dataset(
        whole.x_train[train],
        whole.y_train[train],
        whole.x_test[test],
        whole.y_test[test],
        name=data,
    )
    return fc.data.partition(some, IMAGE_FEDERATIONS[federation], IMAGE_CLIENTS, seed, probe=None)


def measured(
    data: str, federation: str, method: str, seed: int, root: str
) -> dict[str, Any] | None:
    """The numbers of one run; None if the method cannot have it. A method's name may end in
    "+server" for Clade's server optimizer, or "-server" and "-layer" for a Clade without it or
    without its personal layer.
    """
    clients = clients_of(data, federation, seed, root)
    name = method.removesuffix("+server").removesuffix("-server").removesuffix("-layer")
    true = 0 if clients.groups is None else len(clients.groups.unique())
    if name == "oracle" and true < 2:
        return None
    made = METHODS[name]()
    if made.groups == "given" and "clusters" in {field.name for field in fields(made)}:
        made = replace(made, clusters=true if true > 1 else NO_GROUPS)
    settings = (SETTINGS if data == "digits" else IMAGES) | {"eval_every": 0}
    if method.endswith("+server"):
        settings |= SERVER
    elif method.endswith("-server"):
        settings |= PLAIN_SERVER
    elif method.endswith("-layer"):
        settings |= {"personal": fc.PersonalConfig("none")}
    model = fc.models.MLP(HIDDEN if data == "digits" else 100)
    begin = time.process_time()
    summary = fc.run(made, clients, model, seed=seed, device="cpu", **settings).summary
    keys = ("accuracy", "accuracy_worst10", "clusters", "ari", "bytes_up", "bytes_down")
    return {key: summary[key] for key in keys} | {"cpu_s": round(time.process_time() - begin, 2)}


def rivals(rows: list[dict[str, Any]], federation: str) -> list[str]:
    """The two strongest rivals on the seeds on which Clade was tuned: with default settings, and
    with Clade's server.
    """
    of: dict[str, list[float]] = {}
    for row in rows:
        if row["data"] == "digits" and row["federation"] == federation and row["seed"] in TUNED_ON:
            of.setdefault(row["method"], []).append(row["accuracy"])
    others = {
        name: float(np.mean(values))
        for name, values in of.items()
        if not name.startswith("clade") and not name.startswith("oracle")
    }
    plain = [name for name in others if "+" not in name]
    best = max(plain, key=lambda name: others[name])
    with_server = max((name for name in others if "+" in name), key=lambda name: others[name])
    return [best, with_server]


def compared(rows: list[dict[str, Any]], data: str, federation: str) -> Iterable[str]:
    """The methods that are measured on a federation."""
    also = [] if federation in FEDERATIONS else ["lg_fedavg", "ditto", "scaffold"]
    strongest = rivals(rows, federation) if federation in FEDERATIONS else []
    names = [
        "clade",
        "clade_groups",
        "oracle",
        "fedavg",
        "fedavg+server",
        "local",
        "fedavg_finetune",
    ]
    return dict.fromkeys([*names, *strongest, *also])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--data", nargs="+", default=["digits"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--again", nargs="*", default=[], help="methods to measure again")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    stored = read_results(args.out)["rows"] if args.out.exists() else []
    rows = [row for row in stored if row["method"] not in args.again]
    known = {(row["data"], row["federation"], row["method"], row["seed"]) for row in rows}

    def measure(data: str, federation: str, method: str, seed: int) -> None:
        key = (data, federation, method, seed)
        if key not in known:
            numbers = measured(*key, args.data_root)
            if numbers is not None:
                names = ("data", "federation", "method", "seed")
                rows.append(dict(zip(names, key, strict=True)) | numbers)
                known.add(key)

    def write() -> None:
        chosen = {federation: rivals(rows, federation) for federation in FEDERATIONS}
        write_results(args.out, {"about": environment_info(), "rivals": chosen, "rows": rows})

    if not any(row["seed"] in TUNED_ON and row["method"] == "local" for row in rows):
        for row in read_results(OUT.with_name("all_methods.json"))["rows"]:
            if row["method"] not in ("clade", "fedgmcc") and row["seed"] in TUNED_ON:
                rows.append({"data": "digits"} | row)
                known.add(("digits", row["federation"], row["method"], row["seed"]))
    for federation in FEDERATIONS:
        for seed in TUNED_ON:
            for method in ("clade", *(f"{name}+server" for name in WITH_SERVER)):
                measure("digits", federation, method, seed)
    write()
    for data in args.data:
        federations = FEDERATIONS if data == "digits" else IMAGE_FEDERATIONS
        seeds = list(REPORTED.get(data, FEW_SEEDS))[: args.seeds]
        for federation in [*federations, *(["writers"] if data == "mnist" else [])]:
            for method in compared(rows, data, federation):
                for seed in seeds:
                    measure(data, federation, method, seed)
                values = [
                    row["accuracy"]
                    for row in rows
                    if (row["data"], row["federation"], row["method"]) == (data, federation, method)
                    and row["seed"] in seeds
                ]
                if values:
                    print(f"{data}, {federation}: {method} {np.mean(values):.1f}", flush=True)
            write()


if __name__ == "__main__":
    main()
