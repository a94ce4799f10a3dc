"""`local.lr = "auto"` against the default learning rate, on six federations.

python benchmarks/learning_rate_search.py [--data-root DIR] [--seeds 3] [--out FILE]

Each federation is trained twice with each seed: with the default of 0.1, and with the learning rate
that short runs on held-out training data choose. Digits has all its clients; of MNIST, 20 of 400
clients with 150 training samples each. Results go to results/methods/learning_rate_search.json,
after each run; a repeated call measures what is missing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fedclade as fc
from fedclade.data import Dirichlet, Iid, LabelClusters, LabelPermutation, LabelSwap, Rotation
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info

RESULTS = Path(__file__).resolve().parents[1] / "results" / "methods" / "learning_rate_search.json"
SETTINGS: dict[str, Any] = {
    "rounds": 60,
    "clients_per_round": 0.5,
    "epochs": 2,
    "batch_size": 10,
    "eval_every": 0,
    "threads": 1,
}
HIDDEN = 64
METHODS: dict[str, tuple[fc.Method, dict[str, Any]]] = {
    "fedavg": (fc.FedAvg(), {}),
    "clade": (fc.Clade(), {}),
    "fedavg, adamw": (fc.FedAvg(), {"optimizer": "adamw"}),
}


def federations(root: str | None, seed: int) -> Iterator[tuple[str, fc.data.Clients]]:
    """The name and the clients of each federation."""
    digits, mnist = fc.data.load("digits"), fc.data.load("mnist", root)
    for name, scheme, clients in (
        ("two digits a client", LabelClusters(clusters=5, classes=2), 40),
        ("label skew, Dirichlet(0.3)", Dirichlet(0.3), 20),
        ("permuted labels", LabelPermutation(), 20),
    ):
        yield f"digits, {name}", fc.data.partition(digits, scheme, clients, seed)
    for name, kind in (("i.i.d.", Iid()), ("swapped labels", LabelSwap()), ("rotated", Rotation())):
        yield f"mnist, {name}", fc.data.partition(mnist, kind, 400, seed).only(range(20))


def measure(clients: fc.data.Clients, name: str, seed: int) -> dict[str, Any]:
    """The accuracy with the default and with the chosen learning rate."""
    method, more = METHODS[name]

    def run(lr: float | None, **changed: Any) -> fc.Result:
        settings: dict[str, Any] = SETTINGS | more | changed
        model = fc.models.MLP(HIDDEN)
        chosen: Any = "auto" if lr is None else lr
        return fc.run(method, clients, model, seed=seed, lr=chosen, **settings)

    default = run(0.1)
    begin = time.perf_counter()
    auto = run(None)
    spent = time.perf_counter() - begin
    return {
        "default": round(default.summary["accuracy"] or 0.0, 2),
        "auto": round(auto.summary["accuracy"] or 0.0, 2),
        "chosen_lr": auto.summary["chosen_lr"],
        # The run with the chosen value is in `spent`, the search is the rest.
        "search_seconds": round(spent - auto.summary["seconds"], 1),
        "run_seconds": auto.summary["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-root")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = read_results(options.out)["rows"]
    done = {(row["federation"], row["method"], row["seed"]) for row in rows}
    settings = SETTINGS | {"model": f"MLP({HIDDEN})"}
    for seed in range(options.seeds):
        for federation, clients in federations(options.data_root, seed):
            for method in METHODS:
                if (federation, method, seed) in done:
                    continue
                numbers = measure(clients, method, seed)
                rows.append({"federation": federation, "method": method, "seed": seed, **numbers})
                print(rows[-1], flush=True)
                about = environment_info()
                write_results(options.out, {"about": about, "settings": settings, "rows": rows})


if __name__ == "__main__":
    main()
