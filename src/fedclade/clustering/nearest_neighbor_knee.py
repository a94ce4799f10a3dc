"""FLUX's groups: points whose distance is at most a typical distance of nearest neighbors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering.graph import canonical_labels
from fedclade.clustering.linkage import cut_height, linkage

Points = NDArray[np.float64]


def group_by_knee(points: Points) -> NDArray[np.int64]:
    """The group of each point: the connected components of points at a distance of at most ε. This
    is DBSCAN with two samples in a neighborhood, whose outliers become groups of their own.

    ε is the distance to the nearest other point, of the point at the knee of these distances.

    Args:
        points: (n, d) the points.
    """
    from scipy.spatial.distance import cdist  # a node's process imports no scipy

    if len(points) < 2:
        return np.zeros(len(points), np.int64)
    distance = cdist(points, points)
    nearest = np.where(np.eye(len(points), dtype=bool), np.inf, distance).min(1)
    just_above = np.nextafter(knee(np.sort(nearest)), np.inf)
    return canonical_labels(cut_height(linkage(distance, "single"), just_above))


def knee(rising: NDArray[np.float64]) -> float:
    """The number at the knee of a rising sequence: the one farthest below the straight line from
    the first to the last. The last one if none is below it.

    Args:
        rising: (n,) the numbers.
    """
    line = np.linspace(rising[0], rising[-1], len(rising))
    below = line - rising
    return float(rising[int(below.argmax()) if below.max() > 1e-12 * rising[-1] else -1])


def scaled(descriptors: Points, low: Points, high: Points) -> Points:
    """Each block of the descriptors with its smallest number as 0 and its largest as 1.

    Args:
        descriptors: (n, blocks, numbers) the descriptors.
        low: (blocks,) the smallest numbers.
        high: (blocks,) the largest numbers.
    """
    reach = np.where(high > low, high - low, 1.0)
    return np.asarray((descriptors - low[:, None]) / reach[:, None])
