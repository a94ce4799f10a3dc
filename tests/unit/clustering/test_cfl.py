"""CFL's bipartition and separation gap, against loops and all bipartitions."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform

from fedclade.clustering.cfl import bipartition, separation_gap
from fedclade.errors import InvalidInputError

Floats = NDArray[np.float64]


@st.composite
def similarities(draw: st.DrawFn, least: int = 2, most: int = 8, ties: bool = True) -> Floats:
    clients, seed = draw(st.integers(least, most)), draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    coarse = ties and draw(st.booleans())
    upper = np.triu(
        (
            rng.integers(-2, 3, (clients, clients)) / 2
            if coarse
            else rng.uniform(-1, 1, (clients, clients))
        ),
        1,
    )
    return np.asarray(upper + upper.T + np.eye(clients))


# --- bipartition


def cross(similarity: Floats, side: NDArray[np.bool_]) -> float:
    return max(
        float(similarity[i, j]) for i, j in product(np.flatnonzero(side), np.flatnonzero(~side))
    )


@settings(max_examples=150, deadline=None)
@given(similarities())
def test_single_is_the_best_of_all_bipartitions(similarity: Floats) -> None:
    side, most = bipartition(similarity)
    sides = [
        np.array([False, *rest])
        for rest in product([False, True], repeat=len(similarity) - 1)
        if any(rest)
    ]
    assert most == min(cross(similarity, other) for other in sides)
    assert most == cross(similarity, side)
    assert side.dtype == bool
    assert not side[0]


@settings(max_examples=30, deadline=None)
@given(similarities(least=20, most=60, ties=False))
def test_single_is_single_linkage_at_two(similarity: Floats) -> None:
    tree = linkage(squareform(1 - similarity, checks=False), "single")
    side, most = bipartition(similarity)
    assert most == pytest.approx(1 - tree[-1, 2])
    low = {*_leaves(tree, int(tree[-1, 0]))}
    assert set(np.flatnonzero(side).tolist()) in (low, set(range(len(side))) - low)


def _leaves(tree: Floats, node: int) -> list[int]:
    clients = len(tree) + 1
    return (
        [node]
        if node < clients
        else [leaf for part in tree[node - clients, :2] for leaf in _leaves(tree, int(part))]
    )


@settings(max_examples=80, deadline=None)
@given(similarities(ties=False))
def test_complete_joins_the_clusters_whose_least_similarity_is_greatest(similarity: Floats) -> None:
    clusters = [[i] for i in range(len(similarity))]
    while len(clusters) > 2:
        pairs = [(a, b) for a in range(len(clusters)) for b in range(a)]
        a, b = max(
            pairs,
            key=lambda p: min(similarity[i, j] for i in clusters[p[0]] for j in clusters[p[1]]),
        )
        clusters[b] += clusters.pop(a)
    side, most = bipartition(similarity, "complete")
    assert set(np.flatnonzero(~side).tolist()) == set(next(c for c in clusters if 0 in c))
    assert most == cross(similarity, side)


@pytest.mark.parametrize("linkage_", ["single", "complete"])
def test_two_planted_groups(linkage_: Any) -> None:
    group = np.random.default_rng(0).permutation(np.arange(30) % 2)
    noise = np.random.default_rng(1).uniform(-0.1, 0.1, (30, 30))
    similarity = np.where(group[:, None] == group, 0.7, 0.2) + (noise + noise.T)
    side, most = bipartition(similarity, linkage_)
    assert np.array_equal(side, group != group[0])
    assert most == similarity[group == 0][:, group == 1].max()


def test_single_follows_a_chain_where_complete_does_not() -> None:
    place = np.array([0, 1, 2.1, 3.3, 4.6, 6.1])
    similarity = -np.abs(place[:, None] - place)
    side, most = bipartition(similarity)
    assert side.tolist() == [False] * 5 + [True]
    assert most == pytest.approx(-1.5)
    side, most = bipartition(similarity, "complete")
    assert side.tolist() == [False] * 4 + [True] * 2
    assert most == pytest.approx(-1.3)


@pytest.mark.parametrize("linkage_", ["single", "complete"])
def test_equal_similarities_are_split_too(linkage_: Any) -> None:
    side, most = bipartition(np.full((4, 4), 0.5), linkage_)
    assert 0 < side.sum() < 4
    assert most == 0.5


@pytest.mark.parametrize("linkage_", ["single", "complete"])
@settings(max_examples=60, deadline=None)
@given(similarities(least=3))
def test_the_choice_among_several_optima_is_deterministic(
    linkage_: Any, similarity: Floats
) -> None:
    side, _ = bipartition(similarity, linkage_)
    for same in (similarity.copy(), np.asfortranarray(similarity), similarity.astype(np.float64)):
        assert np.array_equal(bipartition(same, linkage_)[0], side)


def test_single_chooses_this_one_of_equal_similarities() -> None:
    """Pinned: a split must not depend on the version of a library."""
    assert bipartition(np.full((4, 4), 0.5))[0].tolist() == [False, False, False, True]
    # Two pairs with equal similarities between them.
    pairs = np.array([[1, 0.9, 0, 0], [0.9, 1, 0, 0], [0, 0, 1, 0.9], [0, 0, 0.9, 1]])
    assert bipartition(pairs)[0].tolist() == [False, False, True, True]
    # A chain whose links are all 0.5: each of the three is a weakest link.
    chain = np.eye(4) + 0.5 * (np.eye(4, k=1) + np.eye(4, k=-1))
    assert bipartition(chain)[0].tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("similarity", "linkage_", "field", "value"),
    [
        (np.ones((1, 1)), "single", "similarity.shape", "(1, 1)"),
        (np.ones((2, 3)), "single", "similarity.shape", "(2, 3)"),
        (np.array([[1, np.nan], [np.nan, 1]]), "single", "similarity", "NaN"),
        (np.array([[1, 0.5], [0.4, 1]]), "single", "similarity", "0.1"),
        (np.ones((2, 2)), "ward", "linkage", "'ward'"),
    ],
)
def test_bipartition_refuses(similarity: Floats, linkage_: Any, field: str, value: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        bipartition(similarity, linkage_)
    assert caught.value.field == field
    assert value in str(caught.value)


# --- separation gap


@pytest.mark.parametrize("kinds", [1, 2, 3, 4])
@settings(max_examples=40, deadline=None)
@given(similarities(), st.data())
def test_gap_is_that_of_all_bipartitions(
    kinds: int, similarity: Floats, data: st.DataObject
) -> None:
    clients = len(similarity)
    groups = np.array(
        data.draw(st.lists(st.integers(0, kinds - 1), min_size=clients, max_size=clients))
    )
    inside = [
        float(similarity[i, j])
        for i, j in product(range(clients), repeat=2)
        if groups[i] == groups[j]
    ]  # with i = j, whose similarity is 1
    sides = (
        np.array([False, *rest]) for rest in product([False, True], repeat=clients - 1) if any(rest)
    )
    gap = separation_gap(similarity, groups)
    assert gap == min(inside) - min(cross(similarity, side) for side in sides)
    if len(set(groups.tolist())) == 1:
        assert gap <= 0


def test_gap_by_hand() -> None:
    # The optimal bipartition is {0, 1}, {2}: α_cross^max = 0.3.
    similarity = np.array([[1, 0.8, 0.1], [0.8, 1, 0.3], [0.1, 0.3, 1]])
    assert separation_gap(similarity, np.array([0, 0, 1])) == pytest.approx(0.5)
    assert separation_gap(similarity, np.array([0, 1, 1])) == pytest.approx(0.0)
    assert separation_gap(similarity, np.array([0, 0, 0])) == pytest.approx(-0.2)  # a pure cluster
    assert separation_gap(similarity, np.array([0, 1, 2])) == pytest.approx(0.7)  # nothing inside


def test_the_gap_of_three_groups_is_not_over_pairs_of_groups() -> None:
    """Two of three groups are alike: a bipartition keeps them together, and the gap is large."""
    group = np.repeat([0, 1, 2], 2)
    similarity = np.full((6, 6), -0.5)
    similarity[:4, :4] = 0.6  # groups 0 and 1
    similarity[group[:, None] == group] = 0.7
    np.fill_diagonal(similarity, 1)
    assert separation_gap(similarity, group) == pytest.approx(1.2)


def test_a_gap_above_zero_keeps_the_bipartition_inside_groups() -> None:
    """CFL's guarantee: with g(α) > 0 no group is on both sides."""
    rng = np.random.default_rng(3)
    group = rng.integers(0, 4, 25)
    base = rng.uniform(-0.2, 0.2, (25, 25))
    similarity = np.where(group[:, None] == group, 0.6, 0.1) + base + base.T
    similarity = np.where(
        group[:, None] == group, np.maximum(similarity, 0.6), np.minimum(similarity, 0.5)
    )
    assert separation_gap(similarity, group) > 0
    side, _ = bipartition(similarity)
    assert not set(group[side]) & set(group[~side])


def test_gap_refuses() -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "groups.shape"):
        separation_gap(np.ones((3, 3)), np.array([0, 1]))
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "similarity.shape"):
        separation_gap(np.ones((1, 1)), np.array([0]))  # one client has no bipartition
