"""k-means and the nearest center."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from fedclade.clustering import fedsem as kmeans_module
from fedclade.clustering.fedsem import kmeans_labels, nearest_center
from fedclade.errors import InvalidInputError

# Whole numbers, so that sums are exact and equal points are not rare.
points_of = st.tuples(st.integers(1, 12), st.integers(1, 4)).flatmap(
    lambda shape: arrays(np.float32, shape, elements=st.integers(-4, 4))
)


def means(points: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([points[labels == label].mean(0) for label in range(int(labels.max()) + 1)])


def spread(points: Tensor, labels: Tensor) -> float:
    """The objective of k-means: the sum of squared distances to the group's mean."""
    return float(((points - means(points, labels)[labels]) ** 2).sum())


def test_kmeans_by_hand() -> None:
    # {0, 1, 10 | 12}: 182/3; {0, 1 | 10, 12}: 0.5 + 2; {0 | 1, 10, 12}: 206/3
    assert kmeans_labels(torch.tensor([[0.0], [10.0], [1.0], [12.0]]), 2, seed=0).tolist() == [
        0,
        1,
        0,
        1,
    ]


def test_kmeans_finds_the_best_of_all_partitions() -> None:
    rng = np.random.default_rng(0)
    for seed in range(8):
        points = torch.from_numpy(rng.normal(size=(7, 2)))
        best = min(
            spread(points, torch.tensor(labels))
            for labels in itertools.product(range(3), repeat=7)
            if set(labels) == set(range(3))
        )
        assert spread(points, kmeans_labels(points, 3, seed)) == pytest.approx(best)


@settings(max_examples=60, deadline=None)
@given(points_of, st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_kmeans_gives_a_partition_that_no_single_step_improves(
    rows: np.ndarray, clusters: int, seed: int
) -> None:
    points = torch.from_numpy(rows)
    labels = kmeans_labels(points, clusters, seed)
    groups = min(clusters, len(torch.unique(points, dim=0)))
    # No cluster is empty, and they are numbered by first appearance.
    assert list(dict.fromkeys(labels.tolist())) == list(range(groups))
    assert torch.equal(labels, kmeans_labels(points, clusters, seed))
    apart = torch.cdist(points.double(), means(points.double(), labels))
    assert bool((apart.gather(1, labels[:, None])[:, 0] <= apart.min(1).values + 1e-5).all())


@pytest.mark.parametrize("chunk", [1, 30, 10**6])
def test_reduced_dimensions_keep_distances_and_clusters(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k-means of few long vectors uses their products. The distances stay the same, also far from
    0.
    """
    monkeypatch.setattr(kmeans_module, "CHUNK_VALUES", chunk)
    points = torch.from_numpy(np.random.default_rng(1).normal(size=(9, 40))).float() + 100
    points[8] = points[3]
    reduced = kmeans_module._reduce_dimensions(points)
    assert reduced.shape == (9, 9)
    torch.testing.assert_close(
        torch.cdist(reduced, reduced),
        torch.cdist(points.double(), points.double()),
        atol=1e-5,
        rtol=0,
    )
    labels = kmeans_labels(points, 3, seed=0)
    assert labels[8] == labels[3]
    assert torch.equal(
        labels, kmeans_labels(torch.cat([points, torch.full((9, 60), 7.0)], 1), 3, seed=0)
    )


def test_equal_points_stay_together_and_minus_zero_is_zero() -> None:
    points = torch.tensor([[0.0, 1.0], [-0.0, 1.0], [2.0, 1.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # scikit-learn warns about fewer points than groups
        assert kmeans_labels(points, 3, seed=0).tolist() == [0, 0, 1]
        assert kmeans_labels(torch.ones(4, 2), 3, seed=0).tolist() == [0, 0, 0, 0]


def test_nearest_center_by_hand() -> None:
    # The third point is equally near to both centers; the first center counts.
    points = torch.tensor([[0.0, 0.0], [3.0, 4.0], [2.0, 1.0]])
    assert nearest_center(points, torch.tensor([[0.0, 1.0], [4.0, 1.0]])).tolist() == [0, 1, 0]


@settings(max_examples=60, deadline=None)
@given(points_of, st.integers(1, 5), st.integers(1, 9), st.integers(0, 999))
def test_nearest_center_has_the_least_distance_for_any_chunk_size(
    rows: np.ndarray, count: int, chunk: int, seed: int
) -> None:
    points = torch.from_numpy(rows)
    centers = torch.from_numpy(
        np.random.default_rng(seed).integers(-4, 5, (count, points.shape[1]))
    ).float()
    squares = ((points[:, None] - centers) ** 2).sum(-1)  # exact
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kmeans_module, "CHUNK_VALUES", chunk)
        assert torch.equal(nearest_center(points, centers), squares.argmin(1))


def test_nearest_center_distinguishes_close_points_far_from_zero() -> None:
    # 1e4 plus one step of float32 is 1e4 + 0.00098: squares of 1e8 in float32 would lose the
    # difference of 1e-6.
    far = torch.full((30, 8), 1e4)
    points = torch.nextafter(far, torch.tensor(torch.inf))
    assert nearest_center(points, torch.stack([far[0], points[0]])).tolist() == [1] * 30


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        (lambda: kmeans_labels(torch.zeros(3), 2, 0), "points.shape", "(3,)"),
        (lambda: kmeans_labels(torch.zeros(3, 1), 0, 0), "clusters", "0"),
        (lambda: kmeans_labels(torch.tensor([[torch.nan]]), 1, 0), "points", "NaN"),
        (
            lambda: nearest_center(torch.zeros(3, 2), torch.zeros(2, 3)),
            "centers.shape",
            "(K, 2)",
        ),
        (
            lambda: nearest_center(torch.zeros(3, 2), torch.full((1, 2), torch.inf)),
            "centers",
            "infinity",
        ),
    ],
)
def test_invalid_points_and_centers_are_refused(
    call: Callable[[], object], field: str, value: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.field == field
    assert value in str(caught.value)
