"""Clade's clustering: whether there are groups, how many, and the group of each client.

Sample means are whitened with the pooled within-client scatter, so one unit is one standard
deviation of the sampling noise at n = 1. Size-weighted Ward linkage merges by the two-sample
statistic, and the tree is compared with trees of pure noise. Above 5,000 clients the leaves of all
these trees are micro-clusters, so no matrix has a row and a column for each client.

With differential privacy a client adds noise of variance v to each number of its sum, which is
v / n² in its mean. With Σ the covariance of the samples, n times the covariance of the mean of n
samples is then Σ + v/n · I. Unlike sampling noise alone, it depends on the client's size.
`effective_sizes` and `scatter_with_noise` correct for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering.linkage import LinkageMatrix, cut_ratio, micro_clusters, weighted_ward

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
Bools = NDArray[np.bool_]

# A tenth of a percent of the mean variance: directions without variance are not amplified.
_RIDGE = 1e-3
_DEGREES_PER_DIMENSION = 8
# Of the largest eigenvalue of a scatter; the rounding of float32 leaves about 1e-8.
_LEAST_EIGENVALUE = 1e-6
# With many clients the noise trees differ little, so a few are enough.
_MANY_CLIENTS, _RUNS_FEW, _RUNS_MANY = 150, 20, 3
# Up to this number of clients a leaf of a tree is a client; beyond, a micro-cluster.
EXACT_UP_TO = 5000
# A pass leaves a quarter of the leaves, and at least `_FEWEST`. A block that keeps 250 of 1,000 has
# room for the clusters of about a hundred groups.
_MERGED, _FEWEST, _BLOCK = 4, 2500, 1000
_EDGE = 1.1  # how far above its limit the largest eigenvalue of noise may be by chance
_ROUNDING = 1e-6  # of an eigenvalue; a height is the sum of up to 1e5 numbers of float64
_ROWS = 8192  # of clients whose distances to all centers are computed in one step


def whitening_matrix(scatter: Array, degrees: float) -> Array:
    """The matrix W (e, e) for which the rows of x @ W have unit covariance.

    Args:
        scatter: (e, e) the scatter of x, its summed outer products around the mean.
        degrees: the degrees of freedom: scatter / degrees is the covariance.
    """
    covariance = scatter / degrees
    covariance = covariance + max(_RIDGE * np.trace(covariance) / len(covariance), 1e-12) * np.eye(
        len(covariance)
    )
    return np.linalg.cholesky(np.linalg.inv(covariance))


def rank(scatter: Array) -> int:
    """The number of dimensions in which samples differ.

    Args:
        scatter: (e, e) their scatter.
    """
    eigenvalues = np.linalg.eigvalsh(scatter)
    return int((eigenvalues > _LEAST_EIGENVALUE * max(eigenvalues[-1], 0.0)).sum())


def null_top_heights(
    size: Array, dimensions: int, rng: np.random.Generator, least: float = 0.0
) -> Iterator[float]:
    """The top merge costs of several trees of clients without groups, one tree at a time.

    Args:
        size: (M,) the sizes n of the clients.
        dimensions: the numbers of a mean.
        rng: draws the noise.
        least: the height of interest. Trees that are certainly lower are left out, which saves
            most of the time where groups are clear.
    """
    for _ in range(_RUNS_FEW if len(size) < _MANY_CLIENTS else _RUNS_MANY):
        noise = rng.normal(size=(len(size), dimensions))
        noise /= np.sqrt(size)[:, None]
        if _largest_scatter(noise, size) / dimensions * (1 + _ROUNDING) >= least:
            yield float(_tree(noise, size, rng)[0][-1, 2])


def _largest_scatter(z: Array, size: Array) -> float:
    """The largest eigenvalue of the clients' scatter, the sum of n |z - mean|² in one direction.

    No merge of the tree costs more, times the dimensions: the cost is the scatter between two parts
    of the clients, which lies in one direction, and no part has more scatter than all clients.
    """
    deviation = np.sqrt(size)[:, None] * (z - size @ z / size.sum())
    largest: float = np.linalg.eigvalsh(deviation.T @ deviation)[-1]
    return largest


def _is_noise(z: Array, size: Array) -> bool:
    """Whether the means vary no more in any direction than those of clients without groups, whose
    scatter has eigenvalues up to (sqrt(M) + sqrt(e))².

    This holds for samples of any distribution; the height of a tree does not. With 25,000 equal
    clients of 20 samples it was 1.7 times that of Gaussian noise, and above twice in one of four
    groups of this size.
    """
    clients, dimensions = z.shape
    edge = (np.sqrt(clients) + np.sqrt(dimensions)) ** 2
    return bool(_largest_scatter(z, size) <= _EDGE * edge)


def _tree(z: Array, size: Array, rng: np.random.Generator) -> tuple[LinkageMatrix, Labels]:
    """Ward's tree, and the leaf of each client: the client, or its micro-cluster if there are more
    than `EXACT_UP_TO` clients.
    """
    leaf, center, weight = np.arange(len(z)), z, size
    while len(center) > EXACT_UP_TO:
        clusters = max(len(center) // _MERGED, _FEWEST)
        micro = micro_clusters(center, weight, clusters, _BLOCK, rng)
        center, weight = _centers(center, weight, micro, int(micro.max()) + 1)
        leaf = micro[leaf]
    return weighted_ward(center, weight), leaf


def split_group(
    mean: Array, size: Array, scatter: Array, rng: np.random.Generator, noise_ratio: float = 2.0
) -> Labels:
    """Split the clients of one group into clusters, if there is structure.

    There is structure if the top cost of the tree is above `noise_ratio` times that of the noise
    trees. More than `EXACT_UP_TO` clients must also vary more than noise in some direction; most
    groups then need no tree. The tree is cut at the largest ratio between successive costs.

    Args:
        mean: (M, e) the means of the clients.
        size: (M,) their sizes n.
        scatter: (e, e) their summed within-client scatter.
        rng: draws the noise trees.
        noise_ratio: how far above the noise the top cost must be.

    Returns:
        (M,) the cluster of each client; all zeros if there is no structure.
    """
    clients, degrees = len(mean), float(size.sum() - len(mean))
    # A covariance of d dimensions that is estimated from few samples makes distances larger by a
    # factor of degrees / (degrees - d). So only the first numbers are used, as many as can be
    # whitened well: the first numbers of a random projection are a random projection too. A small
    # model has gradients of fewer dimensions than a signature; noise in all of them would hide the
    # groups.
    dimensions = min(rank(scatter), int(degrees / _DEGREES_PER_DIMENSION))
    if clients < 3 or dimensions < 2:
        return np.zeros(clients, np.int64)
    z = mean[:, :dimensions] @ whitening_matrix(scatter[:dimensions, :dimensions], degrees)
    if clients > EXACT_UP_TO and _is_noise(z, size):
        return np.zeros(clients, np.int64)
    tree, leaf = _tree(z, size, rng)
    top = float(tree[-1, 2])
    # One noise tree that is high enough decides: most groups need no more.
    heights = null_top_heights(size, dimensions, rng, least=top / noise_ratio)
    if any(top <= noise_ratio * height for height in heights):
        return np.zeros(clients, np.int64)
    return lloyd_refine(z, size, cut_ratio(tree)[leaf])


def lloyd_refine(z: Array, size: Array, labels: Labels) -> Labels:
    """Lloyd's steps from the tree's clusters: a client that was merged early may move to a nearer
    center.

    Every step lowers the sum of n |z - mu|^2, so the loop ends. No cluster becomes empty.

    Args:
        z: (M, e) the whitened means.
        size: (M,) the sizes n.
        labels: (M,) the clusters to start from.
    """
    while True:
        center, _ = _centers(z, size, labels, int(labels.max()) + 1)
        nearest = _nearest_center(z, center)
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

    Args:
        mean: (M, e) the means of the clients.
        size: (M,) their sizes n.
        scatter: (groups, e, e) the within-client scatter, summed over each group of `labels`. With
            the scatter of all clients, groups with a covariance below average would be split again
            and again.
        labels: (M,) the group of each client.
        candidates: the groups to split.
        seed: the seed of the noise trees.
        noise_ratio: see `split_group`.

    Returns:
        (M,) the new labels, and the new groups: the candidates of the next level.
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
    """For each new client the group with which it would merge at the least cost.

    The cost is Ward's: n_m n_C / (n_m + n_C) |z_m - mu_C|^2, where mu_C and n_C are the mean and
    the size of the known clients of group C.

    Args:
        mean: (M, e) the whitened means z_m of the new clients.
        size: (M,) their sizes n_m.
        known: (N, e) the whitened means of the known clients.
        known_size: (N,) their sizes.
        labels: (N,) their groups.
        groups: the number of groups.
    """
    center, weight = _centers(known, known_size, labels, groups)
    nearest = np.empty(len(mean), np.int64)
    for rows in _row_blocks(len(mean)):
        n = size[rows, None]
        ward = n * weight / (n + weight) * _square_distances(mean[rows], center)
        nearest[rows] = np.where(weight > 0, ward, np.inf).argmin(1)
    return nearest


def _centers(z: Array, size: Array, labels: Labels, groups: int) -> tuple[Array, Array]:
    """The mean (groups, e) and the size (groups,) of each group; 0 of an empty one."""
    if len(z) <= EXACT_UP_TO:
        share: Any = np.eye(groups)[labels] * size[:, None]
    else:
        from scipy.sparse import csr_array  # a node's process imports no scipy

        share = csr_array((size, labels, np.arange(len(z) + 1)), shape=(len(z), groups))
    weight = np.asarray(share.sum(0))
    return share.T @ z / np.maximum(weight, 1e-12)[:, None], weight


def _nearest_center(z: Array, center: Array) -> Labels:
    """(M,) the nearest center of each point."""
    if len(z) <= EXACT_UP_TO:
        return np.asarray(_square_distances(z, center).argmin(1))
    squares, nearest = (center**2).sum(1), np.empty(len(z), np.int64)
    for rows in _row_blocks(len(z)):
        nearest[rows] = (squares - 2 * z[rows] @ center.T).argmin(1)
    return nearest


def _row_blocks(rows: int) -> list[slice]:
    return [slice(start, start + _ROWS) for start in range(0, rows, _ROWS)]


def _square_distances(z: Array, centers: Array) -> Array:
    """(M, K): |z_m - mu_C|^2 of M points (M, e) and K centers (K, e), one center at a time."""
    return np.stack([((z - center) ** 2).sum(1) for center in centers], 1)


def effective_sizes(size: Array, scatter: Array, variance: float) -> Array:
    """Weights (M,) of the means to use instead of the sizes n: inversely proportional to the mean
    squared error of a mean, with the same sum as `size`.

    With b = tr Σ / e, the mean squared error of a number is b/n + v/n².

    Args:
        size: (M,) the sizes n.
        scatter: (e, e) the scatter of the samples within clients.
        variance: v, the variance of the noise in each number of a client's sum.
    """
    if not variance:
        return size
    weight = size / (1 + variance / (_mean_variance(size, scatter) * size))
    return np.asarray(weight * (size.sum() / weight.sum()))


def scatter_of_all(scatter: Array, size: Array, labels: Labels, has_answered: Bools) -> Array:
    """The scatter (K, e, e) of all clients of each group, from that of the clients that answered:
    each degree of freedom has the same scatter on average.

    Args:
        scatter: (K, e, e) the scatter of the samples of the clients that answered.
        size: (M,) the sizes n of all clients.
        labels: (M,) the group of each client.
        has_answered: (M,) whether the client is in `scatter`.
    """
    degrees = np.bincount(labels, size - 1, len(scatter))
    found = np.bincount(labels[has_answered], size[has_answered] - 1, len(scatter))
    share: Array = degrees / np.where(found > 0, found, degrees).clip(1)
    return scatter * share[:, None, None]


def scatter_with_noise(
    scatter: Array, size: Array, variance: float, labels: Labels | None = None
) -> Array:
    """The scatter (K, e, e) that belongs to the effective sizes.

    Its degrees of freedom are the sum of the group's effective sizes minus the number of its
    clients. Divided by them, it is the mean over the clients of (effective size) × (covariance of
    the client's mean). With r = v / (b n), that is the mean of (Σ + b r I) / (1 + r), up to a
    factor. Negative eigenvalues of Σ, which come from noise, become 0.

    Args:
        scatter: (K, e, e) the scatter of the samples of each group, as clients report it.
        size: (M,) the sizes n.
        variance: v, see `effective_sizes`.
        labels: (M,) the group of each client; None for one group.
    """
    if not variance:
        return scatter
    labels = np.zeros(len(size), np.int64) if labels is None else labels
    total = scatter.sum(0)
    weight, b = effective_sizes(size, total, variance), _mean_variance(size, total)
    result = np.empty_like(scatter)
    for group, group_scatter in enumerate(scatter):
        members = labels == group
        n, w = size[members], weight[members]
        values, vectors = np.linalg.eigh(group_scatter / max(1.0, n.sum() - len(n)))
        share = 1 / (1 + variance / (b * n))
        factor = w.sum() / (n * share).sum()
        values = factor * (share.mean() * np.maximum(values, 0) + (1 - share.mean()) * b)
        result[group] = (vectors * values) @ vectors.T * (w.sum() - len(w))
    return result


def _mean_variance(size: Array, scatter: Array) -> float:
    """b: the mean variance of a sample's numbers, above 0."""
    variance = float(np.trace(scatter)) / len(scatter) / max(1.0, float(size.sum()) - len(size))
    return max(variance, 1e-12)
