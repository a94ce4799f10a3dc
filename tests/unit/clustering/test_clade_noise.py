"""Means hidden in noise: what they are worth, and that worth times covariance is what `with_noise`
says.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade.clustering.noisy import effective_sizes, with_noise


def test_without_noise_nothing_changes() -> None:
    size, scatter = np.array([3.0, 5.0]), np.array([[[2.0, 0.1], [0.1, 1.0]]])
    assert effective_sizes(size, scatter[0], 0.0) is size
    assert with_noise(scatter, size, 0.0) is scatter


def test_worth_by_hand() -> None:
    """b = 76 / 2 / (10 + 30 - 2) = 1 and v = 10: errors 1/10 + 10/100 = 1/5 and 1/30 + 10/900 =
    2/45, so 2 to 9 of 40 in all.
    """
    size, scatter = np.array([10.0, 30.0]), 38 * np.eye(2)
    np.testing.assert_allclose(effective_sizes(size, scatter, 10.0), [40 * 2 / 11, 40 * 9 / 11])


def test_with_much_noise_a_mean_is_worth_its_size_squared() -> None:
    weight = effective_sizes(np.array([1.0, 2.0, 4.0]), 4 * np.eye(3), 1e9)
    np.testing.assert_allclose(weight / weight[0], [1, 4, 16], rtol=1e-6)


@given(
    st.lists(st.integers(2, 500), min_size=2, max_size=12),
    st.floats(0, 1e4),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=100)
def test_it_is_the_mean_of_worth_times_covariance(
    sizes: list[int], variance: float, seed: int
) -> None:
    root = np.random.default_rng(seed).normal(size=(4, 4))
    covariance, size = root @ root.T, np.array(sizes, float)
    scatter = covariance * (size.sum() - len(size))
    weight = effective_sizes(size, scatter, variance)
    assert weight.sum() == pytest.approx(size.sum())
    told = with_noise(scatter[None], size, variance)[0] / (weight.sum() - len(size))
    expected = np.mean(
        [
            w * (covariance / n + variance / n**2 * np.eye(4))
            for w, n in zip(weight, size, strict=True)
        ],
        0,
    )
    np.testing.assert_allclose(told, expected, rtol=1e-6, atol=1e-9 * np.trace(expected))


def test_each_group_has_its_own_scatter_and_noise_below_zero_is_cut_off() -> None:
    size, label = np.array([10.0, 10.0, 20.0]), np.array([0, 0, 1])
    scatter = np.stack([np.diag([18.0, -9.0]), np.diag([19.0, 38.0])])
    v = 5.0
    weight = effective_sizes(size, scatter.sum(0), v)
    told = with_noise(scatter, size, v, label)
    for group, own in enumerate((np.diag([1.0, 0.0]), np.diag([1.0, 2.0]))):
        n, w = size[label == group], weight[label == group]
        np.testing.assert_allclose(
            told[group] / (w.sum() - len(w)), w[0] / n[0] * (own + v / n[0] * np.eye(2))
        )
