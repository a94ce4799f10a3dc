"""Why FedAvg's variance over clients in FLT's Table 4 (MLP) differs from the paper's.

python benchmarks/flt_test_set.py --data-root FOLDER [--out results/methods/flt_test_set.json]

One model serves ten groups of clients, and all clients of a group have the same test samples. So
the variance over clients is that of ten accuracies. In the authors' code the test set of the last
group also has all images of digit 0, which other groups learn; and their EMNIST has equally many
images of each class, where emnist47 has 786 to 2,400. Both are undone here, one after the other.
FOLDER has emnist47.npz.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fedclade as fc
from fedclade.data import Dataset
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

GROUPS, CLASSES, CLIENTS = 10, 5, 2400
SETTINGS: dict[str, Any] = {
    "rounds": 100, "clients_per_round": 0.2, "lr": 0.01, "batch_size": 10, "epochs": 5,
    "eval_every": 0,
}  # fmt: skip
OUT = Path(__file__).resolve().parents[1] / "results" / "methods" / "flt_test_set.json"


def balanced(data: Dataset) -> Dataset:
    """The same number of random images of each class."""

    def rows(labels: Tensor) -> Tensor:
        rng, counts = np.random.default_rng(0), labels.bincount()
        of_class = [np.flatnonzero(labels == number) for number in range(len(counts))]
        fewest = int(counts.min())
        return torch.from_numpy(np.concatenate([rng.permutation(r)[:fewest] for r in of_class]))

    train, test = rows(data.y_train), rows(data.y_test)
    return fc.data.dataset(
        data.x_train[train], data.y_train[train], data.x_test[test], data.y_test[test]
    )


def scores(model: nn.Module, data: Dataset) -> dict[str, Any]:
    """Mean and variance over the groups, with the last group's own classes and with digit 0 too."""
    with torch.no_grad():
        right = model(data.x_test.float() / 255).argmax(-1) == data.y_test

    def accuracy(classes: list[int]) -> float:
        return 100 * float(right[torch.isin(data.y_test, torch.tensor(classes))].float().mean())

    classes = [list(range(CLASSES * g, min(CLASSES * (g + 1), 47))) for g in range(GROUPS)]
    own = [accuracy(of_group) for of_group in classes]
    with_digit_0 = [*own[:-1], accuracy([*classes[-1], 0])]
    return {
        name: {
            "groups": np.round(values, 2).tolist(),
            "accuracy": float(np.mean(values)),
            "variance": float(np.var(values)),
        }
        for name, values in (("own classes", own), ("and digit 0", with_digit_0))
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", default="data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    whole = fc.data.load("emnist47", args.data_root)
    rows = []
    for name, data in (("emnist47", whole), ("balanced", balanced(whole))):
        scheme = fc.data.PowerLawClusters(clusters=GROUPS, classes=CLASSES)
        clients = fc.data.partition(data, scheme, CLIENTS, args.seed, probe=None)
        model = fc.models.MLP(200, dropout=0.5)
        result = fc.run(fc.FedAvg(), clients, model, seed=args.seed, device="cpu", **SETTINGS)
        rows.append({"data": name, "seed": args.seed} | scores(result.model_of(0), data))
        print(rows[-1], flush=True)
    write_results(args.out, {"about": environment_info(), "rows": rows})


if __name__ == "__main__":
    main()
