"""k-means by scikit-learn, with the same result in every run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Float = TypeVar("Float", np.float32, np.float64)


def kmeans(
    points: NDArray[Float], clusters: int, *, restarts: int, seed: int, tol: float = 1e-4
) -> tuple[NDArray[Float], NDArray[np.int32]]:
    """The centers (clusters, d) and the labels (n,) of points (n, d): the best of `restarts` runs
    from k-means++.

    A run stops when the centers move by no more than `tol`, relative to the variance of the points.
    """
    # Most methods need no scikit-learn, and it is slow to import.
    from sklearn.cluster import KMeans  # type: ignore[import-untyped]

    with single_threaded():
        fitted = KMeans(clusters, n_init=restarts, tol=tol, random_state=seed).fit(points)
    return fitted.cluster_centers_, fitted.labels_


def single_threaded() -> Any:
    """A context in which scikit-learn uses one thread: several threads sum in an order that changes
    from run to run, and small data sets do not get faster.
    """
    return _thread_pools().limit(limits=1)


@lru_cache(maxsize=1)
def _thread_pools() -> Any:
    import sklearn.cluster  # type: ignore[import-untyped]  # noqa: F401  (only loaded libraries are found)
    from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]  # a dependency of scikit-learn

    return ThreadpoolController()
