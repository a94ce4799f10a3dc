"""How much clients differ in their class shares, and which groups differ in nothing else."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering.graph import canonical_labels

Array = NDArray[np.float64]
Labels = NDArray[np.int64]

# Standard errors by which class shares must differ before a client's own are used.
_SURE = 3.0
_MANY_GROUPS, _RUNS_FEW, _RUNS_MANY = 50, 20, 3
_NO_CLASS_IN_COMMON = 1e300


def concentration(
    counts: Array, same_class: float, counts_squared: float, n_squared: float, noise: float
) -> float:
    """κ of the Dirichlet distribution Dir(κ π) of the clients' class shares, by moments; infinite
    if they differ by chance alone.

    Two samples of one client are of one class with the chance S = Q + (1 - Q) / (κ + 1). Q is that
    chance for samples of two clients.

    Args:
        counts: (C,) the samples of each class, n_c.
        same_class: Σ_i n_i s_i, where s_i is the chance that two samples of client i are of one
            class.
        counts_squared: Σ_i Σ_c n_ic².
        n_squared: Σ_i n_i².
        noise: Σ_i n_i / (n_i - 1).
    """
    n = float(counts.sum())
    share = counts / n
    q = (float((counts**2).sum()) - counts_squared) / max(1.0, n * n - n_squared)
    spread = max(1e-12, 1 - q)
    correlation = (same_class / n - q) / spread
    p2, p3 = float((share**2).sum()), float((share**3).sum())
    error = math.sqrt(max(0.0, 2 * (p2 - 2 * p3 + p2 * p2)) * noise) / n / spread
    if correlation <= _SURE * error:
        return math.inf
    correlation = min(correlation, 0.999)
    return (1 - correlation) / correlation


def merge_by_class_means(
    counts: Array, sums: Array, whitener: Array, seed: int, noise_ratio: float = 2.0
) -> Labels:
    """Merge groups whose class-conditional means agree on the classes that they have in common.
    Such groups differ in their class shares alone.

    Groups are merged bottom-up, those that differ least first and those without a class in common
    last. All merges are undone from the first one that costs more than `noise_ratio` times the
    largest cost in trees of noise with the same counts.

    Args:
        counts: (K, C) the samples of each class in each group.
        sums: (K, C, d) the sums of their features.
        whitener: (d, d) whitens the scatter within classes.
        seed: the seed of the noise.
        noise_ratio: how far above the noise a cost must be.

    Returns:
        (K,) the merged group of each group.
    """
    rng, groups = np.random.default_rng(seed), len(counts)
    runs = _RUNS_FEW if groups < _MANY_GROUPS else _RUNS_MANY
    null_top = max(
        _merges(counts, rng.normal(size=sums.shape) * np.sqrt(counts)[:, :, None])[1].max()
        for _ in range(runs)
    )
    merges, costs = _merges(counts, sums @ whitener)
    labels = np.arange(groups)
    allowed = np.maximum.accumulate(costs) <= noise_ratio * null_top
    for (a, b), is_allowed in zip(merges, allowed, strict=True):
        if is_allowed:
            labels[labels == b] = a
    return canonical_labels(labels)


def _merges(counts: Array, sums: Array) -> tuple[list[tuple[int, int]], Array]:
    """The merges of a tree of groups, and their costs; 0 for groups without a class in common."""
    counts, sums, groups = counts.astype(np.float64), sums.copy(), len(counts)
    cost = np.full((groups, groups), np.inf)
    for a in range(groups - 1):
        cost[a, a + 1 :] = _costs(counts, sums, a, np.arange(a + 1, groups))
    merges, costs = [], []
    for _ in range(groups - 1):
        a, b = (int(place) for place in np.unravel_index(cost.argmin(), cost.shape))
        merges.append((a, b))
        costs.append(0.0 if cost[a, b] >= _NO_CLASS_IN_COMMON else float(cost[a, b]))
        counts[a] += counts[b]
        sums[a] += sums[b]
        cost[b, :] = cost[:, b] = np.inf
        others = np.flatnonzero(np.isfinite(np.minimum(cost[a], cost[:, a])))
        if len(others):
            cost[np.minimum(a, others), np.maximum(a, others)] = _costs(counts, sums, a, others)
    return merges, np.array(costs)


def _costs(counts: Array, sums: Array, group: int, others: NDArray[np.int64]) -> Array:
    """How much the class-conditional means of a group differ from those of others: the mean over
    the classes c in common of n_ac n_bc / (n_ac + n_bc) |μ_ac - μ_bc|² / d. It is about 1 if
    p(x | y) is the same.
    """
    common = (counts[group] > 1) & (counts[others] > 1)
    total = np.maximum(counts[group] + counts[others], 1)
    weight = np.where(common, counts[group] * counts[others] / total, 0.0)
    difference = (
        sums[group] / np.maximum(counts[group], 1)[:, None]
        - sums[others] / np.maximum(counts[others], 1)[:, :, None]
    )
    mean = (weight * (difference**2).mean(2)).sum(1) / np.maximum(common.sum(1), 1)
    return np.where(common.any(1), mean, _NO_CLASS_IN_COMMON)
