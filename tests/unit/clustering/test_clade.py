"""Clade's group finding on samples whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import adjusted_rand_score

from fedclade.clustering.clade import (
    assign_new,
    find_groups,
    null_top_height,
    split,
    whitening_matrix,
)

Array = NDArray[np.float64]


def clients(
    centres: Array, spread: Array, sizes: NDArray[np.int64], seed: int
) -> tuple[Array, Array, Array, NDArray[np.int64]]:
    """Means, sizes, scatter of each client, and the truth; client i is of group i mod groups."""
    rng = np.random.default_rng(seed)
    truth = np.arange(len(sizes)) % len(centres)
    means, scatters = [], []
    for size, group in zip(sizes, truth, strict=True):
        x = centres[group] + rng.normal(size=(size, centres.shape[1])) * spread[group]
        means.append(x.mean(0))
        scatters.append((x - x.mean(0)).T @ (x - x.mean(0)))
    return np.array(means), sizes.astype(float), np.array(scatters), truth


def summed(scatters: Array):  # type: ignore[no-untyped-def]
    return lambda label: np.array(
        [scatters[label == group].sum(0) for group in range(label.max() + 1)]
    )


def test_whitening_gives_unit_covariance() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20_000, 3)) @ np.array([[2.0, 0, 0], [1, 0.5, 0], [0, 1, 3]])
    z = x @ whitening_matrix(x.T @ x, len(x))
    np.testing.assert_allclose(np.cov(z.T), np.eye(3), atol=0.03)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_one_group_whatever_the_sizes(seed: int) -> None:
    sizes = np.random.default_rng(seed).integers(1, 200, 60)
    means, n, scatters, _ = clients(np.zeros((1, 16)), np.ones((1, 1)), sizes, seed)
    assert not split(means, n, scatters.sum(0), np.random.default_rng(0)).any()


@pytest.mark.parametrize("seed", range(5))
def test_planted_groups_are_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    means, n, scatters, truth = clients(
        rng.normal(size=(4, 16)) * 1.5, np.ones((4, 1)), rng.integers(10, 60, 40), seed
    )
    assert adjusted_rand_score(truth, find_groups(means, n, summed(scatters), seed=seed)) == 1.0


def test_each_group_is_asked_again_with_its_own_scatter() -> None:
    """Two far groups, one of them narrow and made of two: only seen once the wide one's scatter is
    out of the way.
    """
    centres = np.zeros((4, 8))
    centres[2:] = 40.0
    centres[3, 0] += 0.4
    spread = np.array([[8.0], [8.0], [0.2], [0.2]])
    means, n, scatters, truth = clients(centres, spread, np.full(48, 40), seed=1)
    truth = np.where(truth == 1, 0, truth)
    found = find_groups(means, n, summed(scatters), seed=0)
    assert adjusted_rand_score(truth, found) == 1.0
    whole_only = split(means, n, scatters.sum(0), np.random.default_rng(0))
    assert len(np.unique(whole_only)) == 2


def test_too_few_samples_to_whiten_with_are_one_group() -> None:
    means, n, scatters, _ = clients(
        np.array([[0.0] * 16, [9.0] * 16]), np.ones((2, 1)), np.full(6, 3), seed=0
    )
    assert not split(means, n, scatters.sum(0), np.random.default_rng(0)).any()


def test_a_single_client_is_one_group() -> None:
    means, n, scatters, _ = clients(np.zeros((1, 2)), np.ones((1, 1)), np.array([50]), seed=0)
    assert find_groups(means, n, summed(scatters), seed=0).tolist() == [0]


def test_a_new_client_is_placed_where_it_costs_least() -> None:
    known, sizes, label = (
        np.array([[0.0, 0.0], [2.0, 0.0], [6.0, 0.0]]),
        np.array([1.0, 1.0, 4.0]),
        np.array([0, 0, 1]),
    )
    # Against group 0 (centre 1, weight 2) and group 1 (centre 6, weight 4), for a client of size 2
    # at 3.2: 2*2/4 * 2.2^2 = 4.84 and 2*4/6 * 2.8^2 = 10.45; at 3.6: 6.76 and 7.68; at 3.8: 7.84
    # and 6.45.
    found = assign_new(
        np.array([[3.2, 0.0], [3.6, 0.0], [3.8, 0.0]]), np.full(3, 2.0), known, sizes, label, 3
    )
    assert found.tolist() == [0, 0, 1]


def test_noise_tree_tops_are_about_the_same_for_any_sizes() -> None:
    rng = np.random.default_rng(0)
    small, large = (
        null_top_height(np.full(50, 5.0), 32, rng),
        null_top_height(np.full(50, 500.0), 32, rng),
    )
    assert small == pytest.approx(large, rel=0.3)
