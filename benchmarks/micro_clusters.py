"""Clade's groups by micro-clusters and by the exact tree: false positives, power and
agreement.

python benchmarks/micro_clusters.py [--clients 500 10000] [--out results/micro_clusters.json]

Whitened means of clients with log-normal sizes (σ = 1), in 16 and 128 dimensions: noise, two groups
(with half or a tenth of the clients in the second) at distances from too small for both algorithms
to large, and ten groups. `strength` is the mean size times the squared distance between groups.
With 10,000 clients the constants are those of the package; with fewer, they are in proportion, but
a block has at least 25 clients. The rows with "passes": 3 divide the constants by 10, so 10,000
clients go through three passes, as 100,000 clients do. `differ` counts the runs in which only one
of the two algorithms found groups. Rows of other numbers of clients, and other parts, stay in the
file.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score
from threadpoolctl import threadpool_limits

from fedclade.clustering import clade
from fedclade.io.compact_json import read_results, write_results
from fedclade.io.environment_info import environment_info

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
Found = tuple[Labels, float]  # and the processor time
SEEDS = {50: 100, 500: 40, 2_000: 20, 10_000: 2}
STRENGTHS = {10_000: (10, 20, 80)}  # others: the ones below
ALL_STRENGTHS = (10, 20, 40, 80, 160)
DIMENSIONS = {10_000: (128,)}
ALL_DIMENSIONS = (16, 128)


def planted(
    clients: int, dimensions: int, groups: int, share: float, strength: float, seed: int
) -> tuple[Array, Array, NDArray[np.int64]]:
    """Means, sizes and true groups. `share` is that of the second of two groups."""
    rng = np.random.default_rng([seed, clients, dimensions])
    size = np.floor(rng.lognormal(4, 1, clients)) + 10
    means = rng.normal(size=(clients, dimensions)) / np.sqrt(size)[:, None]
    truth = (
        (rng.random(clients) < share).astype(np.int64)
        if groups == 2
        else rng.integers(0, groups, clients)
    )
    # The centers are at equal distances from each other.
    center = np.eye(groups, dimensions) * np.sqrt(strength / size.mean() / 2)
    return means + center[truth], size, truth


@contextmanager
def constants(exact_up_to: int, fewest: int, block: int) -> Iterator[None]:
    names = ("EXACT_UP_TO", "_FEWEST", "_BLOCK")
    before = [getattr(clade, name) for name in names]
    for name, value in zip(names, (exact_up_to, fewest, block), strict=True):
        setattr(clade, name, value)
    try:
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(clade, name, value)


def split(means: Array, size: Array, seed: int) -> Found:
    scatter = (size.sum() - len(size)) * np.eye(means.shape[1])
    begin = time.process_time()
    labels = clade.split_group(means, size, scatter, np.random.default_rng(seed))
    return labels, time.process_time() - begin


def compared(
    clients: int, dimensions: int, groups: int, share: float, strength: float
) -> Iterator[dict[str, Any]]:
    """For each number of passes, how often each algorithm found groups, and how well they agree."""
    inputs = [
        planted(clients, dimensions, groups, share, strength, seed)
        for seed in range(SEEDS[clients])
    ]
    with constants(clients, 1, 1):
        exact = [split(means, size, seed) for seed, (means, size, _) in enumerate(inputs)]
    for passes in (1, 3) if clients == 10_000 else (1,):
        scale = clients // (10 if passes == 3 else 1)
        with constants(scale // 2, scale // 4, max(scale // 10, 25)):
            micro = [split(means, size, seed) for seed, (means, size, _) in enumerate(inputs)]
        found = [
            (bool(one.any()), bool(other.any())) for (one, _), (other, _) in pairs(exact, micro)
        ]
        both = [
            adjusted_rand_score(one, other)
            for (one, _), (other, _) in pairs(exact, micro)
            if one.any() and other.any()
        ]
        yield {
            "clients": clients,
            "passes": passes,
            "dimensions": dimensions,
            "groups": groups if strength else 1,
            "share": share,
            "strength": strength,
            "runs": len(inputs),
            "exact found": sum(one for one, _ in found),
            "micro found": sum(other for _, other in found),
            "differ": sum(one != other for one, other in found),
            "mean ARI of both": round(float(np.mean(both)), 4) if both else None,
            "least ARI of both": round(float(np.min(both)), 4) if both else None,
            "ARI of exact": mean_ari(inputs, exact),
            "ARI of micro": mean_ari(inputs, micro),
            "CPU seconds of exact": round(float(np.mean([seconds for _, seconds in exact])), 3),
            "CPU seconds of micro": round(float(np.mean([seconds for _, seconds in micro])), 3),
        }


def pairs(exact: list[Found], micro: list[Found]) -> Iterator[tuple[Found, Found]]:
    return zip(exact, micro, strict=True)


def mean_ari(inputs: list[tuple[Array, Array, Labels]], found: list[Found]) -> float:
    """The mean agreement with the true groups."""
    scores = [
        adjusted_rand_score(truth, labels)
        for (_, _, truth), (labels, _) in zip(inputs, found, strict=True)
    ]
    return round(float(np.mean(scores)), 4)


def noise_tops(clients: int, dimensions: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The mean top cost of three trees of noise, exact and by micro-clusters."""
    _, size, _ = planted(clients, dimensions, 2, 0.5, 0, seed)
    with constants(clients, 1, 1):
        exact = np.mean(list(clade.null_top_heights(size, dimensions, np.random.default_rng(seed))))
    for passes in (1, 3) if clients == 10_000 else (1,):
        scale = clients // (10 if passes == 3 else 1)
        with constants(scale // 2, scale // 4, max(scale // 10, 25)):
            heights = clade.null_top_heights(size, dimensions, np.random.default_rng(seed))
            micro = np.mean(list(heights))
        yield {
            "clients": clients,
            "passes": passes,
            "dimensions": dimensions,
            "exact top": round(float(exact), 2),
            "micro top": round(float(micro), 2),
            "ratio": round(float(micro / exact), 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", choices=SEEDS, default=list(SEEDS))
    parser.add_argument("--tops", action="store_true", help="only the tops of noise trees")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    earlier = read_results(args.out) if args.out and args.out.exists() else {}
    about = {"about": environment_info("cpu")}
    rows = [row for row in earlier.get("points", []) if row["clients"] not in args.clients]
    if args.tops:
        tops = [row for n in args.clients for e in (4, 32, 128) for row in noise_tops(n, e)]
        print(*tops, sep="\n")
        if args.out:
            write_results(args.out, {**earlier, "noise tops": tops})
        return
    for clients in args.clients:
        for dimensions in DIMENSIONS.get(clients, ALL_DIMENSIONS):
            cases = [(2, 0.5, 0)] + [
                (groups, share, strength)
                for groups, share in ((2, 0.5), (2, 0.1), (10, 0.1))
                for strength in STRENGTHS.get(clients, ALL_STRENGTHS)
            ]
            for groups, share, strength in cases:
                for row in compared(clients, dimensions, groups, share, strength):
                    rows.append(row)
                    print(row, flush=True)
                if args.out:
                    write_results(args.out, {**earlier, **about, "points": rows})


if __name__ == "__main__":
    with threadpool_limits(1):
        main()
