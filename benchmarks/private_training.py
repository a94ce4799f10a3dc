"""What differential privacy of whole clients costs: accuracy by ε.

python benchmarks/private_training.py --data-root FOLDER [--seeds 2]

Results go to results/private_training.json; tools/docs/privacy_page.py writes the table of
docs/privacy.md from them. FOLDER has mnist.npz. 1,000 clients of MNIST in five groups of two
classes; an MLP of 64 hidden units, 30 rounds of 200 clients on average, lr 0.1, batches of 10.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fedclade.io.compact_json import write_results
from fedclade.training import experiment_file

RESULTS = Path(__file__).resolve().parents[1] / "results" / "private_training.json"
EPSILONS = (None, 8.0, 4.0, 2.0, 1.0)
METHODS: dict[str, list[str]] = {
    "fedavg": [],
    "clade_groups": ["method.signature_epsilon=3.0"],
    "local": [],
}
TABLES: dict[str, dict[str, Any]] = {
    "data": {"name": "mnist"},
    "partition": {"name": "label_clusters", "clients": 1000, "clusters": 5, "classes": 2},
    "model": {"name": "mlp", "hidden": 64},
    "local": {"lr": 0.1, "batch_size": 10, "epochs": 1},
    "method": {"name": "fedavg"},
    "run": {"rounds": 30, "clients_per_round": 0.2, "eval_every": 0},
}


def runs(root: str, seeds: int) -> Iterator[dict[str, Any]]:
    for seed in range(seeds):
        clients = experiment_file.experiment(
            experiment_file.apply(TABLES, [f"run.seed={seed}"])
        ).clients(root)
        for epsilon in EPSILONS:
            for method, settings in METHODS.items():
                if method == "local" and epsilon is not None:
                    continue  # nothing is sent
                sets = [f"run.seed={seed}", f"method.name={method}", *settings]
                if epsilon is not None:
                    sets.append(f"privacy.epsilon={epsilon}")
                chosen = experiment_file.experiment(experiment_file.apply(TABLES, sets))
                summary = chosen.to_run(clients, "cpu").run().summary
                yield {
                    "seed": seed,
                    "method": method,
                    "epsilon": epsilon,
                    "accuracy": summary["accuracy"],
                    "worst": summary["accuracy_worst10"],
                    "ari": summary["ari"],
                    "noise_multiplier": summary.get("privacy", {}).get("noise_multiplier"),
                }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    content = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "delta": 1e-5,
        "runs": list(runs(arguments.data_root, arguments.seeds)),
    }
    write_results(RESULTS, content)


if __name__ == "__main__":
    main()
