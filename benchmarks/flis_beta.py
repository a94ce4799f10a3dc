"""The effect of β in FLIS: number of groups, adjusted Rand index and accuracy, for both variants
and both kinds of labels.

python benchmarks/flis_beta.py --data-root FOLDER [--seeds 3] [--only NAME] [--variants hc,dc]
[--labels onehot,soft] [--out results/methods/flis_beta.json]

FOLDER has mnist.npz. All runs: 40 clients, MLP(64), 32 of them in a round, batches of 10. Measured
for every β: the number of models that clients use, the adjusted Rand index of this grouping, and
the accuracy, all means over seeds. "pairs" are five groups of two classes, "threes" five groups of
three classes that share one with the next group, "any two" two of ten classes for each client.
Without --out the rows are only printed. tools/docs/method_tables.py writes the tables of
docs/methods/flis.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np

import fedclade as fc
from fedclade.data import Clients
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

BETAS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
VARIANTS: dict[str, type[fc.FLISHC] | type[fc.FLISDC]] = {"hc": fc.FLISHC, "dc": fc.FLISDC}
LABELS = {"onehot": "one-hot", "soft": "soft"}


def federations(root: str) -> dict[str, tuple[Callable[[int], Clients], dict[str, float], int]]:
    """Name -> (function from seed to clients, local training, rounds)."""
    data = fc.data
    mnist, digits = data.load("mnist", root), data.load("digits")

    def of(source: data.Dataset, scheme: data.Scheme) -> Callable[[int], Clients]:
        return lambda seed: data.partition(source, scheme, 40, seed, probe=None)

    pairs, short, long = (
        of(digits, data.LabelClusters(5, 2)),
        {"lr": 0.1, "epochs": 2},
        {"lr": 0.1, "epochs": 10},
    )
    two, three = (
        data.LabelClusters(5, 2, samples=100),
        data.LabelClusters(5, 3, overlap=1, samples=100),
    )
    return {
        "digits, pairs, E = 2": (
            pairs,
            short,
            20,
        ),
        "digits, pairs, E = 10": (pairs, long, 10),
        "digits, any two, E = 10": (
            of(digits, data.Pathological(2)),
            long,
            10,
        ),
        "digits, one kind, E = 10": (of(digits, data.Iid()), long, 10),
        "MNIST, pairs, E = 2": (
            of(mnist, two),
            short,
            10,
        ),
        "MNIST, pairs, lr 0.01, E = 1": (of(mnist, two), {"lr": 0.01, "epochs": 1}, 20),
        "MNIST, threes, E = 2": (
            of(mnist, three),
            short,
            10,
        ),
    }


def measured(
    make: Callable[[int], Clients],
    local: dict[str, float],
    rounds: int,
    method: fc.Method,
    seeds: int,
) -> tuple[float, float | None, float]:
    """Models in use, ARI (None without true groups) and accuracy, means over seeds."""
    models, scores, accuracies = [], [], []
    for seed in range(seeds):
        clients = make(seed)
        settings = {"clients_per_round": 0.8, "eval_every": 0, "device": "cpu", "seed": seed}
        summary = fc.run(
            method, clients, fc.models.MLP(64), rounds=rounds, **local, **settings
        ).summary  # type: ignore[arg-type]
        models.append(summary["clusters"])
        accuracies.append(summary["accuracy"])
        if summary["ari"] is not None:
            scores.append(summary["ari"])
    ari = float(np.mean(scores)) if scores else None
    return float(np.mean(models)), ari, float(np.mean(accuracies))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="")
    parser.add_argument("--variants", default="hc,dc")
    parser.add_argument("--labels", default="onehot,soft")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    chosen = {
        name: parts for name, parts in federations(args.data_root).items() if args.only in name
    }
    rows = []
    for variant, labels in product(args.variants.split(","), args.labels.split(",")):
        for name, (make, local, rounds) in chosen.items():
            columns = [
                measured(
                    make, local, rounds, VARIANTS[variant](beta=beta, labels=labels), args.seeds
                )
                for beta in BETAS
            ]
            models, ari, accuracy = (list(values) for values in zip(*columns, strict=True))
            rows.append(
                {
                    "variant": variant,
                    "labels": LABELS[labels],
                    "federation": name,
                    "models": models,
                    "ari": ari,
                    "accuracy": accuracy,
                }
            )
            print(rows[-1], flush=True)
    if args.out:
        content = {
            "about": environment_info(),
            "betas": BETAS,
            "default_beta": {variant: method().beta for variant, method in VARIANTS.items()},
            "seeds": args.seeds,
            "rows": rows,
        }
        write_results(args.out, content)


if __name__ == "__main__":
    main()
