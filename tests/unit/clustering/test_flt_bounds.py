"""FLT's Appendix D against draws of codes, and against gradient descent on quadratic losses."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from fedclade.clustering.flt_bounds import (
    clustering_error,
    clustering_error_bound,
    gap_bound,
    label_error,
    label_error_bound,
    largest_step,
    mixing_norm,
    rate_constant,
)
from fedclade.errors import InvalidInputError

Array = NDArray[np.float64]


# --- D.1


def test_one_sample_has_the_error_of_the_encoder() -> None:
    assert label_error(0.1, np.array([1])) == pytest.approx([0.1])


@pytest.mark.parametrize("n", [2, 5, 20])
def test_the_mean_of_n_codes_errs_as_often_as_said(n: int) -> None:
    """200,000 draws: 0.3 = P(y > γ) for y ~ N(0, 1). With the printed n instead of √n the error of
    5 samples would be 0.0044 instead of 0.12.
    """
    threshold = 0.5244005127080409  # Q⁻¹(0.3)
    means = np.random.default_rng(n).normal(size=(200_000, n)).mean(1)
    assert label_error(0.3, np.array([n]))[0] == pytest.approx(
        (means > threshold).mean(), abs=4 / np.sqrt(200_000) / 2
    )


def test_errors_of_clients_add_up() -> None:
    counts = np.array([[4, 0, 9], [0, 2, 0]])  # Q⁻¹ = 1 at 0.15866
    p = 0.15865525393145707
    by_label = label_error(p, np.array([4, 9, 2]))  # Q(2), Q(3), Q(√2)
    assert by_label == pytest.approx([0.0227501, 0.0013499, 0.0786496], abs=1e-7)
    expected = 1 - (1 - 0.0227501) * (1 - 0.0013499) * (1 - 0.0786496)
    assert clustering_error(p, counts) == pytest.approx(expected, abs=1e-6)
    bound = np.exp(-2) + np.exp(-4.5) + np.exp(-1)
    assert clustering_error_bound(p, counts) == pytest.approx(bound)


@pytest.mark.parametrize("p", [0.01, 0.2, 0.49])
def test_bounds_are_above_the_errors_and_fall_with_the_samples(p: float) -> None:
    counts = np.arange(1, 200).reshape(1, -1)
    error, bound = label_error(p, counts), label_error_bound(p, counts)
    assert (error <= bound).all()
    assert (np.diff(error) < 0).all()
    assert clustering_error(p, counts) <= clustering_error_bound(p, counts)


@pytest.mark.parametrize("p", [0.0, 0.6])
def test_an_encoder_worse_than_chance_is_refused(p: float) -> None:
    with pytest.raises(InvalidInputError) as caught:
        label_error(p, np.array([1]))
    assert caught.value.field == "encoder_error"


# --- D.2


def groups(*sizes: int) -> Array:
    """The mean inside groups of these sizes."""
    A = np.zeros((sum(sizes), sum(sizes)))
    start = 0
    for size in sizes:
        A[start : start + size, start : start + size] = 1 / size
        start += size
    return A


class Quadratic:
    """F_i(w) = a_i ‖w − c_i‖² / 2, so L = max a_i."""

    def __init__(self, a: Array, c: Array) -> None:
        self.a, self.c = a[:, None], c

    def loss(self, W: Array) -> float:
        return float((self.a * (W - self.c) ** 2).sum() / 2)

    def gradient(self, W: Array) -> Array:
        return self.a * (W - self.c)

    def run(self, A: Array, W: Array, mu: float, rounds: int) -> list[Array]:
        path = [W]
        for _ in range(rounds):
            path.append(A @ (path[-1] - mu * self.gradient(path[-1])))
        return path


def mean_gap(path: list[Array]) -> float:
    steps = [((new - old) ** 2).sum() for old, new in pairwise(path)]
    return float(np.sum(steps) / len(steps) / len(path[0]))


def test_norms_and_steps_by_hand() -> None:
    assert mixing_norm(np.eye(3)) == 0
    assert mixing_norm(groups(2, 1)) == pytest.approx(1)
    assert mixing_norm(groups(4, 4)) == pytest.approx(1)
    assert rate_constant(np.eye(3), 0.5, 1.0) == pytest.approx(0.5)
    assert rate_constant(groups(2), 0.5, 1.0) == pytest.approx(1 - 0.5 - 0.25)
    assert largest_step(np.eye(3), 2.0) == pytest.approx(0.5)
    assert largest_step(groups(2), 1.0) == pytest.approx((np.sqrt(5) - 1) / 2)
    assert rate_constant(groups(2), largest_step(groups(2), 3.0), 3.0) == pytest.approx(0)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 2), (3, 1), (4,), (1, 3, 4)])
@pytest.mark.parametrize("share", [0.2, 0.9])
def test_theorem_1_holds_for_groups(sizes: tuple[int, ...], share: float) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        A, M = groups(*sizes), sum(sizes)
        problem = Quadratic(rng.uniform(0.1, 3.0, M), rng.normal(size=(M, 2)))
        L = float(problem.a.max())
        mu = share * largest_step(A, L)
        path = problem.run(A, np.zeros((M, 2)), mu, rounds=30)
        decrease = problem.loss(path[0]) - problem.loss(path[-1])
        assert 0 < mean_gap(path) <= gap_bound(A, mu, L, decrease, 30)


def test_lemma_1_and_equation_24_hold_for_groups_and_equation_25_does_not() -> None:
    """Two clients of one group with other optima: at the group's optimum there is no step, but the
    gradients of the clients are not 0, so no multiple of the step bounds them.
    """
    A, mu, L = groups(2), 0.5, 1.0
    problem = Quadratic(np.ones(2), np.array([[0.0], [2.0]]))
    for start in (0.0, 0.5, 1.0):
        old, new = problem.run(A, np.full((2, 1), start), mu, rounds=1)
        step, gradient = new - old, problem.gradient(old)
        rest = gradient - A @ gradient
        square = float((step**2).sum())
        assert (gradient * step).sum() == pytest.approx(-square / mu + float((rest * step).sum()))
        change = problem.loss(new) - problem.loss(old)
        assert change <= (-1 / (2 * mu) + L / 2) * square + mu / 2 * (rest**2).sum() + 1e-12
    assert square == pytest.approx(0)  # from 1.0, the group's optimum
    assert (rest**2).sum() == pytest.approx(2)


def test_theorem_1_fails_if_being_related_is_not_transitive() -> None:
    """Client 1 is related to both others. At the clients' own optima the loss is 0; mixing leaves
    them, so the loss rises while there is a step.
    """
    A = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1]]) / np.array([[2], [3], [2]])
    problem = Quadratic(np.ones(3), np.array([[0.0], [1.0], [5.0]]))
    mu = 0.5 * largest_step(A, 1.0)
    path = problem.run(A, problem.c, mu, rounds=1)
    bound = gap_bound(A, mu, 1.0, problem.loss(path[0]) - problem.loss(path[1]), 1)
    assert mean_gap(path) > 0 > bound


def test_steps_that_are_too_large_are_refused() -> None:
    with pytest.raises(InvalidInputError) as caught:
        gap_bound(groups(2), 0.7, 1.0, 1.0, 10)
    assert caught.value.field == "mu"
    with pytest.raises(InvalidInputError) as caught:
        mixing_norm(np.ones((2, 2)))
    assert caught.value.field == "A"
