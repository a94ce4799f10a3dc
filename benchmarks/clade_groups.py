"""Whether Clade finds the groups, and no groups in federations without groups, on real data.

python benchmarks/clade_groups.py --data-root FOLDER [--seeds 5] [--only NAME]
[--out results/methods/clade_groups.json]

The method gets only the clients and the model. FOLDER has mnist.npz and emnist47.npz. Without --out
the rows are only printed. tools/docs/method_tables.py writes the table of
docs/methods/clade_groups.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

import fedclade as fc
from fedclade.core.functional_model import Objective
from fedclade.core.rng import fold_in
from fedclade.data import Clients, Dataset
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

Make = Callable[[int], Clients]


def some(data: Dataset, count: int, seed: int) -> Dataset:
    """A random part of the training samples."""
    rows = np.random.default_rng([seed, 1]).permutation(len(data.x_train))[:count]
    return fc.data.dataset(
        data.x_train[rows], data.y_train[rows], data.x_test, data.y_test, name=data.name
    )


def federations(root: str) -> dict[str, tuple[Make, int, int]]:
    """Name -> (function from seed to clients, true number of groups, factor for --seeds)."""
    data = fc.data
    mnist = data.load("mnist", root)

    def planted(scheme: data.Scheme, clients: int, source: Dataset = mnist) -> Make:
        return lambda seed: data.partition(source, scheme, clients, seed, probe=None)

    def even(clients: int, each: int) -> Make:
        return lambda seed: data.partition(
            some(mnist, clients * each, seed), data.Iid(), clients, seed, probe=0
        )

    emnist = data.load("emnist47", root)
    return {
        "Scenario 1, about 570 a client": (planted(data.LabelClusters(5, 2), 100), 5, 1),
        "Scenario 1, 30 a client": (planted(data.LabelClusters(5, 2, samples=30), 100), 5, 1),
        "Scenario 2, about 570 a client": (planted(data.LabelClusters(5, 3, overlap=1), 100), 5, 1),
        "Scenario 2, 30 a client": (
            planted(data.LabelClusters(5, 3, overlap=1, samples=30), 100),
            5,
            1,
        ),
        "permuted labels, 100 a client": (planted(data.LabelPermutation(4, samples=100), 40), 4, 1),
        "four rotations, 50 a client": (planted(data.Rotation(4, samples=50), 40), 4, 1),
        "two labels swapped, 200 a client": (planted(data.LabelSwap(4, samples=200), 40), 4, 1),
        "two labels swapped, 100 a client": (planted(data.LabelSwap(4, samples=100), 40), 4, 1),
        "two labels swapped, 50 a client": (planted(data.LabelSwap(4, samples=50), 40), 4, 1),
        "Scenario 4, 600 clients": (planted(data.PowerLawClusters(), 600, emnist), 10, 1),
        "Scenario 4, 2,400 clients": (planted(data.PowerLawClusters(), 2400, emnist), 10, 1),
        "IID, 40 clients of 30": (even(40, 30), 1, 4),
        "IID, 100 clients of 100": (even(100, 100), 1, 4),
        "IID, 600 clients of 30": (even(600, 30), 1, 4),
        "quantity skew, 100 clients": (
            lambda s: data.partition(
                some(mnist, 10_000, s), data.QuantitySkew(0.5), 100, s, probe=0
            ),
            1,
            4,
        ),
        "quantity skew, 100 clients, stronger": (
            lambda s: data.partition(
                some(mnist, 10_000, s), data.QuantitySkew(0.1), 100, s, probe=0
            ),
            1,
            4,
        ),
    }


def groups_of(clients: Clients, seed: int, method: fc.Method) -> torch.Tensor:
    """The groups that the method finds before training."""
    torch.manual_seed(seed)
    assert clients.classes is not None
    objective = Objective(fc.models.MLP(200).build(clients.shape, clients.classes))
    fed = fc.Simulator(clients)
    return (
        method.with_local_config(fc.core.LocalTraining(objective, lr=0.01))
        .init(fed, objective.params(), fold_in(seed, "init"))
        .cluster_ids
    )


def measured(name: str, make: Make, true: int, seeds: range, method: fc.Method) -> dict[str, Any]:
    """The numbers of groups found, the ARI and the seconds of one federation over seeds."""
    numbers, scores, seconds = [], [], []
    for seed in seeds:
        clients = make(seed)
        begin = time.perf_counter()
        cluster_ids = groups_of(clients, seed, method)
        seconds.append(time.perf_counter() - begin)
        numbers.append(len(cluster_ids.unique()))
        assert clients.groups is not None
        scores.append(adjusted_rand_score(clients.groups, cluster_ids))
    return {
        "federation": name,
        "groups": true,
        "found": {number: numbers.count(number) for number in sorted(set(numbers))},
        "ari_mean": float(np.mean(scores)),
        "ari_min": float(min(scores)),
        "seeds": len(seeds),
        "seconds": float(np.mean(seconds)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--signature", default="gradient")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    for name, (make, true, times) in federations(args.data_root).items():
        if args.only in name:
            method = fc.CladeGroups(signature=args.signature, signature_dim=args.size)
            rows.append(measured(name, make, true, range(args.seeds * times), method))
            print(rows[-1], flush=True)
    if args.out:
        write_results(args.out, {"about": environment_info(), "rows": rows})


if __name__ == "__main__":
    main()
