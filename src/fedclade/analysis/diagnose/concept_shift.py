"""Would other names for the labels explain why inputs of one label differ? Then the concept
differs, p(y | x), and not the inputs.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from fedclade.analysis.diagnose.class_statistics import ClassStatistics
from fedclade.clustering.clade import whitening_matrix

Array = NDArray[np.float64]


def explained(statistics: ClassStatistics, pairs: int, rng: np.random.Generator) -> float | None:
    """The part of the differences between class means that is gone once each class may be matched
    with any class of the other client.

    About 1 where labels were renamed, however: the same clouds of inputs are there under other
    names. Well below 1 where inputs are turned or shifted: few find a counterpart. None where no
    two clients share a label. At most `most` pairs of clients are compared.
    """
    degrees = float(statistics.degrees.sum())
    if degrees <= 0:
        return None
    z = statistics.means @ whitening_matrix(statistics.scatter.sum(0), degrees)
    apart = left = 0.0
    for a, b in _pairs(len(z), pairs, rng):
        mine, theirs = np.flatnonzero(statistics.counts[a]), np.flatnonzero(statistics.counts[b])
        shared = np.intersect1d(mine, theirs)
        if len(shared):
            before, after = matched(
                z[a, shared],
                statistics.counts[a, shared],
                z[b, theirs],
                statistics.counts[b, theirs],
                np.searchsorted(theirs, shared),
            )
            apart, left = apart + before, left + after
    return float(np.clip(1 - left / apart, 0, 1)) if apart > 0 else None


def _pairs(clients: int, most: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """All pairs, or a random sample of them."""
    if clients * (clients - 1) // 2 <= most:
        return list(combinations(range(clients), 2))
    first, step = rng.integers(clients, size=most), rng.integers(1, clients, size=most)
    return list(zip(first.tolist(), ((first + step) % clients).tolist(), strict=True))


def matched(
    mine: Array, n: Array, theirs: Array, m: Array, own: NDArray[np.int64]
) -> tuple[float, float]:
    """Square distances less what chance gives, summed over `mine`: to the row `own` of `theirs`,
    and to that of the best matching.

    A pair counts for its samples, n m / (n + m), so that classes of which little is known say
    little.
    """
    d, weight = mine.shape[1], n[:, None] * m / (n[:, None] + m)
    excess = ((mine[:, None] - theirs[None]) ** 2).sum(-1) - d * (1 / n[:, None] + 1 / m)
    row, column = linear_sum_assignment(excess * weight)
    here = np.arange(len(mine))
    # Both sums with the weights of the labels' own pairs, so that they are of the same things.
    return float((excess * weight)[here, own].sum()), float(
        (excess[row, column] * weight[here, own][row]).sum()
    )
