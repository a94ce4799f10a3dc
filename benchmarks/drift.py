"""Accuracy after clients have drifted, compared with a fresh start on the changed data.

python benchmarks/drift.py [--seeds 0 1 2] [--methods Clade …] [--out results/methods/drift.json]

Clade's rule for groups that change was chosen on `swap_labels` with share 0.5, seeds 0 to 2.

Digits, 20 clients in four groups, all in every round, MLP(100), lr 0.05, E = 2, 80 rounds. From
round 41 on, all or half of the clients of two groups have other data (`fc.data.Drift`). "before" is
the mean accuracy after round 40, "at once" after round 45, "after" at the end. "fresh" is a new run
of 40 rounds on the changed data, as many rounds as the first run has after the change.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import fedclade as fc
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info

ROUNDS, CHANGE = 80, 41
METHODS: dict[str, fc.Method] = {
    "Clade": fc.Clade(),
    "Clade, recluster_every = 10": fc.Clade(recluster_every=10),
    "CladeGroups": fc.CladeGroups(),
    "CladeGroups, recluster_every = 10": fc.CladeGroups(recluster_every=10),
    "IFCA, clusters = 4": fc.IFCA(clusters=4),
    "IFCA, clusters = 6": fc.IFCA(clusters=6),
    "FedAvg": fc.FedAvg(),
}


def measured(kind: Any, share: float, seed: int, name: str) -> dict[str, Any]:
    scheme = fc.data.Drift(kind, clusters=4, at=(CHANGE, 0, CHANGE, 0), share=share)
    clients = fc.data.partition(fc.data.load("digits"), scheme, 20, seed=seed)

    def run(data: fc.data.Clients, rounds: int) -> fc.Result:
        return fc.run(
            METHODS[name],
            data,
            fc.models.MLP(100),
            rounds=rounds,
            clients_per_round=1.0,
            lr=0.05,
            epochs=2,
            eval_every=5,
            seed=seed,
            threads=1,
            device="cpu",
        )

    drifted = run(clients, ROUNDS)
    fresh = run(clients.at_round(CHANGE), ROUNDS - CHANGE + 1)
    accuracy = {row["round"]: row.get("accuracy") for row in drifted.history}
    return {
        "kind": kind,
        "share": share,
        "seed": seed,
        "method": name,
        "before": accuracy[CHANGE - 1],
        "at once": accuracy[CHANGE + 4],
        "after": drifted.summary["accuracy"],
        "fresh": fresh.summary["accuracy"],
        "ARI": drifted.summary["ari"],
        "ARI fresh": fresh.summary["ari"],
        "groups": drifted.summary["clusters"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # Rows that the file has are not measured again.
    rows = read_results(args.out)["points"] if args.out and args.out.exists() else []
    known = {(row["kind"], row["share"], row["seed"], row["method"]) for row in rows}
    for kind in ("swap_labels", "rotate", "move"):
        for share in (1.0, 0.5):
            for seed in args.seeds:
                for name in args.methods:
                    if (kind, share, seed, name) in known:
                        continue
                    rows.append(measured(kind, share, seed, name))
                    print(rows[-1], flush=True)
                    if args.out:
                        write_results(args.out, {"about": environment_info("cpu"), "points": rows})


if __name__ == "__main__":
    main()
