"""What it costs to hide FLT's and Clade's signatures in noise: groups and accuracy by ε; and the
tables of docs/privacy.md.

python benchmarks/signature_noise.py --data-root FOLDER [--seeds 3]    measure; writes
benchmarks/results/signature_noise.json python benchmarks/signature_noise.py --page [--out
docs/privacy.md]    put its numbers, and what methods declare, into the page

Two federations: the preset `quickstart`, and MNIST in FLT's Scenario 1 (100 clients, five groups of
two classes; MLP 200, 20 clients a round, lr 0.01, batches of 10, ten rounds). FOLDER has mnist.npz.
δ = 1e-5 and clip = 1 throughout. Seeds change clients, model and noise.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
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
from fedclade.methods import METHODS
from fedclade.methods._dp_signature import gaussian_sigma
from fedclade.methods.base import NEEDS
from fedclade.methods.flt import FLTState
from fedclade.training import config
from fedclade.training.setup import inject_context

ROOT = Path(__file__).resolve().parent.parent
RESULTS, PAGE = (
    ROOT / "benchmarks" / "results" / "signature_noise.json",
    ROOT / "docs" / "privacy.md",
)
EPSILONS = (None, 10.0, 3.0, 1.0, 0.3)
DELTA = 1e-5
Row = dict[str, Any]
FEDERATIONS = {
    "quickstart": "`quickstart`: 40 clients of {} digits on average, 30 rounds",
    "scenario1": "MNIST, Scenario 1: 100 clients of {} images on average, 10 rounds",
}
# What is told to FLT: nothing (UMAP and γ = 1, its defaults), or the number of groups.
VARIANTS = {
    "Clade": lambda epsilon: fc.Clade(signature_epsilon=epsilon),
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
AGAINST = {
    "nothing": "nothing leaves",
    "sum": "all that is summed",
    "signatures": "the weights, not the signatures",
    "updates": "not the models, which it looks at one by one",
    "probe": "not the models that it looks at one by one",
}


def federation(
    name: str, root: str | None, seed: int
) -> tuple[fc.data.Clients, fc.models.ModelSpec, dict[str, Any]]:
    """Clients, model, and how they train."""
    if name == "quickstart":
        chosen = config.experiment(config.apply(config.read("quickstart"), [f"run.seed={seed}"]))
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
        kept = {key: summary[key] for key in ("clusters", "ari", "accuracy", "accuracy_stderr")}
        yield {"federation": name, "seed": seed, "variant": variant, "epsilon": epsilon, **kept}


def whole_client(name: str, root: str | None, seed: int) -> Iterator[Row]:
    """FLT's k centres, hidden at the level of the whole client: any data of it against any other,
    so that the sensitivity is 2 · clip.
    """
    clients, *_ = federation(name, root, seed)
    key = fold_in(seed, "init")
    for k in (1, 5):
        method = inject_context(fc.FLT(k=k, fine_tune="none", manifold="none"), clients.metadata, seed)
        state = method.init(fc.Simulator(clients), {"w": torch.zeros(1)}, key)
        assert isinstance(state, FLTState)
        centres, counts = state.centres.double().numpy(), state.counts.numpy()
        centres = centres / np.linalg.norm(centres, axis=(1, 2), keepdims=True).clip(1)
        for epsilon in (100.0, *EPSILONS[1:]):
            noise = (
                2
                * gaussian_sigma(epsilon, DELTA)
                * np.random.default_rng([seed, k]).normal(size=centres.shape)
            )
            groups, _ = cluster_signatures(
                centres + noise, counts, "none", "matching", "threshold", 1.0, clusters=5, seed=0
            )
            ari = float(adjusted_rand_score(clients.groups, groups))
            yield {"federation": name, "seed": seed, "k": k, "epsilon": epsilon, "ari": ari}


def measure(root: str | None, seeds: int) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "manifold")
    found: dict[str, Any] = {
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
    found |= {"examples": examples, "runs": [], "whole_client": []}
    for name in FEDERATIONS:
        for seed in range(seeds):
            for row in runs(name, root, seed):
                found["runs"].append(row)
                print(json.dumps(row), flush=True)
            found["whole_client"] += whole_client(name, root, seed)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def mean_ari(rows: list[Row]) -> str:
    return (  # + 0.0: no "-0.00"
        f"{round(float(np.mean([row['ari'] for row in rows])), 2) + 0.0:.2f}"
    )


def cell(rows: list[Row]) -> str:
    """Mean ARI and accuracy over seeds."""
    return f"{mean_ari(rows)}, {np.mean([row['accuracy'] for row in rows]):.1f} %"


def cost_table(found: dict[str, Any]) -> str:
    heads = ["none" if epsilon is None else f"ε = {epsilon:g}" for epsilon in EPSILONS]
    lines = [f"| | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    for name, title in FEDERATIONS.items():
        rows = [row for row in found["runs"] if row["federation"] == name]
        lines.append(f"| **{title.format(found['examples'][name])}** |" + " |" * len(heads))
        for variant in VARIANTS:
            cells = [
                cell(
                    [row for row in rows if row["variant"] == variant and row["epsilon"] == epsilon]
                )
                for epsilon in EPSILONS
            ]
            lines.append(f"| {variant} | {' | '.join(cells)} |")
        for reference in REFERENCES:
            lines.append(
                f"| {reference} | {cell([row for row in rows if row['variant'] == reference])} |"
                + " |" * (len(heads) - 1)
            )
    return "\n".join(lines)


def whole_client_table(found: dict[str, Any]) -> str:
    epsilons = sorted({row["epsilon"] for row in found["whole_client"]}, reverse=True)
    lines = [
        f"| | {' | '.join(f'ε = {epsilon:g}' for epsilon in epsilons)} |",
        "| --- |" + " --- |" * len(epsilons),
    ]
    for name, title in FEDERATIONS.items():
        for k in (1, 5):
            rows = [
                row for row in found["whole_client"] if row["federation"] == name and row["k"] == k
            ]
            cells = [
                mean_ari([row for row in rows if row["epsilon"] == epsilon]) for epsilon in epsilons
            ]
            lines.append(f"| {title.split(':')[0]}, k = {k} | {' | '.join(cells)} |")
    return "\n".join(lines)


def methods_table() -> str:
    lines = [
        "| method | what leaves a client | the server needs | secure aggregation could hide |",
        "| --- | --- | --- | --- |",
    ]
    return "\n".join(
        [
            *lines,
            *(
                f"| {name} | {it.client_disclosure} | {NEEDS[it.server_visibility]} |"
                f" {AGAINST[it.server_visibility]} |"
                for name, it in METHODS.items()
            ),
        ]
    )


def page(out: Path) -> None:
    """The page with its tables made anew, each between two comments that name it."""
    text, found = PAGE.read_text(), json.loads(RESULTS.read_text())
    for name, table in (
        ("methods", methods_table()),
        ("cost", cost_table(found)),
        ("whole client", whole_client_table(found)),
    ):
        begin, end = f"<!-- table: {name} -->", "<!-- end -->"
        text = re.sub(
            f"(?s){begin}.*?{end}", lambda _, whole=f"{begin}\n{table}\n{end}": whole, text
        )
    out.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--out", type=Path, default=PAGE)
    given = parser.parse_args()
    if given.page:
        page(given.out)
    else:
        measure(given.data_root, given.seeds)


if __name__ == "__main__":
    main()
