"""Whether permuted labels explain why inputs of one label differ between clients. If so, the
concept p(y | x) differs and not the inputs.
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
    """The share of the differences between class means that disappears if a class may be matched
    with any class of the other client.

    About 1 if labels are permuted: the other client has the same inputs under other labels. Well
    below 1 if inputs are rotated or shifted: few classes have a counterpart.

    Args:
        statistics: the clients' statistics per class.
        pairs: the largest number of pairs of clients to compare.
        rng: samples the pairs.

    Returns:
        The share, or None if no two clients have a label in common.
    """
    degrees = float(statistics.degrees.sum())
    if degrees <= 0:
        return None
    z = statistics.means @ whitening_matrix(statistics.scatter.sum(0), degrees)
    same_label = best_match = 0.0
    for a, b in _pairs(len(z), pairs, rng):
        labels_a, labels_b = (np.flatnonzero(statistics.counts[client]) for client in (a, b))
        shared = np.intersect1d(labels_a, labels_b)
        if len(shared):
            before, after = matched(
                z[a, shared],
                statistics.counts[a, shared],
                z[b, labels_b],
                statistics.counts[b, labels_b],
                np.searchsorted(labels_b, shared),
            )
            same_label, best_match = same_label + before, best_match + after
    return float(np.clip(1 - best_match / same_label, 0, 1)) if same_label > 0 else None


def _pairs(clients: int, maximum: int, rng: np.random.Generator) -> list[tuple[int, int]]:
    """All pairs, or a random sample of them."""
    if clients * (clients - 1) // 2 <= maximum:
        return list(combinations(range(clients), 2))
    first, step = rng.integers(clients, size=maximum), rng.integers(1, clients, size=maximum)
    return list(zip(first.tolist(), ((first + step) % clients).tolist(), strict=True))


def matched(
    first: Array, n: Array, second: Array, m: Array, same_label: NDArray[np.int64]
) -> tuple[float, float]:
    """Sums of squared distances between class means, minus their expectation under chance: for
    equal labels, and for the best matching of labels.

    A pair has the weight n m / (n + m), so that classes with few samples count little.

    Args:
        first: class means of the first client.
        n: number of samples per row of `first`.
        second: class means of the second client.
        m: number of samples per row of `second`.
        same_label: for each row of `first` the row of `second` with the same label.
    """
    d, weight = first.shape[1], n[:, None] * m / (n[:, None] + m)
    excess = ((first[:, None] - second[None]) ** 2).sum(-1) - d * (1 / n[:, None] + 1 / m)
    row, column = linear_sum_assignment(excess * weight)
    rows = np.arange(len(first))
    # Both sums use the weights of the pairs with equal labels, so that they can be compared.
    return float((excess * weight)[rows, same_label].sum()), float(
        (excess[row, column] * weight[rows, same_label][row]).sum()
    )
