"""With which settings FLT finds the groups: every k, distance, cut and manifold on MNIST, Scenarios
1 and 2.

python benchmarks/flt_groups.py --data-root FOLDER [--seeds 5]
[--out results/methods/flt_groups.json]

The included encoder, trained on Fashion-MNIST, encodes all images of each of 100 clients.
Signatures are computed once for each k and seed, as in `fc.run` with that seed; every distance, cut
and manifold uses the same signatures. FOLDER has mnist.npz. tools/docs/method_tables.py writes the
tables of docs/methods/flt_table.md.
"""

from __future__ import annotations

import argparse
import time
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

import fedclade as fc
from fedclade.clustering.flt import Distance, Manifold, cluster_signatures, embed_centers
from fedclade.core.rng import fold_in
from fedclade.data import Clients
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info
from fedclade.methods.flt import FLT, FLTState
from fedclade.training.setup import inject_context

CLIENTS, GROUPS, GAMMA = 100, 5, 1.0
SCENARIOS = {
    "Scenario 1: five groups of two classes each": fc.data.LabelClusters(GROUPS, 2),
    "Scenario 2: five groups of three classes on a ring, neighbors share one": (
        fc.data.LabelClusters(GROUPS, 3, overlap=1)
    ),
}
KS = (2, 3, 5)
CUTS: dict[str, dict[str, Any]] = {
    "threshold, γ = 1": {"cut": "threshold", "clusters": None},
    "gap": {"cut": "gap", "clusters": None},
    "clusters = 5": {"cut": "threshold", "clusters": GROUPS},
}
Setting = tuple[str, str, str, int]  # manifold, distance, cut, k
Grouping = tuple[int, float]  # number of groups, ARI
OUT = Path(__file__).resolve().parents[1] / "results" / "methods" / "flt_groups.json"


def signatures(clients: Clients, k: int, seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The centers of all clients with their counts, and the key."""
    key = fold_in(seed, "init")
    method = inject_context(FLT(k=k, manifold="none"), clients.metadata, seed)
    state = method.init(fc.Simulator(clients), {"w": torch.zeros(1)}, key)
    assert isinstance(state, FLTState)
    return state.centres.numpy(), state.counts.numpy(), key


def groupings(clients: Clients, seed: int) -> dict[Setting, Grouping]:
    """The groups that every setting finds on one federation."""
    assert clients.groups is not None
    by_setting: dict[Setting, Grouping] = {}
    for k in KS:
        centers, counts, key = signatures(clients, k, seed)
        for manifold in get_args(Manifold):
            points = embed_centers(centers, counts, manifold, seed=fold_in(key, "manifold") % 2**32)
            for distance, (name, cut) in product(get_args(Distance), CUTS.items()):
                groups, _ = cluster_signatures(
                    points, counts, "none", distance, gamma=GAMMA, seed=0, **cut
                )
                by_setting[manifold, distance, name, k] = (
                    len(np.unique(groups)),
                    adjusted_rand_score(clients.groups, groups),
                )
    return by_setting


def rows(scenario: str, by_seed: list[dict[Setting, Grouping]]) -> list[dict[str, Any]]:
    """For each setting: the number of seeds with the correct number of groups, and the mean ARI."""
    records = []
    for manifold, distance, cut, k in product(get_args(Manifold), get_args(Distance), CUTS, KS):
        seeds = [by_setting[manifold, distance, cut, k] for by_setting in by_seed]
        records.append(
            {
                "scenario": scenario,
                "manifold": manifold,
                "distance": distance,
                "cut": cut,
                "k": k,
                "seeds": len(seeds),
                "right": sum(number == GROUPS for number, _ in seeds),
                "ari": float(np.mean([ari for _, ari in seeds])),
            }
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", default=None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    mnist = fc.data.load("mnist", args.data_root)
    begin = time.perf_counter()
    results: list[dict[str, Any]] = []
    for scenario, scheme in SCENARIOS.items():
        by_seed = []
        for seed in range(args.seeds):
            by_seed.append(
                groupings(fc.data.partition(mnist, scheme, CLIENTS, seed, probe=None), seed)
            )
            print(f"{scenario}, seed {seed}: {time.perf_counter() - begin:.0f} s", flush=True)
        results += rows(scenario, by_seed)
    content = {"about": environment_info(), "clients": CLIENTS, "groups": GROUPS, "rows": results}
    write_results(args.out, content)


if __name__ == "__main__":
    main()
