"""Clade's clustering: are there groups at all, how many, and which clients are in which.

Sample means are whitened with the pooled within-client scatter, so one unit is one standard
deviation of the sampling noise at n = 1. Size-weighted Ward then merges by the two-sample statistic
itself, and the tree is compared with trees of pure noise.

With differential privacy a client adds noise of variance v to each number of its sum, which is
v / n² in its mean. Then n times the covariance of the mean of n samples is Σ + v/n · I, with Σ the
covariance of the samples: unlike sampling noise alone, it depends on the client's size.
`effective_sizes` and `scatter_with_noise` correct for it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering.linkage import cut_ratio, weighted_ward

Array = NDArray[np.float64]
Labels = NDArray[np.int64]

# A tenth of a percent of the mean variance: keeps directions without variance from being amplified.
_RIDGE = 1e-3
_DEGREES_PER_DIMENSION = 8
# With many clients the noise trees differ little, so a few are enough.
_MANY_CLIENTS, _RUNS_FEW, _RUNS_MANY = 150, 20, 3


def whitening_matrix(scatter: Array, degrees: float) -> Array:
    """The matrix W for which the rows of x @ W have unit covariance, if x has this scatter."""
    covariance = scatter / degrees
    covariance = covariance + max(_RIDGE * np.trace(covariance) / len(covariance), 1e-12) * np.eye(
        len(covariance)
    )
    return np.linalg.cholesky(np.linalg.inv(covariance))


def null_top_height(size: Array, dimensions: int, rng: np.random.Generator) -> float:
    """The largest top merge cost among trees of clients of these sizes that all have the same
    distribution.
    """
    runs = _RUNS_FEW if len(size) < _MANY_CLIENTS else _RUNS_MANY
    noise = (rng.normal(size=(len(size), dimensions)) / np.sqrt(size)[:, None] for _ in range(runs))
    return max(float(weighted_ward(z, size)[-1, 2]) for z in noise)


def split_group(
    mean: Array, size: Array, scatter: Array, rng: np.random.Generator, noise_ratio: float = 2.0
) -> Labels:
    """Clusters of one group's clients by their means (M, e), sizes n (M,) and summed within-client
    scatter (e, e); all zeros if there is no structure.

    There is structure only if the tree's top cost is above `noise_ratio` times that of the noise
    trees. The tree is then cut at the widest ratio between successive costs.
    """
    clients, degrees = len(mean), float(size.sum() - len(mean))
    # A covariance of d dimensions estimated from few samples makes distances larger by a factor of
    # degrees / (degrees - d). The first numbers of a random projection are a random projection too,
    # so only as many are used as can be whitened well.
    dimensions = min(mean.shape[1], int(degrees / _DEGREES_PER_DIMENSION))
    if clients < 3 or dimensions < 2:
        return np.zeros(clients, np.int64)
    z = mean[:, :dimensions] @ whitening_matrix(scatter[:dimensions, :dimensions], degrees)
    tree = weighted_ward(z, size)
    if tree[-1, 2] <= noise_ratio * null_top_height(size, dimensions, rng):
        return np.zeros(clients, np.int64)
    return lloyd_refine(z, size, cut_ratio(tree))


def lloyd_refine(z: Array, size: Array, labels: Labels) -> Labels:
    """Lloyd's steps from the tree's clusters: a client that was merged early may move to a nearer
    centre.

    Every step lowers the sum of n |z - mu|^2, so the loop ends. No cluster becomes empty.
    """
    while True:
        share = np.eye(labels.max() + 1)[labels] * size[:, None]
        centre = share.T @ z / share.sum(0)[:, None]
        nearest = _square_distances(z, centre).argmin(1)
        if (nearest == labels).all() or len(np.unique(nearest)) <= labels.max():
            return labels
        labels = nearest


def split_groups(
    mean: Array,
    size: Array,
    scatter: Array,
    labels: Labels,
    candidates: list[int],
    seed: int,
    noise_ratio: float = 2.0,
) -> tuple[Labels, list[int]]:
    """One level of the search: try to split each of the groups `candidates`.

    Returns the new labels (M,) and the groups that were formed, the candidates of the next level.
    `scatter` (groups, e, e) is the within-client scatter summed over each group of `labels`: with
    the scatter of all clients, groups whose covariance is below average would be split further and
    further.
    """
    labels, formed = labels.copy(), list[int]()
    for group in candidates:
        members = np.flatnonzero(labels == group)
        rng = np.random.default_rng([seed, len(members), group])
        inner = split_group(mean[members], size[members], scatter[group], rng, noise_ratio)
        if inner.any():
            names = np.concatenate([[group], labels.max() + 1 + np.arange(inner.max())])
            labels[members] = names[inner]
            formed += names.tolist()
    return labels, formed


def assign_new(
    mean: Array, size: Array, known: Array, known_size: Array, labels: Labels, groups: int
) -> Labels:
    """For each new client the group with which it would merge at the least cost, all means
    whitened.

    The cost is Ward's: n_m n_C / (n_m + n_C) |z_m - mu_C|^2, with mu_C and n_C of the known clients
    of group C.
    """
    share = np.eye(groups)[labels] * known_size[:, None]
    weight = share.sum(0)
    centre = share.T @ known / np.maximum(weight, 1e-12)[:, None]
    ward = size[:, None] * weight / (size[:, None] + weight) * _square_distances(mean, centre)
    nearest: Labels = np.where(weight > 0, ward, np.inf).argmin(1)
    return nearest


def _square_distances(z: Array, centres: Array) -> Array:
    """|z_m - mu_C|^2 of M points (M, e) and K centres (K, e): (M, K), one centre at a time."""
    return np.stack([((z - centre) ** 2).sum(1) for centre in centres], 1)


def effective_sizes(size: Array, scatter: Array, variance: float) -> Array:
    """Weights of the means, in place of the sizes n: inversely proportional to a mean's squared
    error, with the same sum as `size`.

    `scatter` (e, e) is that of the samples within clients. With b = tr Σ / e the mean squared error
    of a number is b/n + v/n².
    """
    if not variance:
        return size
    weight = size / (1 + variance / (_mean_variance(size, scatter) * size))
    return np.asarray(weight * (size.sum() / weight.sum()))


def scatter_with_noise(
    scatter: Array, size: Array, variance: float, labels: Labels | None = None
) -> Array:
    """The scatter (K, e, e) that belongs to the effective sizes, from the samples' scatter of each
    group, as clients report it.

    Divided by the sum of the group's effective sizes less the number of its clients, it is the mean
    over clients of effective size times covariance of the mean: with r = v / (b n) the mean of
    (Σ + b r I) / (1 + r), up to a factor. Negative eigenvalues of Σ, which come from noise, become
    0.
    """
    if not variance:
        return scatter
    labels = np.zeros(len(size), np.int64) if labels is None else labels
    total = scatter.sum(0)
    weight, b = effective_sizes(size, total, variance), _mean_variance(size, total)
    result = np.empty_like(scatter)
    for group, own in enumerate(scatter):
        members = labels == group
        n, w = size[members], weight[members]
        values, vectors = np.linalg.eigh(own / max(1.0, n.sum() - len(n)))
        share = 1 / (1 + variance / (b * n))
        factor = w.sum() / (n * share).sum()
        values = factor * (share.mean() * np.maximum(values, 0) + (1 - share.mean()) * b)
        result[group] = (vectors * values) @ vectors.T * (w.sum() - len(w))
    return result


def _mean_variance(size: Array, scatter: Array) -> float:
    """b: the mean variance of a sample's numbers, above 0."""
    variance = float(np.trace(scatter)) / len(scatter) / max(1.0, float(size.sum()) - len(size))
    return max(variance, 1e-12)
