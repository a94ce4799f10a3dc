"""Distances between sets of points, compared with loops over pairs, points and permutations."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from fedclade.clustering import set_distances
from fedclade.clustering.set_distances import distances, distances_to
from fedclade.errors import InvalidInputError

Floats = NDArray[np.float64]
KINDS = ("matching", "min", "chamfer")


@st.composite
def point_sets(draw: st.DrawFn) -> tuple[Floats, NDArray[np.int64]]:
    """Clients with 1 … k points each. The other points are NaN. Coordinates are often equal, so
    that there are ties.
    """
    clients, k, d = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    points = (
        rng.integers(-3, 4, (clients, k, d)).astype(float)
        if draw(st.booleans())
        else rng.normal(size=(clients, k, d))
    )
    counts = rng.integers(1, k + 1, clients)
    points[np.arange(k) >= counts[:, None]] = np.nan
    return points, counts


def slow(a: Floats, b: Floats, kind: str) -> float:
    if len(a) > len(b):
        a, b = b, a
    if kind == "min":
        return float(min(np.linalg.norm(p - q) for p in a for q in b))
    if kind == "chamfer":
        forward = np.mean([min(np.linalg.norm(p - q) for q in b) for p in a])
        backward = np.mean([min(np.linalg.norm(p - q) for p in a) for q in b])
        return float((forward + backward) / 2)
    sums = [
        sum(((p - b[s]) ** 2).sum() for p, s in zip(a, match, strict=True))
        for match in permutations(range(len(b)), len(a))
    ]
    return float(np.sqrt(min(sums)) / len(a))


@settings(max_examples=150, deadline=None)
@given(point_sets(), st.sampled_from(KINDS), st.sampled_from([1, 2, 5, 256]))
def test_distances_are_those_of_a_loop_over_pairs(
    sets: tuple[Floats, NDArray[np.int64]], kind: Any, block: int
) -> None:
    points, counts = sets
    actual = distances(points, counts, kind, block)
    for i, j in np.ndindex(actual.shape):
        expected = 0.0 if i == j else slow(points[i, : counts[i]], points[j, : counts[j]], kind)
        assert actual[i, j] == pytest.approx(expected, abs=1e-12)
    assert np.array_equal(actual, actual.T)
    assert not actual.diagonal().any()


@settings(max_examples=50, deadline=None)
@given(point_sets(), st.sampled_from(KINDS), st.data())
def test_distances_to_others_are_the_same(
    sets: tuple[Floats, NDArray[np.int64]], kind: Any, data: st.DataObject
) -> None:
    points, counts = sets
    new = data.draw(st.integers(1, len(points)))
    actual = distances_to(points[:new], counts[:new], points, counts, kind)
    for i, j in np.ndindex(actual.shape):
        assert actual[i, j] == pytest.approx(
            slow(points[i, : counts[i]], points[j, : counts[j]], kind), abs=1e-12
        )


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6))
def test_matching_is_the_optimal_assignment(k: int, most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, counts = rng.normal(size=(4, max(k, most), 2)), np.array([k, most, k, most])
    actual = distances(points, counts)
    for i, j in [(0, 1), (0, 2), (1, 3)]:
        squares = ((points[i, : counts[i], None] - points[j, None, : counts[j]]) ** 2).sum(-1)
        assert actual[i, j] == pytest.approx(
            np.sqrt(squares[linear_sum_assignment(squares)].sum()) / min(counts[i], counts[j])
        )


def test_a_tile_is_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    points = np.random.default_rng(0).normal(size=(40, 3, 2))  # 1,600 pairs in a tile
    whole = distances(points)
    monkeypatch.setattr(set_distances, "TABLE", 1)  # 512 pairs at a time, the last slice shorter
    assert np.array_equal(distances(points), whole)


def test_by_hand() -> None:
    points = np.array([[[0.0], [10.0]], [[12.0], [1.0]]])
    assert distances(points)[0, 1] == pytest.approx(np.sqrt(1 + 4) / 2)
    assert distances(points, kind="min")[0, 1] == 1
    assert distances(points, kind="chamfer")[0, 1] == 1.5


def test_the_nearest_point_is_not_always_the_match() -> None:
    points = np.array([[[0.0], [1.0]], [[1.1], [5.0]]])
    # Matching 1 with 1.1 would leave 0 with 5.
    assert distances(points)[0, 1] == pytest.approx(np.sqrt(1.1**2 + 4**2) / 2)


def test_the_smaller_set_is_matched_into_the_larger_in_any_order() -> None:
    points = np.array([[[3.0], [1.0]], [[0.0], [np.nan]]])
    counts = np.array([2, 1])
    assert distances(points, counts).tolist() == [[0, 1], [1, 0]]
    assert distances(points, counts, "chamfer")[0, 1] == (1 + (3 + 1) / 2) / 2


def test_order_of_points_and_clients_does_not_matter() -> None:
    rng = np.random.default_rng(1)
    points, counts = rng.normal(size=(9, 5, 2)), rng.integers(1, 6, 9)
    shuffled = np.stack(
        [
            np.concatenate([rng.permutation(p[:c]), p[c:]])
            for p, c in zip(points, counts, strict=True)
        ]
    )
    order = rng.permutation(9)
    for kind in KINDS:
        expected = distances(points, counts, kind)[np.ix_(order, order)]
        np.testing.assert_allclose(
            distances(shuffled[order], counts[order], kind, block=2), expected, atol=1e-12
        )


def test_the_printed_formula_connects_groups_that_the_matching_separates() -> None:
    """Scenario 2: neighboring groups share a class, so their least distance is 0."""
    points = np.array([[[0.0, 0], [9, 0]], [[9.0, 0], [9, 9]]])
    assert distances(points, kind="min")[0, 1] == 0
    # Both matchings have the same sum of squares.
    assert distances(points)[0, 1] == pytest.approx(np.sqrt(2 * 81) / 2)


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"points": np.zeros((3, 2))}, "points.shape", "(3, 2)"),
        ({"points": np.zeros((0, 2, 2))}, "points.shape", "(0, 2, 2)"),
        ({"points": np.zeros((3, 2, 2)), "counts": np.array([1, 2])}, "counts.shape", "(2,)"),
        ({"points": np.zeros((3, 2, 2)), "counts": np.array([1, 3, 2])}, "counts", "[3]"),
        ({"points": np.zeros((3, 2, 2)), "counts": np.array([1, 0, 2])}, "counts", "[0]"),
        ({"points": np.full((3, 2, 2), np.nan)}, "points", "NaN"),
        ({"points": np.zeros((3, 13, 2))}, "counts", "at most 12"),
        ({"points": np.zeros((3, 2, 2)), "kind": "mean"}, "kind", "'mean'"),
        ({"points": np.zeros((3, 2, 2)), "block": 0}, "block", "0"),
    ],
)
def test_invalid_input_is_named(arguments: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        distances(**arguments)
    assert caught.value.field == field
    assert value in str(caught.value)


def test_only_the_matching_limits_the_number_of_points() -> None:
    assert distances(np.zeros((2, 13, 1)), kind="min").tolist() == [[0, 0], [0, 0]]
    assert distances(np.zeros((2, 13, 1)), np.array([12, 2])).tolist() == [[0, 0], [0, 0]]
