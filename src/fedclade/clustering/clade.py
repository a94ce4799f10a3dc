"""Clade's group finding: are there groups at all, how many, and who is in which.

Means of samples are whitened with the pooled scatter within clients, so that one unit is one
standard deviation of sampling noise at n = 1. Size-weighted Ward then merges by the two-sample
statistic itself, and the tree is compared with trees of pure noise.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering.graph import numbered
from fedclade.clustering.linkage import cut_ratio, weighted_ward

Array = NDArray[np.float64]
# A tenth of a percent of the mean variance keeps directions without any variance from being blown
# up.
_RIDGE = 1e-3
_DEGREES_PER_DIMENSION = 8
# Noise trees grow alike for many clients, so that few tell enough.
_MANY_CLIENTS, _RUNS_FEW, _RUNS_MANY = 150, 20, 3


def whitening_matrix(scatter: Array, degrees: float) -> Array:
    """The matrix that gives unit covariance to what has this scatter: z = mean @ whitener."""
    covariance = scatter / degrees
    covariance = covariance + max(_RIDGE * np.trace(covariance) / len(covariance), 1e-12) * np.eye(
        len(covariance)
    )
    return np.linalg.cholesky(np.linalg.inv(covariance))


def null_top_height(size: Array, dimensions: int, rng: np.random.Generator) -> float:
    """The largest top merge cost among trees of clients of these sizes that all come from one
    source.
    """
    runs = _RUNS_FEW if len(size) < _MANY_CLIENTS else _RUNS_MANY
    noise = (rng.normal(size=(len(size), dimensions)) / np.sqrt(size)[:, None] for _ in range(runs))
    return max(float(weighted_ward(z, size)[-1, 2]) for z in noise)


def split(
    mean: Array, size: Array, scatter: Array, rng: np.random.Generator, factor: float = 2.0
) -> NDArray[np.int64]:
    """Groups of clients by their means (M, e), sizes n (M,) and summed within-client scatter (e,
    e); all zeros: no structure.

    There is structure only where the tree's top cost is above `factor` times that of the noise
    trees; then it is cut at the widest ratio between successive costs.
    """
    clients, degrees = len(mean), float(size.sum() - len(mean))
    # A covariance of d dimensions estimated from few samples makes distances look larger, by
    # degrees / (degrees - d). The first numbers of a random projection are a random projection too:
    # as many of them are used as can be whitened well.
    dimensions = min(mean.shape[1], int(degrees / _DEGREES_PER_DIMENSION))
    if clients < 3 or dimensions < 2:
        return np.zeros(clients, np.int64)
    z = mean[:, :dimensions] @ whitening_matrix(scatter[:dimensions, :dimensions], degrees)
    tree = weighted_ward(z, size)
    if tree[-1, 2] <= factor * null_top_height(size, dimensions, rng):
        return np.zeros(clients, np.int64)
    return lloyd_refine(z, size, cut_ratio(tree))


def lloyd_refine(z: Array, size: Array, label: NDArray[np.int64]) -> NDArray[np.int64]:
    """Lloyd's steps from the tree's groups: what was merged early, before the centres were known,
    may move to a nearer one.

    Every step lowers the sum of n |z - mu|^2, so that it ends; a group is never emptied.
    """
    while True:
        share = np.eye(label.max() + 1)[label] * size[:, None]
        centre = share.T @ z / share.sum(0)[:, None]
        nearer = _square_distances(z, centre).argmin(1)
        if (nearer == label).all() or len(np.unique(nearer)) <= label.max():
            return label
        label = nearer


def find_groups(
    mean: Array,
    size: Array,
    scatter_of: Callable[[NDArray[np.int64]], Array],
    seed: int,
    factor: float = 2.0,
) -> NDArray[np.int64]:
    """The group of each client, level by level: every group that was just made is asked again, with
    its own scatter.

    `scatter_of(label)` gives the scatter within clients summed over each group, (groups, e, e):
    with the whole federation's scatter the recursion would go on splitting groups whose covariance
    is smaller than the average.
    """
    label = np.zeros(len(mean), np.int64)
    unasked = [0]
    while unasked:
        scatter = scatter_of(label)
        made: list[int] = []
        for group in unasked:
            who = np.flatnonzero(label == group)
            inner = split(
                mean[who],
                size[who],
                scatter[group],
                np.random.default_rng([seed, len(who), group]),
                factor,
            )
            if inner.any():
                names = np.concatenate([[group], label.max() + 1 + np.arange(inner.max())])
                label[who] = names[inner]
                made += names.tolist()
        unasked = made
    return numbered(label)


def assign_new(
    mean: Array, size: Array, known: Array, known_size: Array, label: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """The group with which each new client would merge at the least cost, all means whitened.

    The cost is Ward's: n_m n_C / (n_m + n_C) |z_m - mu_C|^2, with mu_C and n_C of the known clients
    of group C.
    """
    share = np.eye(count)[label] * known_size[:, None]
    weight = share.sum(0)
    centre = share.T @ known / np.maximum(weight, 1e-12)[:, None]
    ward = size[:, None] * weight / (size[:, None] + weight) * _square_distances(mean, centre)
    found: NDArray[np.int64] = np.where(weight > 0, ward, np.inf).argmin(1)
    return found


def _square_distances(z: Array, centre: Array) -> Array:
    """|z_m - mu_C|^2 of M points (M, e) and K centres (K, e): (M, K), a centre at a time."""
    return np.stack([((z - one) ** 2).sum(1) for one in centre], 1)
