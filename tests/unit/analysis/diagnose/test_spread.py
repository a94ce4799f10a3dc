"""Groups or individuals, from the tree of the clients' signatures."""

from __future__ import annotations

import numpy as np
import pytest

import fedclade as fc
from fedclade.analysis.diagnose import diagnose
from fedclade.analysis.diagnose.spread import spread_of
from fedclade.clustering.individuals import between_clients, widest_step
from fedclade.clustering.linkage import weighted_ward
from fedclade.data import Clients, from_arrays

CLIENTS, NUMBERS = 60, 5
N = np.full(CLIENTS, 100.0)


def noise(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=(CLIENTS, NUMBERS)) / np.sqrt(N)[:, None]


def test_widest_step_by_hand() -> None:
    # Points at 0, 1, 10, 12 with weight 1. Heights: 1/2, 4/2, then 2*2/4 * (11 - 0.5)².
    tree = weighted_ward(np.array([[0.0], [1.0], [10.0], [12.0]]), np.ones(4))
    assert tree[:, 2].tolist() == [0.5, 2.0, 110.25]
    assert widest_step(tree) == 110.25 / 2


@pytest.mark.parametrize("seed", range(5))
def test_groups_have_a_wider_step_than_individuals(seed: int) -> None:
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(4, NUMBERS)) * 2
    grouped = spread_of(centers[np.arange(CLIENTS) % 4] + noise(rng), N, rng)
    assert grouped.is_grouped
    assert grouped.step > 3 * grouped.largest
    assert grouped.p == 1 / 41


def test_individuals_rarely_look_like_groups() -> None:
    spreads = []
    for seed in range(30):
        rng = np.random.default_rng(seed)
        own = rng.normal(size=(CLIENTS, 2)) @ rng.normal(size=(2, NUMBERS))
        spreads.append(spread_of(own + noise(rng), N, rng))
    assert sum(spread.is_grouped for spread in spreads) <= 12  # 6 expected
    assert 0.3 < np.mean([spread.p for spread in spreads]) < 0.7


def test_the_variances_between_clients_are_without_noise() -> None:
    rng = np.random.default_rng(0)
    variance = np.array([4.0, 1.0, 0.0, 0.0, 0.0])
    many = np.full(2000, 100.0)
    z = rng.normal(size=(2000, 5)) * np.sqrt(variance + 1 / many[:, None])
    directions, found = between_clients(z, many)
    order = np.argsort(-found)
    assert found[order] == pytest.approx([4, 1], rel=0.1)
    assert np.abs(directions[:, order][[0, 1], [0, 1]]) == pytest.approx([1, 1], abs=0.02)


def shifted(offsets: np.ndarray) -> Clients:
    rng = np.random.default_rng(0)
    parts = []
    for offset in offsets:
        y = rng.integers(3, size=120)
        x = 2 * np.repeat(np.eye(3), 2, 1)[y] + rng.normal(size=(120, 6)) + offset
        parts.append((x.astype(np.float32), y))
    return from_arrays(parts)


def test_the_kind_of_individuals_and_of_groups() -> None:
    rng = np.random.default_rng(1)
    model = fc.models.MLP(16)
    own = diagnose(shifted(rng.normal(size=(24, 6))), model, device="cpu", probe_rounds=0)
    assert own.kind == "feature shift of individuals"
    assert own.group is None
    assert own.spread is not None
    assert not own.spread.is_grouped
    centers = rng.normal(size=(3, 6)) * 1.5
    few = diagnose(shifted(centers[np.arange(24) % 3]), model, device="cpu", probe_rounds=0)
    assert few.kind == "feature shift in groups"
    assert few.groups == 3
    assert few.spread is not None
    assert few.spread.is_grouped
