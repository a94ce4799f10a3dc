"""Maps, matrices and trees: small cases by hand, and properties for any points."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade.analysis.report.similarity_layout import (
    MAX_LEAVES,
    MIXED,
    Labels,
    Points,
    Related,
    project_2d,
)


def points(
    rows: list[list[float]] | np.ndarray, cluster: list[int], measure: str = "euclidean"
) -> Points:
    array = np.array(rows, float)
    return Points(np.arange(len(array)), array, np.array(cluster), measure)  # type: ignore[arg-type]


# Clients 0 and 2 are near each other, and so are 1 and 3.
FOUR = points([[0, 0], [10, 0], [0, 1], [10, 1]], [0, 1, 0, 1])


def decoded(matrix: dict[str, object], which: str) -> np.ndarray:
    side = int(str(matrix["side"]))
    return np.frombuffer(base64.b64decode(str(matrix[which])), np.uint8).reshape(side, side)


def test_points_in_a_plane_keep_their_distances() -> None:
    xy, share = project_2d(FOUR)
    assert share == pytest.approx(1)
    assert np.abs(xy) == pytest.approx(np.array([[5, 0.5]] * 4))
    assert xy[0, 0] == pytest.approx(-xy[1, 0])
    assert xy[0, 0] == pytest.approx(xy[2, 0])


@pytest.mark.parametrize("rows", [[[1.0], [2.0], [4.0]], [[3.0, 3.0]] * 4])
def test_points_on_a_line_or_at_one_place_have_a_flat_map(rows: list[list[float]]) -> None:
    xy, share = project_2d(points(rows, [0] * len(rows)))
    assert xy.shape == (len(rows), 2)
    assert (xy[:, 1] == 0).all()
    assert share == 1


def test_the_cosine_ignores_lengths() -> None:
    related = Related.of(points([[1, 0], [5, 0], [0, 2], [-3, 0]], [0, 0, 1, 1], "cosine"))
    assert related.distance[0] == pytest.approx([0, 0, 1, 2])
    assert related.linkage == "average"


def test_the_matrix_is_ordered_by_group() -> None:
    matrix = Related.of(FOUR).matrix(side=10)
    assert matrix["side"] == matrix["clients"] == 4
    assert matrix["ids"] == [0, 1, 2, 3]
    assert {frozenset(matrix["order"][:2]), frozenset(matrix["order"][2:])} == {
        frozenset({0, 2}),
        frozenset({1, 3}),
    }
    assert sorted(group for group, _, _ in matrix["groups"]) == [0, 1]
    assert [(start, end) for _, start, end in matrix["groups"]] == [(0, 2), (2, 4)]
    near = round(255 / matrix["high"])  # a distance of 1
    after = decoded(matrix, "after")
    assert after[0].tolist()[:2] == [0, near]
    assert after[0, 2:].min() > 200
    assert decoded(matrix, "before")[0].tolist()[:3:2] == [0, near]


def test_cells_of_a_large_matrix_are_means_over_blocks() -> None:
    matrix = Related.of(FOUR).matrix(side=2)
    assert matrix["ids"] is None
    # Clients 0 and 2, then 1 and 3: within a block the distances are 0, 1, 1, 0.
    assert decoded(matrix, "after")[0, 0] == round(255 * 0.5 / matrix["high"])


def test_mean_distances_within_and_between_groups() -> None:
    between = Related.of(FOUR).matrix(side=4)["between"]
    far = (10 + np.sqrt(101)) / 2
    assert between == {
        "groups": [0, 1],
        "mean": [[pytest.approx(1), pytest.approx(far)], [pytest.approx(far), pytest.approx(1)]],
    }


def test_a_group_of_one_has_no_distance_within() -> None:
    between = Related.of(points([[0], [1], [5]], [0, 0, 1])).matrix(side=4)["between"]
    assert np.isnan(between["mean"][1][1])
    assert between["mean"][0][0] == pytest.approx(1)


def test_the_tree_is_cut_into_the_groups() -> None:
    tree = Related.of(FOUR).dendrogram()
    assert [group for group, _ in tree["leaves"]] in ([0, 0, 1, 1], [1, 1, 0, 0])
    heights = sorted(link[3] for link in tree["links"])
    assert heights[:2] == [1, 1]
    assert tree["cut"] == pytest.approx((1 + heights[2]) / 2)
    assert tree["groups"] == 2
    assert tree["agreement"] == 1
    assert [link[5] for link in tree["links"] if link[3] == heights[2]] == [MIXED]


def test_the_agreement_is_below_one_if_groups_and_tree_differ() -> None:
    assert Related.of(points(FOUR.rows, [0, 0, 1, 1])).dendrogram()["agreement"] < 0.1


def test_one_group_is_not_cut() -> None:
    tree = Related.of(points(FOUR.rows, [0] * 4)).dendrogram()
    assert tree["cut"] is None
    assert tree["agreement"] is None


def test_only_the_top_of_a_large_tree_is_drawn() -> None:
    rows = np.random.default_rng(0).normal(size=(500, 3))
    tree = Related.of(points(rows, [0] * 500)).dendrogram()
    assert len(tree["leaves"]) == MAX_LEAVES
    assert len(tree["links"]) == MAX_LEAVES - 1
    assert sum(size for _, size in tree["leaves"]) == 500


@st.composite
def clouds(draw: st.DrawFn) -> Points:
    number = draw(st.integers(3, 20))
    cell = st.integers(-5, 5).map(float)
    rows = draw(st.lists(st.lists(cell, min_size=3, max_size=3), min_size=number, max_size=number))
    cluster = draw(st.lists(st.integers(0, 3), min_size=number, max_size=number))
    return points(rows, cluster, draw(st.sampled_from(["euclidean", "cosine"])))


@settings(max_examples=60, deadline=None)
@given(clouds())
def test_any_points_have_plots(cloud: Points) -> None:
    related = Related.of(cloud)
    order: Labels = related.order
    assert sorted(order.tolist()) == list(range(len(cloud.ids)))
    matrix, tree = related.matrix(side=7), related.dendrogram()
    clusters = len(np.unique(cloud.cluster))
    assert len(matrix["groups"]) == clusters  # each group is contiguous
    assert [end for _, _, end in matrix["groups"][:-1]] == [
        start for _, start, _ in matrix["groups"][1:]
    ]
    assert sum(size for _, size in tree["leaves"]) == len(cloud.ids)
    assert (tree["cut"] is None) == (clusters == 1)
    xy, share = project_2d(cloud)
    assert np.isfinite(xy).all()
    assert 0 <= share <= 1 + 1e-9
