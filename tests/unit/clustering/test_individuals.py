"""Groups of clients, and individuals that differ each in its own way."""

from __future__ import annotations

import numpy as np
import pytest

from fedclade.clustering.individuals import are_grouped, between_clients, widest_step

WHITE = np.eye(16)


def clients(kind: str, rng: np.random.Generator, count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Means of 16 numbers and sizes. Clients differ in three directions, by four standard errors of
    a client of mean size.
    """
    n = rng.integers(20, 200, count).astype(float)
    centers = rng.normal(size=(4, 3)) * 4 / np.sqrt(n.mean())
    own = rng.normal(size=(count, 3)) * 4 / np.sqrt(n.mean())
    where = {"groups": centers[np.arange(count) % 4] * 3, "individuals": own, "equal": 0 * own}[
        kind
    ]
    means = rng.normal(size=(count, 16)) / np.sqrt(n)[:, None]
    means[:, :3] += where
    return means, n


@pytest.mark.parametrize(
    ("kind", "least", "most"), [("groups", 18, 20), ("individuals", 0, 2), ("equal", 0, 2)]
)
def test_groups_are_told_from_individuals(kind: str, least: int, most: int) -> None:
    rng = np.random.default_rng(0)
    found = sum(are_grouped(*clients(kind, rng), WHITE, seed) for seed in range(20))
    assert least <= found <= most


def test_the_whitener_may_have_directions_without_variance() -> None:
    rng = np.random.default_rng(1)
    means, n = clients("groups", rng)
    wide = np.concatenate([means, np.zeros((len(means), 4))], 1)
    whitener = np.diag([1.0] * 16 + [1e3] * 4)  # a covariance of almost 0
    assert are_grouped(wide, n, whitener, 0)


def test_few_clients_cannot_show_groups() -> None:
    means, n = clients("groups", np.random.default_rng(2), count=7)
    assert not are_grouped(means, n, WHITE, 0)


def test_many_clients_are_sampled() -> None:
    means, n = clients("groups", np.random.default_rng(3), count=2000)
    assert are_grouped(means, n, WHITE, 0)


def test_the_directions_of_the_differences_are_found() -> None:
    rng = np.random.default_rng(4)
    means, n = clients("individuals", rng, count=400)
    directions, variances = between_clients(means, n)
    assert len(variances) == 3
    np.testing.assert_allclose(variances, 16 / n.mean(), rtol=0.25)
    assert np.abs(directions[3:]).max() < 0.1
    equal, n = clients("equal", rng, count=400)
    assert len(between_clients(equal, n)[1]) <= 1


def test_the_widest_step_by_hand() -> None:
    # Points 0, 1, 10 and 11 with n = 1: merges at 1/2 twice, then at 100.
    tree_step = widest_step(np.array([[0, 1, 0.5, 2], [2, 3, 0.5, 2], [4, 5, 100.0, 4]]))
    assert tree_step == 200.0
