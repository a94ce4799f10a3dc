"""Whether clients differ in groups or each in its own way.

The tree of the clients' means is compared with trees of individuals: Gaussian clients with the same
covariance between clients, which have no groups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering.linkage import LinkageMatrix, step_ratios, weighted_ward

Array = NDArray[np.float64]
DRAWS, MOST = 40, 300  # trees of individuals; clients of a tree
FEWEST = 8  # clients
# Of a covariance, in units of its mean eigenvalue: twice the ridge of a whitening matrix.
_LEAST_EIGENVALUE = 2e-3


def random_steps(z: Array, n: Array, own: NDArray[np.int64], rng: np.random.Generator) -> Array:
    """(DRAWS,) the widest steps of trees of random clients, with the same covariance between
    clients.

    Args:
        z: (M, d) the clients' means, in units of the sampling noise at n = 1.
        n: (M,) the sizes.
        own: (M,) a number for each client; clients with the same number are alike, so 0 … M - 1 are
            individuals.
        rng: draws the clients.
    """
    directions, variances = between_clients(z, n)
    steps = np.empty(DRAWS)
    for draw in range(DRAWS):
        noise = rng.normal(size=z.shape) / np.sqrt(n)[:, None]
        center = rng.normal(size=(int(own.max()) + 1, len(variances))) * np.sqrt(variances)
        steps[draw] = widest_step(weighted_ward(center[own] @ directions.T + noise, n))
    return steps


def are_grouped(mean: Array, n: Array, whitener: Array, seed: int) -> bool:
    """Whether the widest step is wider than that of all trees of individuals. False for few
    clients, which cannot show it.

    Args:
        mean: (M, e) the means of the clients.
        n: (M,) their sizes.
        whitener: (e, e) W, with which the covariance of the samples within clients is
            (W Wᵀ)⁻¹. Directions without variance are left out.
        seed: the seed of the individuals, and of the clients to compare if there are many.
    """
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.permutation(len(mean))[:MOST])
    if len(chosen) < FEWEST:
        return False
    values, vectors = np.linalg.eigh(np.linalg.inv(whitener @ whitener.T))
    used = values > _LEAST_EIGENVALUE * values.mean()
    if used.sum() < 2:
        return False
    z = mean[chosen] @ (vectors[:, used] / np.sqrt(values[used]))
    steps = random_steps(z, n[chosen], np.arange(len(z)), rng)
    return widest_step(weighted_ward(z, n[chosen])) > float(steps.max())


def between_clients(z: Array, n: Array) -> tuple[Array, Array]:
    """(d, k) the directions in which clients differ by more than noise, and (k,) their variances.

    The covariance of noise has eigenvalues up to (1 + sqrt(d / (M - 1)))². Larger ones are those of
    a spiked covariance, and their bias is known.
    """
    clients, d = z.shape
    center = (n[:, None] * z).sum(0) / n.sum()
    deviation = np.sqrt(n)[:, None] * (z - center)
    values, vectors = np.linalg.eigh(deviation.T @ deviation / (clients - 1))
    aspect = d / (clients - 1)
    is_spike = values > (1 + np.sqrt(aspect)) ** 2
    middle = values[is_spike] + 1 - aspect
    true = (middle + np.sqrt(np.maximum(middle**2 - 4 * values[is_spike], 0))) / 2
    return vectors[:, is_spike], np.maximum(true - 1, 0) / n.mean()


def widest_step(tree: LinkageMatrix) -> float:
    """The largest ratio of successive merge heights in the upper half of the tree."""
    return float(step_ratios(tree, max(1, (len(tree) + 1) // 2)).max())
