"""Membership inference with and without differential privacy: can the final models tell whether a
client's data were used?

python benchmarks/membership_attack.py --data-root FOLDER [--runs 8]

400 clients of MNIST with 20 images each, in five groups of two classes. In each run a random half
of them are the federation: an MLP of 64 hidden units, 40 rounds of half of its clients, five
epochs, lr 0.1, batches of 10, δ = 10⁻⁴. The attacker has the final models, a client's images, and
the models of the other runs, in which this client was absent or present. The score of a client is
its mean loss in the runs without it minus its loss now; of several group models the least loss
counts. So it knows how hard a client's images are (after LiRA: Carlini et al., Membership Inference
Attacks From First Principles, S&P 2022, offline and without variances).

Results go to results/membership_attack.json; tools/docs/privacy_page.py writes the table.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import fedclade as fc
from fedclade.io.compact_json import write_results
from fedclade.io.environment_info import environment_info

RESULTS = Path(__file__).resolve().parents[1] / "results" / "membership_attack.json"
CLIENTS, IMAGES, DELTA, FALSE_ALARMS = 400, 20, 1e-4, 0.05
METHODS: dict[str, fc.Method] = {
    "fedavg": fc.FedAvg(),
    "clade_groups": fc.CladeGroups(signature_epsilon=3.0),
}
EPSILONS = (None, 8.0, 2.0)
Array = NDArray[np.float64]


def trained(
    clients: fc.data.Clients, method: str, epsilon: float | None, run: int
) -> tuple[Array, NDArray[np.bool_], float]:
    """A run with a random half of the clients: the loss of every client's images, whether each
    client took part, and the mean accuracy.
    """
    member = np.zeros(CLIENTS, np.bool_)
    member[np.random.default_rng([7, run]).permutation(CLIENTS)[: CLIENTS // 2]] = True
    chosen = clients.only(np.flatnonzero(member).tolist())
    result = fc.run(
        METHODS[method],
        chosen,
        fc.models.MLP(64),
        seed=run,
        device="cpu",
        rounds=40,
        clients_per_round=0.5,
        epochs=5,
        eval_every=0,
        privacy=fc.PrivacyConfig(epsilon=epsilon, delta=DELTA),
    )
    groups = [min(members) for members in result.groups.values()]
    losses = np.min([losses_of(result, client, clients) for client in groups], 0)
    return losses, member, float(result.summary["accuracy"])


def losses_of(result: fc.Result, client: int | str, clients: fc.data.Clients) -> Array:
    """The mean loss of each client's images in the model of one client."""
    outputs = result.predict(clients.x, client, kind="output")
    loss = torch.nn.functional.cross_entropy(outputs, clients.y, reduction="none")
    return np.array([float(loss[rows].mean()) for rows in clients.train])


def attack(loss: Array, member: NDArray[np.bool_]) -> tuple[float, float]:
    """The area under the curve of the attack, and the share of members that it finds if it takes
    `FALSE_ALARMS` of the others for members.

    Args:
        loss: (runs, clients) the losses.
        member: (runs, clients) who took part.
    """
    scores = np.empty_like(loss)
    for run in range(len(loss)):
        others = ~member
        others[run] = False
        seen = others.any(0)
        total = np.where(others, loss, 0.0).sum(0) / np.maximum(others.sum(0), 1)
        scores[run] = np.where(seen, total, loss.mean()) - loss[run]
    inside, outside = scores[member], np.sort(scores[~member])
    below = np.searchsorted(outside, inside) + np.searchsorted(outside, inside, "right")
    threshold = np.quantile(outside, 1 - FALSE_ALARMS)
    return float(below.mean() / 2 / len(outside)), float((inside > threshold).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-root", required=True)
    parser.add_argument("--runs", type=int, default=8)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    scheme = fc.data.LabelClusters(clusters=5, classes=2, samples=IMAGES)
    data = fc.data.load("mnist", args.data_root)
    clients = fc.data.partition(data, scheme, clients=CLIENTS, seed=0, probe=None)
    rows: list[dict[str, Any]] = []
    for method in METHODS:
        for epsilon in EPSILONS:
            runs = [trained(clients, method, epsilon, run) for run in range(args.runs)]
            area, found = attack(*(np.stack([run[part] for run in runs]) for part in (0, 1)))
            row = {"method": method, "epsilon": epsilon, "auc": area, "found": found}
            rows.append(row | {"accuracy": float(np.mean([run[2] for run in runs]))})
            print(rows[-1], flush=True)
            content = {"about": environment_info(), "delta": DELTA, "runs": args.runs}
            write_results(RESULTS, content | {"false_alarms": FALSE_ALARMS, "rows": rows})


if __name__ == "__main__":
    main()
