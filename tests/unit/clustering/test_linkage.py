"""Linkage trees and their cuts, compared with a greedy search that recomputes everything, and by
hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.cluster.hierarchy import fcluster, is_valid_linkage
from scipy.spatial.distance import cdist

from fedclade.clustering import linkage as linkage_module
from fedclade.clustering.linkage import (
    cut_gap,
    cut_height,
    cut_number,
    cut_ratio,
    linkage,
    micro_clusters,
    weighted_ward,
)
from fedclade.errors import InvalidInputError

Floats = NDArray[np.float64]
Clusters = list[list[int]]


def replay(tree: Floats, merges: int) -> Clusters:
    """The clusters after the first merges, each a sorted list of clients, in the order of their
    first client.
    """
    nodes: dict[int, list[int]] = {i: [i] for i in range(len(tree) + 1)}
    for s, (a, b) in enumerate(tree[:merges, :2].astype(int).tolist()):
        nodes[len(tree) + 1 + s] = sorted(nodes.pop(a) + nodes.pop(b))
    return sorted(nodes.values())


def as_clusters(labels: NDArray[np.int64]) -> Clusters:
    """The clusters of labels, which must be numbered by first appearance."""
    clusters: Clusters = [
        np.flatnonzero(labels == c).tolist() for c in range(int(labels.max()) + 1)
    ]
    assert clusters == sorted(clusters)
    return clusters


def is_greedy(tree: Floats, cost: Any, slack: float) -> None:
    """Check that every merge has the cost of its parts as height, and is the cheapest. All costs
    are recomputed. The check holds for any order of ties.
    """
    clients = len(tree) + 1
    nodes: dict[int, list[int]] = {i: [i] for i in range(clients)}
    for s, (a, b, height, count) in enumerate(tree.tolist()):
        costs = {(i, j): cost(nodes[i], nodes[j]) for i in nodes for j in nodes if i < j}
        assert height == pytest.approx(costs[int(a), int(b)], rel=slack, abs=slack)
        assert height <= min(costs.values()) * (1 + slack) + slack
        nodes[clients + s] = nodes.pop(int(a)) + nodes.pop(int(b))
        assert count == len(nodes[clients + s])
    assert (np.diff(tree[:, 2]) >= 0).all()


# --- linkage


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(0, 10**6),
    st.sampled_from(["single", "average", "complete", "ward"]),
)
def test_linkage_is_greedy(clients: int, seed: int, method: Any) -> None:
    points = np.random.default_rng(seed).normal(size=(clients, 3))
    distance = cdist(points, points)

    def cost(a: list[int], b: list[int]) -> float:
        if method == "ward":
            return float(
                np.sqrt(2 * len(a) * len(b) / (len(a) + len(b)))
                * np.linalg.norm(points[a].mean(0) - points[b].mean(0))
            )
        between = distance[np.ix_(a, b)]
        return float(
            {"single": between.min, "average": between.mean, "complete": between.max}[method]()
        )

    tree = linkage(distance, method)
    assert tree.shape == (clients - 1, 4)
    is_greedy(tree, cost, 1e-9)


def test_linkage_refuses() -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "method"):
        linkage(np.zeros((2, 2)), "centroid")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "distance"):
        linkage(np.array([[0.0, 1], [2, 0]]), "single")


# --- weighted Ward


@st.composite
def weighted_points(draw: st.DrawFn) -> tuple[Floats, Floats]:
    clients, e = draw(st.integers(1, 10)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    ties = draw(st.booleans())
    points = (
        rng.integers(0, 3, (clients, e)).astype(float) if ties else rng.normal(size=(clients, e))
    )
    weight = (
        rng.integers(1, 4, clients).astype(float) if ties else np.exp(rng.normal(size=clients) * 3)
    )
    return points + draw(st.sampled_from([0.0, 0.0, 1000.0])), weight


def ward_cost(points: Floats, weight: Floats) -> Any:
    def cost(a: list[int], b: list[int]) -> float:
        n, m = weight[a].sum(), weight[b].sum()
        apart = np.average(points[a], axis=0, weights=weight[a]) - np.average(
            points[b], axis=0, weights=weight[b]
        )
        return float(n * m / (n + m) * (apart**2).sum() / points.shape[1])

    return cost


@settings(max_examples=150, deadline=None)
@given(weighted_points())
def test_weighted_ward_is_greedy(case: tuple[Floats, Floats]) -> None:
    points, weight = case
    before = points.copy(), weight.copy()
    tree = weighted_ward(points, weight)
    assert tree.shape == (len(points) - 1, 4)
    assert len(points) == 1 or is_valid_linkage(tree)
    is_greedy(tree, ward_cost(points, weight), 1e-9)
    assert np.array_equal(points, before[0])
    assert np.array_equal(weight, before[1])


def naive(points: Floats, weight: Floats) -> tuple[list[float], list[Clusters]]:
    """The textbook algorithm in O(M³): all means are recomputed at each step."""
    cost, clusters = ward_cost(points, weight), [[i] for i in range(len(points))]
    heights, levels = [], []
    while len(clusters) > 1:
        height, a, b = min(
            (cost(clusters[a], clusters[b]), a, b) for a in range(len(clusters)) for b in range(a)
        )
        clusters[b] = sorted(clusters[b] + clusters.pop(a))
        heights.append(height)
        levels.append(sorted([*clusters]))
    return heights, levels


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 14), st.integers(0, 10**6), st.booleans())
def test_weighted_ward_is_the_naive_one(clients: int, seed: int, single_precision: bool) -> None:
    rng = np.random.default_rng(seed)
    points, weight = rng.normal(size=(clients, 3)), rng.integers(1, 200, clients).astype(float)
    heights, levels = naive(points, weight)
    with pytest.MonkeyPatch.context() as patch:
        if single_precision:
            patch.setattr(linkage_module, "FLOAT64_UP_TO", 0)
        tree = weighted_ward(points, weight)
    # Also in single precision, since heights are computed from the means.
    np.testing.assert_allclose(tree[:, 2], heights, rtol=1e-10)
    assert [replay(tree, s + 1) for s in range(clients - 1)] == levels


def test_a_weight_has_the_effect_of_copies() -> None:
    rng = np.random.default_rng(0)
    points, weight = rng.normal(size=(30, 4)), rng.integers(1, 6, 30)
    many = np.repeat(points, weight, axis=0)
    copies = weighted_ward(many, np.ones(len(many)))
    tree = weighted_ward(points, weight)
    assert not copies[: len(many) - 30, 2].any()
    np.testing.assert_allclose(copies[len(many) - 30 :, 2], tree[:, 2])
    plain = linkage(cdist(points, points), "ward")
    np.testing.assert_allclose(weighted_ward(points, np.ones(30))[:, 2], plain[:, 2] ** 2 / 2 / 4)


def test_weighted_ward_by_hand() -> None:
    tree = weighted_ward(np.array([[0.0, 0.0], [0.0, 2.0], [10.0, 0.0]]), np.array([1, 3, 4]))
    # 1·3/4 · 4 / 2; then the mean (0, 1.5) of weight 4 with (10, 0): 4·4/8 · (100 + 2.25) / 2
    np.testing.assert_allclose(tree, [[0, 1, 1.5, 2], [2, 3, 102.25, 3]])


def test_noise_costs_about_one_for_any_sizes() -> None:
    rng = np.random.default_rng(0)
    size = np.array([10.0, 5000.0])
    costs = [
        weighted_ward(rng.normal(size=(2, 64)) / np.sqrt(size)[:, None], size)[0, 2]
        for _ in range(200)
    ]
    assert np.mean(costs) == pytest.approx(1, abs=0.05)


def test_an_outlier_does_not_reduce_the_precision_of_the_others() -> None:
    points = np.array([[1e9], [0.0], [1e-3], [2.5e-3]])
    np.testing.assert_allclose(
        weighted_ward(points, np.ones(4))[:2, 2], [1e-6 / 2, 2 / 3 * 2e-3**2]
    )


def test_the_chain_of_equidistant_points_does_not_loop() -> None:
    assert is_valid_linkage(weighted_ward(np.eye(60) / 3, np.ones(60)))
    is_greedy(
        weighted_ward(np.eye(12) / 3, np.ones(12)), ward_cost(np.eye(12) / 3, np.ones(12)), 1e-9
    )
    assert not weighted_ward(np.ones((40, 3)) / 3, np.arange(1, 41))[:, 2].any()


@pytest.mark.parametrize(
    ("points", "weight", "field"),
    [
        (np.zeros(3), np.ones(3), "points.shape"),
        (np.zeros((0, 3)), np.ones(0), "points.shape"),
        (np.full((2, 3), np.nan), np.ones(2), "points"),
        (np.zeros((2, 3)), np.ones(3), "weight.shape"),
        (np.zeros((2, 3)), np.array([1, 0]), "weight"),
    ],
)
def test_weighted_ward_refuses(points: Floats, weight: Floats, field: str) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        weighted_ward(points, weight)


# --- cuts


@st.composite
def trees(draw: st.DrawFn) -> Floats:
    """Trees of 1 … 12 clients, with heights that are often equal or 0."""
    clients = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    heights = sorted(
        draw(
            st.lists(
                st.sampled_from([0, 1, 2, 3, 4, 6, 9, 30]),
                min_size=clients - 1,
                max_size=clients - 1,
            )
        )
    )
    return with_heights(heights, rng)


def with_heights(heights: list[float], rng: np.random.Generator | None = None) -> Floats:
    """A tree with these heights, from random merges; a chain if `rng` is None."""
    clients = len(heights) + 1
    rows, size = [], dict.fromkeys(range(clients), 1)
    for s, height in enumerate(heights):
        a, b = (
            sorted(rng.choice(list(size), 2, replace=False).tolist())
            if rng
            else sorted(size)[:1] + sorted(size)[-1:]
        )
        size[clients + s] = size.pop(a) + size.pop(b)
        rows.append([a, b, height, size[clients + s]])
    return np.array(rows, np.float64).reshape(-1, 4)


@given(trees(), st.data())
def test_cut_number_is_exact(tree: Floats, data: st.DataObject) -> None:
    clusters = data.draw(st.integers(1, len(tree) + 1))
    labels = cut_number(tree, clusters)
    assert as_clusters(labels) == replay(tree, len(tree) + 1 - clusters)
    assert len(set(labels.tolist())) == clusters


@given(trees(), st.sampled_from([-1, 0, 0.5, 1, 2, 6, 30, 31, np.inf]))
def test_cut_height_is_strict(tree: Floats, height: float) -> None:
    labels = cut_height(tree, height)
    assert as_clusters(labels) == replay(tree, sum(h < height for h in tree[:, 2]))
    if len(tree) and np.isfinite(height):
        # scipy compares with ≤.
        expected = fcluster(tree, np.nextafter(height, -np.inf), "distance")
        assert np.array_equal(expected[:, None] == expected, labels[:, None] == labels)


@given(trees())
def test_cut_gap_is_at_the_widest_gap(tree: Floats) -> None:
    heights = tree[:, 2].tolist()
    best, merges = 0.0, len(heights)
    for s in range(1, len(heights)):
        if heights[s] - heights[s - 1] >= max(best, 1e-6):  # the later of equal gaps
            best, merges = heights[s] - heights[s - 1], s
    assert as_clusters(cut_gap(tree)) == replay(tree, merges)


@given(trees(), st.none() | st.integers(1, 12))
def test_cut_ratio_is_at_the_largest_ratio(tree: Floats, num_ratios: int | None) -> None:
    heights = tree[:, 2].tolist()
    top = max(1, (len(tree) + 1) // 2) if num_ratios is None else num_ratios
    best, merges = 1.0, len(heights)
    for s in reversed(range(1, len(heights))):
        ratio = heights[s] / max(heights[s - 1], 1e-12 * heights[-1]) if heights[s] else 1.0
        if len(heights) - s <= top and ratio > best:
            best, merges = ratio, s
    assert as_clusters(cut_ratio(tree, num_ratios)) == replay(tree, merges)
    assert cut_ratio(tree, num_ratios).max() <= top


def clusters(labels: NDArray[np.int64]) -> int:
    return int(labels.max()) + 1


@pytest.mark.parametrize(
    ("heights", "gap", "ratio"),
    [
        ([], 1, 1),  # one client
        ([5], 1, 1),  # two clients: one height, no gap
        ([2, 2, 2], 1, 1),  # equal heights
        ([0, 0, 0], 1, 1),  # all points are equal
        ([1, 1 + 1e-13, 1 + 2e-13], 1, 1),  # equal up to rounding
        ([1, 1, 8, 8], 3, 3),
        ([1, 4, 7], 2, 3),  # equal gaps: fewer clusters
        ([1, 2, 4, 8, 16], 2, 2),  # equal ratios: fewer clusters
        ([0, 0, 3, 4, 5], 4, 4),  # equal points
        ([0.001, 1, 1.1, 1.2, 1.3, 9], 2, 2),  # the largest ratio is not in the top half
        ([1, 1, 1, 10, 11, 100], 2, 4),  # gap and ratio disagree
    ],
)
def test_gap_and_ratio_by_hand(heights: list[float], gap: int, ratio: int) -> None:
    tree = with_heights(heights)
    assert clusters(cut_gap(tree)) == gap
    assert clusters(cut_ratio(tree)) == ratio


def test_cut_ratio_compares_num_ratios_ratios() -> None:
    tree = with_heights([0.001, 1, 1.1, 1.2, 1.3, 9])
    assert clusters(cut_ratio(tree, 4)) == 2
    assert clusters(cut_ratio(tree, 5)) == 6


def test_labels_are_numbered_by_first_appearance() -> None:
    tree = linkage(
        cdist([[9.0], [0.0], [9.1], [0.1], [5.0]], [[9.0], [0.0], [9.1], [0.1], [5.0]]), "average"
    )
    assert cut_number(tree, 3).tolist() == [0, 1, 0, 1, 2]
    assert cut_height(tree, 1.0).tolist() == [0, 1, 0, 1, 2]
    assert cut_number(tree, 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("spread", [1, 50])
def test_planted_groups_are_found_by_every_cut(spread: int) -> None:
    rng = np.random.default_rng(0)
    truth = rng.permutation(np.arange(60) % 5)
    size = rng.integers(20, 20 * spread + 1, 60)
    means = rng.normal(size=(5, 16)) * 4
    points = means[truth] + rng.normal(size=(60, 16)) / np.sqrt(size)[:, None]
    same = truth[:, None] == truth
    tree = weighted_ward(points, size)
    plain = linkage(cdist(points, points), "average")
    for labels in (
        cut_number(tree, 5),
        cut_ratio(tree),
        cut_height(tree, 5.0),
        cut_gap(plain),
        cut_number(plain, 5),
    ):
        assert np.array_equal(labels[:, None] == labels, same)


def test_cuts_refuse() -> None:
    tree = with_heights([1, 2, 3])
    for wrong in (0, 5):
        with pytest.raises(InvalidInputError, check=lambda error: error.field == "clusters"):
            cut_number(tree, wrong)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "height"):
        cut_height(tree, float("nan"))
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "num_ratios"):
        cut_ratio(tree, 0)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "tree.shape"):
        cut_gap(np.zeros((3, 3)))
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "tree"):
        cut_gap(tree[::-1])


# --- micro-clusters


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_one_block_of_micro_clusters_is_a_cut_of_the_tree(
    clients: int, clusters: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    points, weight = rng.normal(size=(clients, 3)), rng.uniform(1, 9, clients)
    clusters = min(clusters, clients)
    labels = micro_clusters(points, weight, clusters, clients, rng)
    expected = cut_number(weighted_ward(points, weight), clusters)
    np.testing.assert_array_equal(labels, expected)


def test_micro_clusters_never_join_blocks_and_are_as_many_as_asked() -> None:
    rng = np.random.default_rng(0)
    points, weight = rng.normal(size=(100, 3)), np.ones(100)
    labels = micro_clusters(points, weight, 25, 10, np.random.default_rng(1))
    assert sorted(set(labels)) == list(range(25))
    for members in np.array_split(np.random.default_rng(1).permutation(100), 10):
        others = np.setdiff1d(np.arange(100), members)
        assert not set(labels[members]) & set(labels[others])


def test_the_cheapest_merges_of_all_blocks_are_applied() -> None:
    """Nine clients are close to each other; the distant one stays alone in its block."""
    points = np.array([[0.0, 0.0]] * 9 + [[50.0, 0.0]])
    points[:9, 1] = np.arange(9) * 1e-3
    labels = micro_clusters(points, np.ones(10), 3, 5, np.random.default_rng(0))
    assert (labels == labels[9]).sum() == 1
    assert len(set(labels)) == 3


def test_too_few_micro_clusters_are_refused() -> None:
    with pytest.raises(InvalidInputError) as error:
        micro_clusters(np.ones((10, 2)), np.ones(10), 4, 2, np.random.default_rng(0))
    assert error.value.field == "clusters"
