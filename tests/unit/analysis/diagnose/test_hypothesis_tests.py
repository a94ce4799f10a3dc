"""Tests for differences between clients: small cases by hand, and general properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedclade.analysis.diagnose.class_statistics import ClassStatistics
from fedclade.analysis.diagnose.hypothesis_tests import (
    NONE,
    chi_square,
    of_inputs,
    of_inputs_given_labels,
    of_labels,
    of_sizes,
)

TWO = ClassStatistics(
    np.array([[20.0], [20.0]]), np.array([[[20.0]], [[-20.0]]]), np.array([[[38.0]]])
)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_chi_square_by_hand() -> None:
    assert chi_square(np.array([[10, 0], [0, 10]])) == 20  # 5 are expected in each cell: 4 · 25 / 5
    assert chi_square(np.array([[4, 4], [8, 8]])) == 0


def test_labels_by_hand() -> None:
    difference = of_labels(np.array([[15.0, 5.0], [5.0, 15.0]]), rng())
    chance = 40 / 39  # one degree of freedom, N / (N - 1)
    assert difference.times_chance == pytest.approx(10 / chance)  # 4 · 25 / 10
    assert difference.share == pytest.approx((10 - chance) / 20)  # 40 - (20² + 20²) / 40
    assert difference.p < 0.02
    assert of_labels(np.array([[7.0, 7.0], [7.0, 7.0]]), rng()).p == 1


def test_labels_inside_groups() -> None:
    counts = np.array([[20.0, 0.0], [20.0, 0.0], [0.0, 20.0], [0.0, 20.0]])
    assert of_labels(counts, rng()).share == 1
    # One class in each group: nothing to compare.
    assert of_labels(counts, rng(), np.array([0, 0, 1, 1])) == NONE
    assert of_labels(counts, rng(), np.array([0, 1, 0, 1])).share == 1


def test_inputs_by_hand() -> None:
    """Means ±1 of twenty samples each, a variance of 1 within clients (38 / 38), and a ridge of
    0.001.
    """
    difference = of_inputs_given_labels(TWO)
    squares, chance = 40 / 1.001, 2 * 0.5 / 1.001 * 38 / 36
    assert difference.times_chance == pytest.approx(squares / chance)
    between = (squares - chance) / 20  # 40 - (20² + 20²) / 40
    assert difference.share == pytest.approx(between / (1 + between))
    assert of_inputs(TWO) == difference  # the same test if there is one class


def test_inputs_of_different_labels_are_not_compared() -> None:
    apart = ClassStatistics(
        np.array([[20.0, 0.0], [0.0, 20.0]]),
        np.array([[[20.0], [0.0]], [[0.0], [-20.0]]]),
        np.array([[[19.0]], [[19.0]]]),
    )
    assert of_inputs_given_labels(apart) == NONE
    assert of_inputs(apart).share == pytest.approx(of_inputs(TWO).share)


def test_too_few_samples_give_no_difference() -> None:
    few = ClassStatistics(np.ones((3, 1)), np.ones((3, 1, 4)), np.zeros((1, 4, 4)))
    assert of_inputs(few) == of_inputs_given_labels(few) == NONE
    assert of_labels(np.array([[3.0, 4.0]]), rng()) == NONE


def test_sizes() -> None:
    assert of_sizes(np.array([5.0, 5.0])) == 0
    assert of_sizes(np.array([1.0, 3.0])) == 0.5


@settings(max_examples=40, deadline=None)
@given(
    arrays.arrays(np.int64, (4, 3), elements=st.integers(0, 20)),
    st.permutations(range(4)),
    st.permutations(range(3)),
)
def test_the_order_of_clients_and_classes_does_not_matter(
    counts: np.ndarray, clients: list[int], classes: list[int]
) -> None:
    first, second = of_labels(counts, rng()), of_labels(counts[clients][:, classes], rng())
    assert first.share == pytest.approx(second.share)
    assert first.times_chance == pytest.approx(second.times_chance)
    assert 0 <= first.share <= 1


@pytest.mark.parametrize("sizes", [[40] * 30, [5, 200] * 15, [10] * 40])
def test_clients_of_one_source_differ_by_chance_only(sizes: list[int]) -> None:
    """Over twenty federations the statistic is as large as under chance, for any sizes, and no
    difference is reported.
    """
    ratios = []
    for seed in range(20):
        draw = np.random.default_rng(seed)
        counts, sums = np.zeros((len(sizes), 4)), np.zeros((len(sizes), 4, 5))
        scatter = np.zeros((4, 5, 5))
        for client, size in enumerate(sizes):
            label, x = draw.integers(0, 4, size), draw.exponential(size=(size, 5))
            for c in range(4):
                own = x[label == c] * (1 + c)  # every class has a different spread
                if len(own):
                    counts[client, c], sums[client, c] = len(own), own.sum(0)
                    scatter[c] += (own - own.mean(0)).T @ (own - own.mean(0))
        difference = of_inputs_given_labels(ClassStatistics(counts, sums, scatter))
        ratios.append(difference.times_chance)
        assert difference.p > 1e-3
    assert np.mean(ratios) == pytest.approx(1, abs=0.05)
