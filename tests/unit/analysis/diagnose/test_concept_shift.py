"""Whether permuted labels explain a difference, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fedclade.analysis.diagnose.class_statistics import ClassStatistics
from fedclade.analysis.diagnose.concept_shift import explained, matched

FIVE = np.array([5.0, 5.0])


def test_a_swap_by_hand() -> None:
    before, after = matched(
        np.array([[0.0], [10.0]]), FIVE, np.array([[10.0], [0.0]]), FIVE, np.array([0, 1])
    )
    # Chance gives 1/5 + 1/5; a pair has the weight 25 / 10.
    assert before == pytest.approx(2 * 2.5 * (100 - 0.4))
    assert after == pytest.approx(-2 * 2.5 * 0.4)


def test_a_class_may_be_matched_with_one_that_is_not_shared() -> None:
    before, after = matched(
        np.array([[0.0]]),
        np.array([4.0]),
        np.array([[3.0], [0.0]]),
        np.array([4.0, 4.0]),
        np.array([0]),
    )
    assert (before, after) == (pytest.approx(2 * (9 - 0.5)), pytest.approx(-2 * 0.5))


def clients(*means: list[float]) -> ClassStatistics:
    n = 50.0
    counts = np.full((len(means), len(means[0])), n)
    return ClassStatistics(
        counts, n * np.array(means)[..., None], np.full((len(means[0]), 1, 1), len(means) * (n - 1))
    )


def test_permuted_labels_are_explained_and_shifted_inputs_are_not() -> None:
    rng = np.random.default_rng(0)
    assert explained(clients([0, 10, 20], [10, 0, 20]), 10, rng) == 1
    assert explained(clients([0, 10, 20], [0 + 35, 10 + 35, 20 + 35]), 10, rng) < 0.1


def test_without_a_shared_label_the_result_is_none() -> None:
    apart = ClassStatistics(
        np.array([[9.0, 0.0], [0.0, 9.0]]), np.ones((2, 2, 1)), np.ones((2, 1, 1))
    )
    assert explained(apart, 10, np.random.default_rng(0)) is None
