"""Clade's statistics where clients hide their means in noise of a known size.

The noise has variance v in each number of a client's sum, so v / n² in its mean. So n times the
covariance of the mean of a client of n samples is Σ + v/n · I, with Σ the covariance of its
samples: unlike sampling noise alone, it is not the same for all sizes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def effective_sizes(size: Array, scatter: Array, variance: float) -> Array:
    """What each mean is worth, in place of the sizes n: in inverse proportion to its mean square
    error, and as much as `size` in all.

    `scatter` (e, e) is that of the samples within clients. With b = tr Σ / e the mean square error
    of a number is b/n + v/n².
    """
    if not variance:
        return size
    weight = size / (1 + variance / (_spread(size, scatter) * size))
    return np.asarray(weight * (size.sum() / weight.sum()))


def with_noise(
    scatter: Array, size: Array, variance: float, label: NDArray[np.int64] | None = None
) -> Array:
    """The scatter (K, e, e) that goes with `worth`, from that of the samples of each group, as
    clients tell it.

    Divided by the worth of the group's clients less their number, it is the mean of their worth
    times the covariance of their means: with r = v / (b n) the mean of (Σ + b r I) / (1 + r), but
    for a factor. What noise has left below 0 of Σ is 0.
    """
    if not variance:
        return scatter
    label = np.zeros(len(size), np.int64) if label is None else label
    total = scatter.sum(0)
    weight, spread = effective_sizes(size, total, variance), _spread(size, total)
    result = np.empty_like(scatter)
    for group, own in enumerate(scatter):
        who = label == group
        n, w = size[who], weight[who]
        values, vectors = np.linalg.eigh(own / max(1.0, n.sum() - len(n)))
        share = 1 / (1 + variance / (spread * n))
        factor = w.sum() / (n * share).sum()
        values = factor * (share.mean() * np.maximum(values, 0) + (1 - share.mean()) * spread)
        result[group] = (vectors * values) @ vectors.T * (w.sum() - len(w))
    return result


def _spread(size: Array, scatter: Array) -> float:
    """b: the mean variance of a sample's numbers; above 0."""
    found = float(np.trace(scatter)) / len(scatter) / max(1.0, float(size.sum()) - len(size))
    return max(found, 1e-12)
