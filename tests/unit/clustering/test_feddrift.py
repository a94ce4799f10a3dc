"""FedDrift's merge rule, by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from fedclade.clustering.feddrift import merge_groups
from fedclade.errors import InvalidInputError

# Model 0 loses 0.1 on group 1's clients and model 1 loses 0.2 on group 0's: their distance is 0.2.
# Model 2 is good for everybody, but models 0 and 1 lose 0.9 and 0.3 on its clients.
THREE = np.array([[0.5, 0.6, 1.4], [0.6, 0.4, 0.7], [0.3, 0.3, 0.3]])


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.15, [0, 1, 2]), (0.25, [0, 0, 1]), (0.5, [0, 0, 1]), (1.0, [0, 0, 0])],
)
def test_three_groups_by_hand(threshold: float, expected: list[int]) -> None:
    """At 0.5 groups 1 and 2 (0.3) are close, but 0 and 2 (0.9) are not: complete linkage."""
    assert merge_groups(THREE, threshold).tolist() == expected


def test_the_threshold_itself_is_too_far() -> None:
    two = np.array([[0.0, 0.25], [0.0, 0.0]])
    assert merge_groups(two, 0.25).tolist() == [0, 1]
    assert merge_groups(two, 0.26).tolist() == [0, 0]


def test_the_worse_direction_counts() -> None:
    one_sided = np.array([[1.0, 0.2], [3.0, 0.5]])
    assert merge_groups(one_sided, 2.0).tolist() == [0, 1]
    assert merge_groups(one_sided.T, 0.9).tolist() == [0, 1]


def test_one_group_stays() -> None:
    assert merge_groups(np.array([[0.3]]), 0.1).tolist() == [0]


@pytest.mark.parametrize(
    ("losses", "threshold", "field"),
    [
        (np.ones((2, 3)), 0.1, "losses.shape"),
        (np.ones((0, 0)), 0.1, "losses.shape"),
        (np.array([[np.nan]]), 0.1, "losses"),
        (np.ones((2, 2)), 0.0, "threshold"),
    ],
)
def test_invalid_inputs(losses: NDArray[np.float64], threshold: float, field: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        merge_groups(losses, threshold)
    assert error.value.field == field
