"""CFL's Theorem 1: the bounds hold for drawn gradients, and the worst cases reach them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedclade.clustering.cfl import bipartition, separation_gap
from fedclade.clustering.cfl_theorem import (
    cross_bound,
    gap_bound,
    intra_bound,
    relative_noise,
    similarity_of_noisy_copies,
)
from fedclade.errors import InvalidInputError
from fedclade.reproduce.studies.cfl_updates import Directions

Floats = NDArray[np.float64]
Groups = NDArray[np.int64]


def cosines(vectors: Floats) -> Floats:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = np.clip(unit @ unit.T, -1, 1)
    return np.asarray((similarity + similarity.T) / 2)


@st.composite
def stationary(draw: st.DrawFn, most_noise: float = 0.999) -> tuple[Floats, Floats, Groups]:
    """Gradients of the clients and of the groups. A positive combination of the latter is 0; a
    client's noise is γ_i times as long, in a random direction or in the worst one.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kinds, dimensions = draw(st.integers(2, 6)), draw(st.integers(2, 12))
    true = rng.standard_normal((kinds, dimensions))
    weight = rng.uniform(0.2, 3, kinds)
    true[-1] = -(weight[:-1] @ true[:-1]) / weight[-1]
    groups = np.repeat(np.arange(kinds), rng.integers(1, 4, kinds))
    direction = rng.standard_normal((len(groups), dimensions))
    if draw(st.booleans()):  # toward or away from another group's gradient
        sign = rng.choice([-1.0, 1.0], len(groups))
        direction = sign[:, None] * true[rng.integers(0, kinds, len(groups))]
    noise = most_noise * rng.uniform(0, 1, len(groups))
    length = noise * np.linalg.norm(true, axis=1)[groups]
    direction *= (length / np.linalg.norm(direction, axis=1))[:, None]
    return true[groups] + direction, true, groups


@settings(max_examples=300, deadline=None)
@given(stationary())
def test_the_bounds_hold(case: tuple[Floats, Floats, Groups]) -> None:
    gradients, _, groups = case
    noise, similarity = relative_noise(*case), cosines(gradients)
    inside = [
        similarity[i, j] for i in range(len(groups)) for j in range(i) if groups[i] == groups[j]
    ]
    assert min(inside, default=1.0) >= intra_bound(noise, groups) - 1e-9
    assert bipartition(similarity)[1] <= cross_bound(noise, groups) + 1e-9
    assert separation_gap(similarity, groups) >= gap_bound(noise, groups) - 1e-9


@settings(max_examples=100, deadline=None)
@given(stationary(most_noise=math.sin(math.pi / 20)))
def test_with_little_noise_the_bounds_promise_something(
    case: tuple[Floats, Floats, Groups],
) -> None:
    """Below sin(π / (4 (k − 1))), here for 6 groups, the theorem promises a gap above 0."""
    gradients, _, groups = case
    bound = gap_bound(relative_noise(*case), groups)
    assert bound > 0
    assert separation_gap(cosines(gradients), groups) >= bound - 1e-9


def rotated(vector: Floats, angle: float) -> Floats:
    cos, sin = math.cos(angle), math.sin(angle)
    return np.array([[cos, -sin], [sin, cos]]) @ vector


@pytest.mark.parametrize(("first", "second"), [(0.1, 0.1), (0.3, 0.6), (0.0, 0.5)])
def test_two_groups_reach_the_bounds(first: float, second: float) -> None:
    """The worst noise is perpendicular to the noisy gradient, and turns it by arcsin γ."""
    true, groups = np.array([[2.0, 0.0], [-5.0, 0.0]]), np.array([0, 0, 1])
    sizes = (first, second, second)
    turns = (math.asin(first), -math.asin(second), -math.asin(second))
    gradients = np.array(
        [
            math.sqrt(1 - size**2) * rotated(true[group], turn)
            for group, size, turn in zip(groups, sizes, turns, strict=True)
        ]
    )
    noise = relative_noise(gradients, true, groups)
    np.testing.assert_allclose(noise, sizes, atol=1e-12)
    similarity = cosines(gradients)
    assert similarity[0, 1] == pytest.approx(intra_bound(noise, groups))
    assert similarity[0, 2] == pytest.approx(-similarity_of_noisy_copies(noise)[0, 2])
    assert cross_bound(noise, groups) >= similarity[0, 2] - 1e-12


def test_three_groups_almost_reach_the_bound_without_noise() -> None:
    # Angles of almost 0, 90 and 180 degrees; a positive combination is 0 because the first and the
    # last are below the horizontal axis.
    angles = np.array([-0.01, math.pi / 2, math.pi + 0.01])
    true, groups = np.stack([np.cos(angles), np.sin(angles)], 1), np.arange(3)
    assert cross_bound(np.zeros(3), groups) == pytest.approx(0.0)  # cos(π / 2)
    assert bipartition(cosines(true))[1] == pytest.approx(0.0, abs=0.011)


@pytest.mark.parametrize("kinds", [2, 3, 4, 5, 10])
def test_one_noise_for_all_gives_the_bound_of_the_study(kinds: int) -> None:
    groups, limit = np.repeat(np.arange(kinds), 3), Directions(groups=kinds).bound()
    assert gap_bound(np.full(3 * kinds, limit), groups) == pytest.approx(0.0, abs=1e-12)
    assert gap_bound(np.full(3 * kinds, 0.99 * limit), groups) > 0
    assert gap_bound(np.full(3 * kinds, 1.01 * limit), groups) < 0


def test_bounds_by_hand() -> None:
    noise, groups = np.array([0.6, 0.8, 0.0]), np.array([0, 0, 1])
    # H_01 = −0.48 + 0.8 · 0.6 = 0; H_02 = 0.8; H_12 = 0.6
    by_hand = [[0.28, 0, 0.8], [0, -0.28, 0.6], [0.8, 0.6, 1]]
    np.testing.assert_allclose(similarity_of_noisy_copies(noise), by_hand, atol=1e-15)
    assert intra_bound(noise, groups) == pytest.approx(0.0)
    assert cross_bound(noise, groups) == pytest.approx(-0.6)  # Eq. 22
    assert gap_bound(noise, groups) == pytest.approx(0.6)
    assert intra_bound(noise, np.arange(3)) == 1.0  # no pair inside a group
    # Three groups: cos(π/2) H + sin(π/2) √(1 − H²) with the least H_ij = 0, Eq. 19.
    assert cross_bound(noise, np.arange(3)) == pytest.approx(1.0)
    # Four groups with the least H_ij below cos(π/3): no bound.
    assert cross_bound(np.full(4, 0.6), np.arange(4)) == 1.0


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: similarity_of_noisy_copies(np.array([1.0])), "noise"),
        (lambda: similarity_of_noisy_copies(np.array([-0.1])), "noise"),
        (lambda: cross_bound(np.zeros(2), np.zeros(2, int)), "groups"),
        (
            lambda: relative_noise(np.ones((1, 2)), np.zeros((1, 2)), np.zeros(1, int)),
            "true_gradients",
        ),
    ],
)
def test_what_the_theorem_does_not_cover_is_rejected(call: Any, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        call()
    assert caught.value.field == field
