"""Server optimizers on digits: the learning rate is chosen on seeds 0-2, the result is that of
seeds 3-5.

python benchmarks/server_optimizers.py [--out results/methods/server_optimizers.json]

It takes five minutes on one core.

FedAvg with 30 clients, Dirichlet(0.3), 9 of them in a round, 30 rounds, MLP(64), lr 0.1, batches of
10, one epoch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import fedclade as fc
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

OUT = Path(__file__).resolve().parents[1] / "results" / "methods" / "server_optimizers.json"
SETTINGS: dict[str, Any] = {
    "rounds": 30,
    "clients_per_round": 0.3,
    "lr": 0.1,
    "batch_size": 10,
    "eval_every": 0,
}
TUNED, REPORTED = range(3), range(3, 6)
ADAPTIVE = (0.01, 0.03, 0.1, 0.3, 1.0)
RATES: dict[str, tuple[float, ...]] = {
    "fedavgm": (0.1, 0.3, 1.0),
    "fedadagrad": ADAPTIVE,
    "fedadam": ADAPTIVE,
    "fedyogi": ADAPTIVE,
}


def accuracies(seeds: range, **server: Any) -> list[float]:
    values = []
    for seed in seeds:
        clients = fc.data.partition(
            fc.data.load("digits"), fc.data.Dirichlet(alpha=0.3), clients=30, seed=seed, probe=None
        )
        result = fc.run(
            fc.FedAvg(), clients, fc.models.MLP(64), seed=seed, device="cpu", **SETTINGS, **server
        )
        values.append(result.summary["accuracy"])
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []

    def measure(use: str, seeds: range, **server: Any) -> float:
        values = accuracies(seeds, **server)
        rows.append({"use": use, **server, "seeds": list(seeds), "accuracy": values})
        print(use, server, f"{mean(values):.1f}", flush=True)
        return mean(values)

    best: dict[str, float] = {}
    for optimizer, rates in RATES.items():
        tuned = {
            rate: measure("tune", TUNED, server_optimizer=optimizer, server_lr=rate)
            for rate in rates
        }
        best[optimizer] = max(tuned, key=lambda rate: tuned[rate])
    for serve in ("last", "mean"):
        measure("report", REPORTED, serve=serve)
        for optimizer, rate in best.items():
            measure("report", REPORTED, server_optimizer=optimizer, server_lr=rate, serve=serve)
    write_results(args.out, {"about": environment_info(), "settings": SETTINGS, "rows": rows})


if __name__ == "__main__":
    main()
