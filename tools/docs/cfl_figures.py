"""Figures of CFL's studies as PNG, from results/methods/cfl/ (benchmarks/cfl_studies.py).

python tools/docs/cfl_figures.py --out FOLDER [--results results/methods/cfl]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from fedclade.io.compact_json import read_results

RESULTS = Path(__file__).resolve().parents[2] / "results" / "methods" / "cfl"


def congruence(study: dict[str, Any]) -> Figure:
    """The lengths of updates of two clients by round."""
    pairs = {name: curves for name, curves in study.items() if isinstance(curves, dict)}
    figure, axes = plt.subplots(1, len(pairs), figsize=(4 * len(pairs), 3.6), sharey=True)
    for axis, (name, curves) in zip(axes, pairs.items(), strict=True):
        for kind, label in (("mean", "‖mean Δθ‖"), ("max", "max ‖Δθ_i‖")):
            axis.loglog(range(1, len(curves[kind]) + 1), curves[kind], label=label)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("round")
        axis.legend()
    return figure


def separation_gap(series: dict[str, list[dict[str, Any]]], label: str) -> Figure:
    """The separation gap of updates and of gradients, mean and standard deviation over seeds."""
    figure, axis = plt.subplots(figsize=(5, 3.6))
    for kind in ("updates", "gradients"):
        values = np.array([[run[kind]["gap"] for run in runs] for runs in series.values()])
        x = [int(number) for number in series]
        axis.errorbar(x, values.mean(1), values.std(1), label=kind, capsize=2)
    axis.axhline(0, color="gray", linewidth=0.5)
    axis.set(xlabel=label, ylabel="separation gap g(α)")
    axis.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    study = {
        name: read_results(args.results / f"{name}.json")
        for name in ("congruence", "points", "rounds")
    }
    figures = {
        "congruence": congruence(study["congruence"]),
        "gap_by_points": separation_gap(study["points"]["points"], "data points per client"),
        "gap_by_rounds": separation_gap(study["rounds"]["rounds"], "round"),
    }
    args.out.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.tight_layout()
        figure.savefig(args.out / f"{name}.png", dpi=120)


if __name__ == "__main__":
    main()
