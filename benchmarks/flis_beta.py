"""What β does to FLIS: groups found, adjusted Rand index and accuracy over planted federations, for
both variants and both kinds of labels.

python benchmarks/flis_beta.py --data-root FOLDER [--seeds 3] [--only NAME] [--variants hc,dc]
[--labels onehot,soft] [--out FILE]

FOLDER has mnist.npz. All runs: 40 clients, MLP(64), 32 of them in a round, batches of 10. A cell
has the number of models that clients use, the adjusted Rand index of who uses which, and the
accuracy, all means over seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fedclade as fc
from fedclade.data import Clients

BETAS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)


def federations(root: str) -> dict[str, tuple[Callable[[int], Clients], dict[str, float], int]]:
    """Name -> (how to make it from a seed, local training, rounds)."""
    data = fc.data
    mnist, digits = data.load("mnist", root), data.load("digits")

    def of(source: data.Dataset, scheme: data.Scheme) -> Callable[[int], Clients]:
        return lambda seed: data.partition(source, scheme, 40, seed)

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
        "digits, five groups of two classes, about 32 images a client, E = 2 (quickstart)": (
            pairs,
            short,
            20,
        ),
        "the same, E = 10": (pairs, long, 10),
        "digits, any two of ten classes a client, E = 10": (
            of(digits, data.Pathological(2)),
            long,
            10,
        ),
        "digits, one kind of client, E = 10": (of(digits, data.Iid()), long, 10),
        "MNIST, five groups of two classes, 100 images a client, E = 2": (
            of(mnist, two),
            short,
            10,
        ),
        "the same, lr 0.01, E = 1": (of(mnist, two), {"lr": 0.01, "epochs": 1}, 20),
        "MNIST, five groups of three classes, one shared with the next, E = 2": (
            of(mnist, three),
            short,
            10,
        ),
    }


def cell(
    make: Callable[[int], Clients],
    local: dict[str, float],
    rounds: int,
    method: fc.Method,
    seeds: int,
) -> str:
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
    found = f", {np.mean(scores):.2f}" if scores else ""
    return f"{np.mean(models):.1f}{found}, {np.mean(accuracies):.1f}"


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
    lines = []
    for mode, labels in [
        (mode, labels) for mode in args.variants.split(",") for labels in args.labels.split(",")
    ]:
        lines += [
            f"**{mode.upper()}, {labels}**",
            "",
            f"| β | {' | '.join(map(str, BETAS))} |",
            f"| --- |{' --- |' * len(BETAS)}",
        ]
        print("\n".join(lines[-4:]), flush=True)
        for name, (make, local, rounds) in chosen.items():
            cells = [
                cell(make, local, rounds, fc.FLIS(mode, beta=beta, labels=labels), args.seeds)
                for beta in BETAS
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
        lines.append("")
    if args.out:
        args.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
