"""The share of clients that a method serves worse than a baseline does."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from fedclade.analysis.significance import Measured

BASELINES = ("fedavg", "local")


def shares_hurt(measured: Sequence[Measured]) -> dict[str, dict[str, float]]:
    """For each baseline that was run: the percentage of clients whose accuracy is lower than with
    the baseline (or whose loss is higher, where targets are numbers), for each other title; the
    mean over the seeds.

    Runs are compared on the same clients at the same seed. A baseline that was run with several
    settings is left out.

    Args:
        measured: the finished runs.
    """
    return {
        baseline: shares
        for baseline in BASELINES
        if (shares := _against(baseline, measured)) is not None
    }


def _against(baseline: str, measured: Sequence[Measured]) -> dict[str, float] | None:
    base_runs = [
        run
        for run in measured
        if run.summary["method"] == baseline and "loss_shared" not in run.summary
    ]
    if len({run.title for run in base_runs}) != 1:
        return None
    shares: dict[str, list[float]] = {}
    for run in measured:
        for base in base_runs:
            is_pair = (run.seed, run.federation) == (base.seed, base.federation)
            if run.title != base.title and is_pair and (share := _share(run, base)) is not None:
                shares.setdefault(run.title, []).append(share)
    return {title: statistics.fmean(values) for title, values in shares.items()} or None


def _share(run: Measured, base: Measured) -> float | None:
    """The percentage of clients that have both values and a worse one in `run`."""
    measure = "accuracy" if run.summary["accuracy"] is not None else "loss"
    sign = 1 if measure == "accuracy" else -1
    pairs = [
        (sign * own, sign * other)
        for own, other in zip(run.clients[measure], base.clients[measure], strict=True)
        if own is not None and other is not None and math.isfinite(own) and math.isfinite(other)
    ]
    return 100 * sum(own < other for own, other in pairs) / len(pairs) if pairs else None
