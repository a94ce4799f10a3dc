"""Accuracy of training with Clade's groups: FLT's Scenario 4, and a federation without groups.
Needs a GPU.

python benchmarks/clade_training.py --data-root FOLDER [--device cuda] [--job scenario4|dirichlet]
[--out results/methods/scenario4.json]

scenario4: emnist47 in ten groups by power law, 2,400 clients, 20 % a round, MLP 784-200-47 with
dropout 0.5, SGD 0.01, batch 10, E=5, 100 rounds. dirichlet: MNIST, Dirichlet(0.1), 100 clients, 20
a round, MLP 200, E=1, 100 rounds.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import fedclade as fc
from fedclade.core.pytree import Tree, tree_index
from fedclade.io.compact_json import write_results


@dataclass(frozen=True)
class TrueGroups(fc.FedAvg):
    """FedAvg inside the true groups: the upper bound for clustering."""

    groups: tuple[int, ...] = ()

    def init(self, fed: fc.core.Federation, params: Tree, key: int) -> fc.core.State:
        state = super().init(fed, params, key)
        cluster = torch.tensor(self.groups)
        return replace(
            state,
            cluster_ids=cluster,
            models=tree_index(state.models, torch.zeros(int(cluster.max()) + 1, dtype=torch.int64)),
        )


def compared(
    methods: Sequence[fc.Method], clients: fc.data.Clients, model: Any, seed: int, **settings: Any
) -> list[dict[str, Any]]:
    rows = []
    for method in methods:
        result = fc.run(method, clients, model, rounds=100, lr=0.01, seed=seed, **settings)
        row = {
            "job": f"{clients.dataset} {clients.partition}",
            "class": type(method).__name__,
            **result.summary,
        }
        rows.append(row)
        accuracy = (
            f"{row['accuracy']:.2f} ± {row['accuracy_stderr']:.2f}, variance"
            f" {row['accuracy_variance']:.1f}"
        )
        print(
            f"{row['job']}, seed {seed}, {row['class']}: {accuracy}, {row['clusters']} clusters,"
            f" ARI {row['ari']}, {row['seconds']:.0f} s",
            flush=True,
        )
    return rows


def scenario4(
    root: str, device: str, seeds: int, also: Sequence[fc.Method]
) -> list[dict[str, Any]]:
    data, rows = fc.data.load("emnist47", root), []
    for seed in range(seeds):
        clients = fc.data.partition(
            data, fc.data.PowerLawClusters(), clients=2400, seed=seed, probe=None
        )
        assert clients.groups is not None
        methods = [
            fc.FedAvg(),
            fc.Clade(),
            TrueGroups(groups=tuple(clients.groups.tolist())),
            *also,
        ]
        rows += compared(
            methods,
            clients,
            fc.models.MLP(200, dropout=0.5),
            seed,
            epochs=5,
            eval_every=0,
            device=device,
        )
    return rows


def dirichlet(
    root: str, device: str, seeds: int, also: Sequence[fc.Method]
) -> list[dict[str, Any]]:
    data, rows = fc.data.load("mnist", root), []
    for seed in range(seeds):
        clients = fc.data.partition(
            data, fc.data.Dirichlet(0.1), clients=100, seed=seed, probe=None
        )
        rows += compared(
            [fc.FedAvg(), fc.Local(), fc.Clade(), *also],
            clients,
            fc.models.MLP(200),
            seed,
            eval_every=0,
            device=device,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--job", choices=["scenario4", "dirichlet"], default="scenario4")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--flt", action="store_true", help="FLT too (needs umap-learn)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    also = [fc.FLT()] if args.flt else []
    rows = {"scenario4": scenario4, "dirichlet": dirichlet}[args.job](
        args.data_root, args.device, args.seeds, also
    )
    if args.out:
        machine = (
            torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
        )
        content = {"machine": machine, "torch": torch.__version__, "rows": rows}
        write_results(args.out, content)


if __name__ == "__main__":
    main()
