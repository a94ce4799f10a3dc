"""k-means: centres and labels that belong together, the same in every run."""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_info

from fedclade.core.kmeans import kmeans, single_threaded


def test_centres_are_the_means_of_their_points() -> None:
    points = np.array([[0.0, 0.0], [9.0, 1.0], [1.0, 0.0], [9.0, 3.0]], np.float32)
    centres, labels = kmeans(points, 2, restarts=3, seed=0)
    assert labels[0] == labels[2] != labels[1] == labels[3]
    assert centres.dtype == np.float32
    np.testing.assert_array_equal(centres[labels[[0, 1]]], [[0.5, 0.0], [9.0, 2.0]])


def test_the_same_seed_gives_the_same_bytes() -> None:
    points = np.random.default_rng(0).normal(size=(500, 8))
    runs = [kmeans(points, 7, restarts=2, seed=5, tol=0.0) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert first.tobytes() == second.tobytes()


def test_single_threaded_limits_the_pools() -> None:
    with single_threaded():
        assert all(pool["num_threads"] == 1 for pool in threadpool_info())
