"""Clade's clustering on samples whose groups are known, and its correction for added noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

from fedclade.clustering.clade import (
    assign_new,
    effective_sizes,
    null_top_heights,
    rank,
    scatter_with_noise,
    split_group,
    split_groups,
    whitening_matrix,
)
from fedclade.clustering.graph import canonical_labels

Array = NDArray[np.float64]


def clients(
    centers: Array, spread: Array, sizes: NDArray[np.int64], seed: int
) -> tuple[Array, Array, Array, NDArray[np.int64]]:
    """The mean, size, scatter and true group of each client. Client i is in group i mod groups."""
    rng = np.random.default_rng(seed)
    truth = np.arange(len(sizes)) % len(centers)
    means, scatters = [], []
    for size, group in zip(sizes, truth, strict=True):
        x = centers[group] + rng.normal(size=(size, centers.shape[1])) * spread[group]
        means.append(x.mean(0))
        scatters.append((x - x.mean(0)).T @ (x - x.mean(0)))
    return np.array(means), sizes.astype(float), np.array(scatters), truth


def find_groups(mean: Array, size: Array, scatters: Array, seed: int) -> NDArray[np.int64]:
    """All levels, each with the scatter summed over its groups, as the method runs them."""
    labels, candidates = np.zeros(len(mean), np.int64), [0]
    while candidates:
        scatter = np.array([scatters[labels == g].sum(0) for g in range(labels.max() + 1)])
        labels, candidates = split_groups(mean, size, scatter, labels, candidates, seed)
    return canonical_labels(labels)


def test_whitening_gives_unit_covariance() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 3)) @ np.array([[2.0, 0, 0], [1, 0.5, 0], [0, 1, 3]])
    z = x @ whitening_matrix(x.T @ x, len(x))
    np.testing.assert_allclose(np.cov(z.T), np.eye(3), atol=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_one_group_for_any_sizes(seed: int) -> None:
    sizes = np.random.default_rng(seed).integers(1, 200, 60)
    means, n, scatters, _ = clients(np.zeros((1, 16)), np.ones((1, 1)), sizes, seed)
    assert not split_group(means, n, scatters.sum(0), np.random.default_rng(0)).any()


@pytest.mark.parametrize("seed", range(5))
def test_planted_groups_are_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    means, n, scatters, truth = clients(
        rng.normal(size=(4, 16)) * 1.5, np.ones((4, 1)), rng.integers(10, 60, 40), seed
    )
    assert adjusted_rand_score(truth, find_groups(means, n, scatters, seed=seed)) == 1.0


def projected(
    centers: Array, sizes: NDArray[np.int64], seed: int
) -> tuple[Array, Array, Array, NDArray[np.int64]]:
    """Clients whose samples have a few dimensions, projected to 128 numbers in float32."""
    means, n, scatters, truth = clients(centers, np.ones((len(centers), 1)), sizes, seed)
    matrix = np.random.default_rng(seed).normal(size=(centers.shape[1], 128))
    scatter = (matrix.T @ scatters.sum(0) @ matrix).astype(np.float32).astype(float)
    return means @ matrix, n, scatter, truth


def test_the_rank_is_that_of_the_samples_before_the_projection() -> None:
    _, _, scatter, _ = projected(np.zeros((1, 14)), np.full(4, 100), seed=0)
    assert scatter.shape == (128, 128)
    assert rank(scatter) == 14
    assert rank(np.zeros((3, 3))) == 0


@pytest.mark.parametrize("seed", range(5))
def test_groups_of_few_dimensions_are_found_in_a_long_signature(seed: int) -> None:
    """As for four hospitals and a logistic regression of 14 weights."""
    centers = np.zeros((2, 14))
    centers[1, :4] = 0.6
    sizes = np.array([199, 85, 172, 30])
    means, n, scatter, truth = projected(centers, sizes, seed)
    labels = split_group(means, n, scatter, np.random.default_rng(0))
    # The cut may separate more, but never joins the two groups.
    assert len(np.unique(labels)) >= 2
    assert all(len(set(truth[labels == label])) == 1 for label in np.unique(labels))


@pytest.mark.parametrize("seed", range(10))
def test_noise_of_few_dimensions_is_one_group(seed: int) -> None:
    sizes = np.array([199, 85, 172, 30])
    means, n, scatter, _ = projected(np.zeros((1, 14)), sizes, seed)
    assert not split_group(means, n, scatter, np.random.default_rng(0)).any()


def test_each_group_is_split_again_with_its_own_scatter() -> None:
    """Two distant groups. The narrow one consists of two groups, which cannot be separated with the
    scatter of the wide one.
    """
    centers = np.zeros((4, 8))
    centers[2:] = 40.0
    centers[3, 0] += 0.4
    spread = np.array([[8.0], [8.0], [0.2], [0.2]])
    means, n, scatters, truth = clients(centers, spread, np.full(48, 40), seed=1)
    truth = np.where(truth == 1, 0, truth)
    labels = find_groups(means, n, scatters, seed=0)
    assert adjusted_rand_score(truth, labels) == 1.0
    first_level = split_group(means, n, scatters.sum(0), np.random.default_rng(0))
    assert len(np.unique(first_level)) == 2


def test_clients_with_too_few_samples_for_whitening_are_one_group() -> None:
    means, n, scatters, _ = clients(
        np.array([[0.0] * 16, [9.0] * 16]), np.ones((2, 1)), np.full(6, 3), seed=0
    )
    assert not split_group(means, n, scatters.sum(0), np.random.default_rng(0)).any()


def test_a_single_client_is_one_group() -> None:
    means, n, scatters, _ = clients(np.zeros((1, 2)), np.ones((1, 1)), np.array([50]), seed=0)
    assert find_groups(means, n, scatters, seed=0).tolist() == [0]


def test_a_new_client_joins_the_group_of_least_cost() -> None:
    known, sizes, label = (
        np.array([[0.0, 0.0], [2.0, 0.0], [6.0, 0.0]]),
        np.array([1.0, 1.0, 4.0]),
        np.array([0, 0, 1]),
    )
    # The costs with group 0 (center 1, weight 2) and group 1 (center 6, weight 4) for a client of
    # size 2 at 3.2: 2*2/4 * 2.2^2 = 4.84 and 2*4/6 * 2.8^2 = 10.45; at 3.6: 6.76 and 7.68; at 3.8:
    # 7.84 and 6.45.
    labels = assign_new(
        np.array([[3.2, 0.0], [3.6, 0.0], [3.8, 0.0]]), np.full(3, 2.0), known, sizes, label, 3
    )
    assert labels.tolist() == [0, 0, 1]


def test_noise_tree_tops_are_about_the_same_for_any_sizes() -> None:
    rng = np.random.default_rng(0)
    small, large = (
        max(null_top_heights(np.full(50, 5.0), 32, rng)),
        max(null_top_heights(np.full(50, 500.0), 32, rng)),
    )
    assert small == pytest.approx(large, rel=0.3)


# --- noise for differential privacy


def test_without_noise_nothing_changes() -> None:
    size, scatter = np.array([3.0, 5.0]), np.array([[[2.0, 0.1], [0.1, 1.0]]])
    assert effective_sizes(size, scatter[0], 0.0) is size
    assert scatter_with_noise(scatter, size, 0.0) is scatter


def test_effective_sizes_by_hand() -> None:
    """b = 76 / 2 / (10 + 30 - 2) = 1 and v = 10: errors 1/10 + 10/100 = 1/5 and 1/30 + 10/900 =
    2/45. So the sizes are as 2 to 9, with the sum 40.
    """
    size, scatter = np.array([10.0, 30.0]), 38 * np.eye(2)
    np.testing.assert_allclose(effective_sizes(size, scatter, 10.0), [40 * 2 / 11, 40 * 9 / 11])


def test_with_much_noise_the_effective_size_is_the_size_squared() -> None:
    weight = effective_sizes(np.array([1.0, 2.0, 4.0]), 4 * np.eye(3), 1e9)
    np.testing.assert_allclose(weight / weight[0], [1, 4, 16], rtol=1e-6)


@given(
    st.lists(st.integers(2, 500), min_size=2, max_size=12),
    st.floats(0, 1e4),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=100)
def test_noisy_scatter_is_the_mean_of_effective_size_times_covariance(
    sizes: list[int], variance: float, seed: int
) -> None:
    root = np.random.default_rng(seed).normal(size=(4, 4))
    covariance, size = root @ root.T, np.array(sizes, float)
    scatter = covariance * (size.sum() - len(size))
    weight = effective_sizes(size, scatter, variance)
    assert weight.sum() == pytest.approx(size.sum())
    noisy = scatter_with_noise(scatter[None], size, variance)[0] / (weight.sum() - len(size))
    expected = np.mean(
        [
            w * (covariance / n + variance / n**2 * np.eye(4))
            for w, n in zip(weight, size, strict=True)
        ],
        0,
    )
    np.testing.assert_allclose(noisy, expected, rtol=1e-6, atol=1e-9 * np.trace(expected))


def test_each_group_has_its_own_scatter_and_negative_eigenvalues_become_zero() -> None:
    size, label = np.array([10.0, 10.0, 20.0]), np.array([0, 0, 1])
    scatter = np.stack([np.diag([18.0, -9.0]), np.diag([19.0, 38.0])])
    v = 5.0
    weight = effective_sizes(size, scatter.sum(0), v)
    noisy = scatter_with_noise(scatter, size, v, label)
    for group, covariance in enumerate((np.diag([1.0, 0.0]), np.diag([1.0, 2.0]))):
        n, w = size[label == group], weight[label == group]
        np.testing.assert_allclose(
            noisy[group] / (w.sum() - len(w)), w[0] / n[0] * (covariance + v / n[0] * np.eye(2))
        )
