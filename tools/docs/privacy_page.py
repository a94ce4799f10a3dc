"""The tables of docs/privacy.md: what methods declare, and results/signature_noise.json,
private_training.json and membership_attack.json (of the benchmarks with these names).

python tools/docs/privacy_page.py [--out docs/privacy.md]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from markdown_table import replace_block, table

from fedclade.io.compact_json import read_results
from fedclade.methods import METHODS
from fedclade.methods.base import NEEDS, Method

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "results" / "signature_noise.json", ROOT / "docs" / "privacy.md"
TRAINING = ROOT / "results" / "private_training.json"
ATTACK = ROOT / "results" / "membership_attack.json"
Row = dict[str, Any]
FEDERATIONS = {
    "quickstart": "`quickstart`: 40 clients of {} digits on average, 30 rounds",
    "scenario1": "MNIST, Scenario 1: 100 clients of {} images on average, 10 rounds",
}
TRAINING_FEDERATIONS = {
    "labels": "five groups of labels",
    "rotation": "four groups, images turned by 0°, 90°, 180° or 270°",
    "dirichlet": "labels by Dirichlet(0.5), no groups",
}
WITH_SECURE_SUMS = {
    "sum": "sums over groups",
    "signatures": "sums over groups, and signatures in clear",
}
OF_IFCA = "sums over groups, how many clients chose each, and at evaluations who"
WITH_SETTING = {
    "scaffold": 'with `weights = "clients"`',
    "clade_groups": "with `signature_epsilon`, for given groups",
    "oracle": "yes, for given groups",
}


def methods_table() -> str:
    return table(
        [
            "method",
            "what leaves a client",
            "the server needs",
            "with `secure_sum` the server sees",
            "`epsilon`",
        ],
        [
            [
                name,
                method.client_disclosure,
                NEEDS[method.server_visibility],
                _secure_sums(name, method()),
                WITH_SETTING.get(name, "no" if method().why_no_client_privacy() else "yes"),
            ]
            for name, method in METHODS.items()
        ],
    )


def _secure_sums(name: str, method: Method) -> str:
    if method.why_no_secure_sum():
        return "refused"
    return OF_IFCA if name == "ifca" else WITH_SECURE_SUMS[method.server_visibility]


def cost_table(results: Row) -> str:
    """A row for each method: with noise of every ε, or, for those without noise, one cell."""
    runs = results["runs"]
    epsilons = list(dict.fromkeys(run["epsilon"] for run in runs))
    heads = ["none" if epsilon is None else f"ε = {epsilon:g}" for epsilon in epsilons]
    lines = []
    for name, title in FEDERATIONS.items():
        lines.append([f"**{title.format(results['examples'][name])}**", *[""] * len(heads)])
        for variant in dict.fromkeys(run["variant"] for run in runs):
            cells = [
                _cell([run for run in runs if _key(run) == (name, variant, epsilon)])
                for epsilon in epsilons
            ]
            lines.append([variant, *cells])
    return table(["", *heads], lines)


def _key(run: Row) -> tuple[str, str, float | None]:
    return run["federation"], run["variant"], run["epsilon"]


def _cell(runs: list[Row]) -> str:
    """Mean ARI and accuracy over seeds."""
    if not runs:
        return ""
    return f"{_mean_ari(runs)}, {np.mean([run['accuracy'] for run in runs]):.1f} %"


def _mean_ari(runs: list[Row]) -> str:
    return f"{round(float(np.mean([run['ari'] for run in runs])), 2) + 0.0:.2f}"  # no "-0.00"


def whole_client_table(results: Row) -> str:
    runs = results["whole_client"]
    epsilons = sorted({run["epsilon"] for run in runs}, reverse=True)
    lines = []
    for name, title in FEDERATIONS.items():
        for k in (1, 5):
            cells = [
                _mean_ari(
                    [
                        run
                        for run in runs
                        if (run["federation"], run["k"], run["epsilon"]) == (name, k, epsilon)
                    ]
                )
                for epsilon in epsilons
            ]
            lines.append([f"{title.split(':')[0]}, k = {k}", *cells])
    return table(["", *(f"ε = {epsilon:g}" for epsilon in epsilons)], lines)


def training_table(results: Row) -> str:
    """Accuracy, and that of the worst tenth of the clients, by ε."""
    runs = results["runs"]
    epsilons = list(dict.fromkeys(run["epsilon"] for run in runs))
    lines = []
    for data, federation in dict.fromkeys((run["data"], run["federation"]) for run in runs):
        here = [run for run in runs if (run["data"], run["federation"]) == (data, federation)]
        seeds = " and ".join(str(seed) for seed in sorted({run["seed"] for run in here}))
        title = f"**{data}: {TRAINING_FEDERATIONS[federation]}; seed {seeds}**"
        lines.append([title, *[""] * len(epsilons)])
        for method in dict.fromkeys(run["method"] for run in here):
            of_method = [run for run in here if run["method"] == method]
            found = f", {_found(of_method)}" if method == "clade_groups" else ""
            cells = []
            for epsilon in epsilons:
                rows = [run for run in of_method if run["epsilon"] == epsilon]
                means = [
                    np.mean([row[key] for row in rows]) for key in ("accuracy", "worst") if rows
                ]
                cells.append("{:.1f} % ({:.1f} %)".format(*means) if rows else "")
            lines.append([method + found, *cells])
        lines.append(["noise multiplier z", *(_noise(here, epsilon) for epsilon in epsilons)])
    return table(["", *("none" if e == "none" else f"ε = {e}" for e in epsilons)], lines)


def _found(runs: list[Row]) -> str:
    """How good the groups are, or how many there are if there is no truth."""
    if runs[0]["ari"] is not None:
        return f"ARI {_mean_ari(runs)}"
    numbers = sorted({run["groups"] for run in runs})
    return f"{' or '.join(map(str, numbers))} groups"


def _noise(runs: list[Row], epsilon: str) -> str:
    found = {run["noise_multiplier"] for run in runs if run["epsilon"] == epsilon} - {None}
    return f"{found.pop():.2f}" if found else ""


def attack_table(results: Row) -> str:
    """How well an attacker tells the clients that took part from others."""
    rows = [
        [
            row["method"],
            "none" if row["epsilon"] is None else f"{row['epsilon']:g}",
            f"{row['auc']:.2f}",
            f"{100 * row['found']:.0f} %",
            f"{row['accuracy']:.1f} %",
        ]
        for row in results["rows"]
    ]
    alarms = f"members found at {100 * results['false_alarms']:.0f} % false alarms"
    return table(["method", "ε", "area under the curve", alarms, "accuracy"], rows)


def page(text: str) -> str:
    results = read_results(RESULTS)
    for name, content in (
        ("methods", methods_table()),
        ("cost", cost_table(results)),
        ("whole client", whole_client_table(results)),
        ("training", training_table(read_results(TRAINING))),
        ("attack", attack_table(read_results(ATTACK))),
    ):
        text = replace_block(text, name, content)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.parse_args().out.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
