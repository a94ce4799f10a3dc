"""Graphs and their components, compared with the dense graph and a walk over it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.sparse import csr_array

from fedclade.clustering import graph as graph_module
from fedclade.clustering.graph import (
    canonical_labels,
    check_symmetric,
    close_components,
    components,
    threshold_graph,
)
from fedclade.errors import InvalidInputError

Floats = NDArray[np.float64]


def walk(linked: NDArray[np.bool_]) -> list[int]:
    """Components by a walk from each client without a label, so numbered by first appearance."""
    label = [-1] * len(linked)
    for start in range(len(linked)):
        todo = [start] if label[start] < 0 else []
        component = max(label) + 1
        while todo:
            client = todo.pop()
            if label[client] < 0:
                label[client] = component
                todo += np.flatnonzero(linked[client]).tolist()
    return label


def dense(points: Floats, gamma: float, owner: NDArray[np.int64]) -> list[int]:
    near = np.sqrt(((points[:, None] - points) ** 2).sum(-1)) < gamma
    linked = np.eye(owner.max() + 1, dtype=bool)
    for i, j in np.argwhere(near):
        linked[owner[i], owner[j]] = True
    return walk(linked)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(0, 10**6), st.integers(1, 8))
def test_graph_and_components_are_those_of_a_loop(clients: int, seed: int, gamma: int) -> None:
    upper = np.triu(np.random.default_rng(seed).integers(0, 12, (clients, clients)), 1).astype(
        float
    )
    distance = upper + upper.T
    graph = threshold_graph(distance, gamma)
    expected = [
        [bool(i == j or distance[i, j] < gamma) for j in range(clients)] for i in range(clients)
    ]
    assert isinstance(graph, csr_array)
    assert graph.dtype == bool
    assert graph.toarray().tolist() == expected
    assert components(graph).tolist() == walk(np.array(expected))


def test_related_clients_are_strictly_closer_than_gamma() -> None:
    distance = np.array([[0, 1, 0.999], [1, 0, 3], [0.999, 3, 0]])
    assert threshold_graph(distance, 1.0).toarray().tolist() == [
        [True, False, True],
        [False, True, False],
        [True, False, True],
    ]


def test_edges_are_undirected() -> None:
    graph = csr_array(np.array([[0, 0, 0], [0, 0, 0], [1, 0, 0]], bool))
    assert components(graph).tolist() == [0, 1, 0]


@given(st.lists(st.integers(-3, 5), max_size=12))
def test_numbered_by_first_appearance(labels: list[int]) -> None:
    distinct = list(dict.fromkeys(labels))
    assert canonical_labels(np.array(labels, np.int64)).tolist() == [
        distinct.index(label) for label in labels
    ]


@st.composite
def clouds(draw: st.DrawFn) -> tuple[Floats, float, NDArray[np.int64]]:
    """Points in 1 to 4 dimensions: on a lattice (many distances are exactly gamma), in blobs, or a
    few units in the last place apart. Each owner has one point or more.
    """
    d, owners = draw(st.integers(1, 4)), draw(st.integers(1, 25))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    owner = rng.permutation(
        np.concatenate(
            [np.arange(owners), rng.integers(0, owners, draw(st.sampled_from([0, 0, 3, 20])))]
        )
    )
    form = draw(st.sampled_from(["lattice", "blobs", "last places"]))
    if form == "lattice":
        step = draw(st.sampled_from([1.0, 0.1, 1e-5, 1e6]))
        points = step * rng.integers(0, 7, (len(owner), d))
        return points, step * draw(st.sampled_from([0.5, 1.0, 2.0, np.sqrt(2), 3.0])), owner
    if form == "blobs":
        points = rng.uniform(0, 10, (3, d))[rng.integers(0, 3, len(owner))] + rng.normal(
            size=(len(owner), d)
        )
        return points, draw(st.floats(0.05, 3.0)), owner
    place = np.spacing(1e12)
    points = 1e12 + place * rng.integers(0, 9, (len(owner), d))
    # With a point at 0 the grid has 1e15 cells.
    points[rng.random(len(owner)) < draw(st.sampled_from([0.0, 0.2]))] = 0
    return points, place * draw(st.sampled_from([0.7, 1.0, 1.3, 2.0, 2.9, 4.1])), owner


@settings(max_examples=300, deadline=None)
@given(clouds(), st.sampled_from([1, 40, 1_000_000]))
def test_close_components_are_those_of_the_dense_graph(
    cloud: tuple[Floats, float, NDArray[np.int64]], chunk: int
) -> None:
    points, gamma, owner = cloud
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_module, "CHUNK_COORDINATES", chunk)
        assert close_components(points, gamma, owner).tolist() == dense(points, gamma, owner)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.3, 1.2), st.integers(2, 3))
def test_many_points_near_the_critical_density(seed: int, gamma: float, d: int) -> None:
    """There, components are large and irregular, so a missing or wrong edge changes the result."""
    points = np.random.default_rng(seed).uniform(0, 14 if d == 2 else 6, (400, d))
    assert close_components(points, gamma).tolist() == dense(points, gamma, np.arange(400))


def test_dense_cells_with_a_single_close_pair() -> None:
    """Two strips of many points. Only one pair across them is closer than gamma, and it is far from
    the first points of its cells.
    """
    rng = np.random.default_rng(0)
    left, right = rng.uniform([0, 0], [0.5, 5], (500, 2)), rng.uniform([1.6, 0], [2.1, 5], (500, 2))
    points = np.concatenate([left, right])
    assert close_components(points, 1.0).max() == 1
    bridge = np.concatenate([points, [[0.55, 3.3], [1.5499, 3.3]]])
    assert close_components(bridge, 1.0).max() == 0
    bridge[-1, 0] = 1.55
    assert close_components(bridge, 1.0).tolist() == dense(bridge, 1.0, np.arange(1002))


def test_a_distance_of_gamma_is_no_edge_and_owners_connect_their_points() -> None:
    points = np.array([[0.0, 0], [3, 4], [6, 8], [20, 20]])
    assert close_components(points, 5.0).tolist() == [0, 1, 2, 3]
    assert close_components(points, 5.000001).tolist() == [0, 0, 0, 1]
    assert close_components(points, 1.0, np.array([1, 0, 0, 1])).tolist() == [0, 1]
    assert close_components(points, 5.000001, np.array([1, 0, 0, 1])).tolist() == [0, 0]


@pytest.mark.parametrize("first", [[0.0, 5.0], [5.0, 0.0]])
def test_a_distance_of_gamma_is_no_edge_even_if_boxes_are_closer(first: list[float]) -> None:
    """(6, 13) is 10 away from (0, 5), which shares a cell with (5, 0). The box of the cell is
    closer than 10. The order of the two points does not matter.
    """
    points = np.array([first, first[::-1], [6.0, 13.0]])
    assert close_components(points, 10.0).tolist() == [0, 0, 1]
    assert close_components(points, 10.0001).tolist() == [0, 0, 0]


def test_equal_points_are_one_component() -> None:
    assert close_components(np.zeros((50, 2)), 1e-9).max() == 0


def test_more_cells_than_exact_cell_numbers() -> None:
    points = np.array([[0.0], [1e-30], [1e20], [1e20]])
    assert close_components(points, 1e-25).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"points": np.zeros(3), "gamma": 1.0}, "points.shape", "(3,)"),
        ({"points": np.zeros((0, 2)), "gamma": 1.0}, "points.shape", "(0, 2)"),
        ({"points": np.full((2, 2), np.inf), "gamma": 1.0}, "points", "infinity"),
        ({"points": np.zeros((2, 2)), "gamma": 0.0}, "gamma", "0.0"),
        ({"points": np.zeros((2, 2)), "gamma": np.inf}, "gamma", "inf"),
        ({"points": np.zeros((2, 2)), "gamma": 1.0, "owner": np.array([0])}, "owner.shape", "(1,)"),
        ({"points": np.zeros((2, 2)), "gamma": 1.0, "owner": np.array([0, -1])}, "owner", "-1"),
        ({"points": np.zeros((2, 2)), "gamma": 1.0, "owner": np.array([0, 2])}, "owner", "[1]"),
    ],
)
def test_close_components_refuses(arguments: dict[str, Any], field: str, value: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        close_components(**arguments)
    assert caught.value.field == field
    assert value in str(caught.value)


@pytest.mark.parametrize(
    ("distance", "field", "value"),
    [
        (np.zeros((2, 3)), "distance.shape", "(2, 3)"),
        (np.zeros((0, 0)), "distance.shape", "(0, 0)"),
        (np.array([[0, np.nan], [np.nan, 0]]), "distance", "NaN"),
        (np.array([[0.0, 1], [2, 0]]), "distance", "by 1"),
    ],
)
def test_a_matrix_must_be_square_finite_symmetric(distance: Floats, field: str, value: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check_symmetric(distance, "distance")
    assert caught.value.field == field
    assert value in str(caught.value)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        threshold_graph(distance, 1.0)


def test_threshold_and_components_refuse() -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "gamma"):
        threshold_graph(np.zeros((2, 2)), 0)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "graph.shape"):
        components(csr_array(np.zeros((2, 3), bool)))
