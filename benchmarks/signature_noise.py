"""The cost of noise in FLT's and Clade's signatures: groups and accuracy by ε.

python benchmarks/signature_noise.py --data-root FOLDER [--seeds 3]

Results go to results/signature_noise.json; tools/docs/privacy_page.py writes the tables of
docs/privacy.md from them.

Two federations: the preset `quickstart`, and MNIST in FLT's Scenario 1 (100 clients, five groups of
two classes; MLP 200, 20 clients a round, lr 0.01, batches of 10, ten rounds). FOLDER has mnist.npz.
δ = 1e-5 and clip = 1 throughout. Seeds change clients, model and noise.
"""

from __future__ import annotations

import argparse
import json
import platform
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import adjusted_rand_score

import fedclade as fc
from fedclade.clustering.flt import cluster_signatures
from fedclade.core.rng import fold_in
from fedclade.io.compact_json import write_results
from fedclade.methods._dp_signature import gaussian_sigma
from fedclade.methods.flt import FLTState
from fedclade.training import experiment_file
from fedclade.training.setup import inject_context

RESULTS = Path(__file__).resolve().parents[1] / "results" / "signature_noise.json"
EPSILONS = (None, 10.0, 3.0, 1.0, 0.3)
DELTA = 1e-5
Row = dict[str, Any]
FEDERATIONS = ("quickstart", "scenario1")
# FLT with its defaults (UMAP and γ = 1), and with the number of groups given.
VARIANTS = {
    "CladeGroups": lambda epsilon: fc.CladeGroups(signature_epsilon=epsilon),
    "FLT, k = 1": lambda epsilon: fc.FLT(k=1, fine_tune="none", signature_epsilon=epsilon),
    "FLT, k = 1, five groups given": lambda epsilon: fc.FLT(
        k=1, fine_tune="none", manifold="none", clusters=5, signature_epsilon=epsilon
    ),
}
REFERENCES = {
    "FLT, k = 5": fc.FLT(),
    "FedAvg": fc.FedAvg(),
    "Local": fc.Local(),
    "true groups": fc.Oracle(),
}


def federation(
    name: str, root: str | None, seed: int
) -> tuple[fc.data.Clients, fc.models.ModelSpec, dict[str, Any]]:
    """Clients, model and training settings."""
    if name == "quickstart":
        chosen = experiment_file.experiment(
            experiment_file.apply(
                experiment_file.read("quickstart"), [f"run.seed={seed}", "partition.probe=143"]
            )
        )
        training = {
            "lr": chosen.local.lr,
            "batch_size": chosen.local.batch_size,
            "epochs": chosen.local.epochs,
        }
        return (
            chosen.clients(),
            chosen.model,
            training
            | {
                "rounds": chosen.run.rounds,
                "clients_per_round": chosen.run.clients_per_round,
            },
        )
    clients = fc.data.partition(
        fc.data.load("mnist", root),
        fc.data.LabelClusters(clusters=5, classes=2),
        clients=100,
        seed=seed,
        probe=None,
    )
    return (
        clients,
        fc.models.MLP(200),
        {"rounds": 10, "clients_per_round": 20, "lr": 0.01, "batch_size": 10},
    )


def runs(name: str, root: str | None, seed: int) -> Iterator[Row]:
    clients, model, training = federation(name, root, seed)
    wanted = [
        (variant, epsilon, make(epsilon))
        for variant, make in VARIANTS.items()
        for epsilon in EPSILONS
    ]
    for variant, epsilon, method in [
        *wanted,
        *((reference, None, method) for reference, method in REFERENCES.items()),
    ]:
        summary = fc.run(
            method, clients, model, seed=seed, eval_every=0, device="cpu", **training
        ).summary
        numbers = {key: summary[key] for key in ("clusters", "ari", "accuracy", "accuracy_stderr")}
        yield {"federation": name, "seed": seed, "variant": variant, "epsilon": epsilon, **numbers}


def whole_client(name: str, root: str | None, seed: int) -> Iterator[Row]:
    """FLT's k centers with noise for the whole client: all data of a client may differ, so the
    sensitivity is 2 · clip.
    """
    clients, *_ = federation(name, root, seed)
    key = fold_in(seed, "init")
    for k in (1, 5):
        flt = fc.FLT(k=k, fine_tune="none", manifold="none")
        method = inject_context(flt, clients.metadata, seed)
        state = method.init(fc.Simulator(clients), {"w": torch.zeros(1)}, key)
        assert isinstance(state, FLTState)
        centers, counts = state.centres.double().numpy(), state.counts.numpy()
        centers = centers / np.linalg.norm(centers, axis=(1, 2), keepdims=True).clip(1)
        for epsilon in (100.0, *EPSILONS[1:]):
            noise = (
                2
                * gaussian_sigma(epsilon, DELTA)
                * np.random.default_rng([seed, k]).normal(size=centers.shape)
            )
            groups, _ = cluster_signatures(
                centers + noise, counts, "none", "matching", "threshold", 1.0, clusters=5, seed=0
            )
            ari = float(adjusted_rand_score(clients.groups, groups))
            yield {"federation": name, "seed": seed, "k": k, "epsilon": epsilon, "ari": ari}


def measure(root: str | None, seeds: int) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "manifold")
    results: dict[str, Any] = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "seeds": seeds,
        "delta": DELTA,
        "clip": 1.0,
    }
    examples = {
        name: round(float(federation(name, root, 0)[0].sizes.double().mean()))
        for name in FEDERATIONS
    }
    results |= {"examples": examples, "runs": [], "whole_client": []}
    for name in FEDERATIONS:
        for seed in range(seeds):
            for row in runs(name, root, seed):
                results["runs"].append(row)
                print(json.dumps(row), flush=True)
            results["whole_client"] += whole_client(name, root, seed)
    write_results(RESULTS, results)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    measure(args.data_root, args.seeds)


if __name__ == "__main__":
    main()
