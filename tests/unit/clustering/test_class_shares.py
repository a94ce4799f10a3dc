"""Class shares of clients, and merging groups that differ in them alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedclade.clustering.class_shares import concentration, merge_by_class_means


def moments(counts: np.ndarray) -> tuple[np.ndarray, float, float, float, float]:
    """The arguments of `concentration`, from (clients, classes) counts."""
    n = counts.sum(1)
    same_class = (counts * (counts - 1)).sum(1) / (n - 1)
    noise = float((n / (n - 1)).sum())
    squares = float((counts**2).sum()), float((n**2).sum())
    return counts.sum(0).astype(float), float(same_class.sum()), *squares, noise


def drawn(kappa: float, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Counts of clients of 20 to 100 samples of ten classes."""
    prior = rng.dirichlet(np.full(10, 5.0))
    shares = (
        rng.dirichlet(kappa * prior, clients)
        if math.isfinite(kappa)
        else np.tile(prior, (clients, 1))
    )
    sizes = rng.integers(20, 101, clients)
    return np.stack([rng.multinomial(n, share) for n, share in zip(sizes, shares, strict=True)])


@pytest.mark.parametrize("kappa", [0.3, 1.0, 5.0, 20.0])
def test_kappa_of_drawn_clients_is_found(kappa: float) -> None:
    rng = np.random.default_rng(0)
    found = [concentration(*moments(drawn(kappa, 200, rng))) for _ in range(20)]
    assert np.median(found) == pytest.approx(kappa, rel=0.15)


def test_equal_clients_have_no_class_prior() -> None:
    rng = np.random.default_rng(1)
    found = [concentration(*moments(drawn(math.inf, 40, rng))) for _ in range(300)]
    assert sum(math.isfinite(kappa) for kappa in found) <= 3  # three standard errors


def test_one_class_for_each_client_is_the_strongest_difference() -> None:
    kappa = concentration(*moments(np.eye(10, dtype=int) * 30))
    assert 0 < kappa < 0.01


def test_one_class_for_all_gives_no_prior() -> None:
    counts = np.zeros((5, 3), int)
    counts[:, 1] = 20
    assert concentration(*moments(counts)) == math.inf


def groups_of(
    kinds: list[int], counts: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Counts and sums of groups; the class-conditional means of a kind differ from the others'."""
    means = rng.normal(scale=3.0, size=(max(kinds) + 1, counts.shape[1], 4))
    noise = rng.normal(size=(*counts.shape, 4)) * np.sqrt(counts)[..., None]
    return counts, counts[..., None] * means[kinds] + noise


def test_groups_that_differ_in_class_shares_alone_are_merged() -> None:
    rng = np.random.default_rng(2)
    for _ in range(20):
        counts = rng.integers(0, 60, (6, 5)) * (rng.random((6, 5)) < 0.7)
        counts, sums = groups_of([0] * 6, counts, rng)
        assert merge_by_class_means(counts, sums, np.eye(4), seed=0).tolist() == [0] * 6


def test_groups_of_two_kinds_are_not_merged() -> None:
    rng = np.random.default_rng(3)
    kinds = [0, 1, 0, 1, 0, 1]
    for _ in range(20):
        counts, sums = groups_of(kinds, rng.integers(20, 60, (6, 5)), rng)
        assert merge_by_class_means(counts, sums, np.eye(4), seed=0).tolist() == kinds


def test_groups_without_a_class_in_common_are_merged() -> None:
    counts = np.array([[30, 30, 0, 0], [0, 0, 30, 30]])
    sums = np.random.default_rng(4).normal(size=(2, 4, 4)) * counts[..., None]
    assert merge_by_class_means(counts, sums, np.eye(4), seed=0).tolist() == [0, 0]


def test_the_whitener_sets_the_scale() -> None:
    rng = np.random.default_rng(5)
    counts, sums = groups_of([0, 1], np.full((2, 3), 40), rng)
    tenfold = merge_by_class_means(counts, 10 * sums, np.eye(4) / 10, seed=0)
    assert (
        tenfold.tolist() == merge_by_class_means(counts, sums, np.eye(4), seed=0).tolist() == [0, 1]
    )
    assert merge_by_class_means(counts, sums, np.eye(4) / 100, seed=0).tolist() == [0, 0]
