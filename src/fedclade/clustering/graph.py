"""Graphs of related clients and their connected components: FLT's adjacency, dense for hundreds of
clients, by spatial index for many.

FLT calls two clients related when their signatures are nearer than gamma, and clients that hang
together form a group. For thousands of clients the matrix of all distances fits in memory; for a
hundred thousand only the components are wanted, and they can be had from the points alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components
from scipy.spatial import cKDTree

from fedclade.errors import require

# coordinates of pairs (two cells, or a point and a cell) looked at in one go: bounds the memory for
# any number of points
CHUNK_COORDINATES = 1_000_000


def check_symmetric(matrix: NDArray[np.floating[Any]], name: str) -> NDArray[np.floating[Any]]:
    """The matrix as it is, once it is known to be square, finite and symmetric (up to rounding)."""
    require(
        matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0,
        f"{name}.shape",
        matrix.shape,
        "must be (M, M) with M ≥ 1",
    )
    # Neither here nor below, in strips, is a second matrix formed. NaN is the largest wherever
    # there is one.
    largest = max(float(matrix.max()), -float(matrix.min()))
    require(largest < np.inf, name, "NaN or infinity", "must be finite")
    slack = 1e-6 * largest
    for start in range(0, len(matrix), 512):
        strip = slice(start, start + 512)
        apart = float(np.abs(matrix[strip] - matrix[:, strip].T).max())
        require(
            apart <= slack, name, f"[i, j] and [j, i] differ by {apart:.3g}", "must be symmetric"
        )
    return matrix


def canonical_labels(labels: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """The same partition with labels 0, 1, 2, … in the order in which they first appear."""
    _, first, inverse = np.unique(labels, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse]


def threshold_graph(
    distance: NDArray[np.floating[Any]], gamma: float
) -> csr_array[np.bool_, tuple[int, int]]:
    """FLT's adjacency Ã = Γ(A): clients i and j are related when A_ij < gamma, strictly; a client
    always with itself.
    """
    require(gamma > 0, "gamma", gamma, "must be above 0")
    related = check_symmetric(distance, "distance") < gamma
    np.fill_diagonal(related, True)
    return csr_array(related)


def components(graph: csr_array[Any, tuple[int, int]]) -> NDArray[np.int64]:
    """The connected component of each client, numbered by first appearance; a link counts in both
    directions.
    """
    require(
        graph.ndim == 2 and graph.shape[0] == graph.shape[1],
        "graph.shape",
        graph.shape,
        "must be (M, M)",
    )
    return canonical_labels(connected_components(graph, directed=False)[1])


def close_components(
    points: NDArray[np.floating[Any]], gamma: float, owner: NDArray[np.integer[Any]] | None = None
) -> NDArray[np.int64]:
    """Connected components of the graph that links points nearer than gamma (strictly) and all
    points of one owner.

    With clients as owners these are the components of FLT's graph under the printed distance A_ij =
    min_rs ‖u_ir − u_js‖. The result has a label for each owner 0 … K−1 (without `owner` each point
    is its own), numbered by first appearance.

    Neither distances nor edges are listed. The points fall into cells too small to hold two points
    gamma apart, so that a cell hangs together by itself. Two cells near each other are joined when
    a point of one has its nearest neighbour in the other within gamma, which is asked only while
    they are not yet known to hang together. Exact, in any dimension; made for few (2-D, 3-D), since
    in many dimensions a cell holds one point and has all others around it.
    """
    where = np.asarray(points, np.float64)
    require(
        where.ndim == 2 and where.size > 0,
        "points.shape",
        where.shape,
        "must be (N, d) with N, d ≥ 1",
    )
    require(bool(np.isfinite(where).all()), "points", "NaN or infinity", "must be finite")
    require(0 < gamma < np.inf, "gamma", gamma, "must be above 0 and finite")
    owner = np.arange(len(where)) if owner is None else np.asarray(owner)
    require(
        owner.shape == (len(where),),
        "owner.shape",
        owner.shape,
        f"must be ({len(where)},), an owner for each point",
    )
    require(int(owner.min()) >= 0, "owner", int(owner.min()), "must be 0 or more")
    missing = np.flatnonzero(np.bincount(owner) == 0)
    require(
        len(missing) == 0,
        "owner",
        f"no point of {missing[:5].tolist()}",
        "each of 0 … K−1 must own a point",
    )

    cells = _Cells(where, gamma)
    owners = int(owner.max()) + 1
    # Cells and owners are nodes of one graph, cells first; a point ties its owner to its cell.
    label = _join(len(cells.low) + owners, cells.of, len(cells.low) + owner)
    for one, two in cells.neighbours():
        for linked in (cells.by_first_point, cells.by_nearest):
            unknown = label[one] != label[two]
            one, two = one[unknown], two[unknown]
            touching = linked(one, two)
            label = _join(int(label.max()) + 1, label[one[touching]], label[two[touching]])[label]
    return canonical_labels(label[len(cells.low) :])


class _Cells:
    """Points in cells whose diameter is below gamma, sorted by cell: points[start[c] : start[c] +
    size[c]] lie in low[c] … high[c].
    """

    def __init__(self, points: NDArray[np.float64], gamma: float) -> None:
        self.gamma = gamma
        # A cell is a cube of diagonal gamma, a hair less, so that rounding does not put two points
        # gamma apart into one cell.
        side = gamma / np.sqrt(points.shape[1]) * (1 - 1e-6)
        grid = np.floor((points - points.min(0)) / side)
        of = np.unique(grid, axis=0, return_inverse=True)[1].reshape(-1)
        self._sort(points, of)
        # Where the points spread over so many cells that a cell's number is inexact, the hair may
        # be too thin: single points then.
        wide = _length(self.high - self.low) >= gamma
        if wide.any():
            of = np.where(wide[of], len(wide) + np.arange(len(of)), of)
            self._sort(points, np.unique(of, return_inverse=True)[1])
        # One tree answers "nearest in that cell": a further coordinate names the cell, and cells
        # lie more than gamma apart along it.
        self.names = 2.0 * gamma * np.arange(len(self.low))
        self.tree = cKDTree(np.column_stack([self.points, np.repeat(self.names, self.size)]))

    def _sort(self, points: NDArray[np.float64], of: NDArray[np.int64]) -> None:
        self.of = of
        self.points = points[np.argsort(of, kind="stable")]
        self.size = np.bincount(of)
        self.start = np.cumsum(self.size) - self.size
        self.low = np.minimum.reduceat(self.points, self.start)
        self.high = np.maximum.reduceat(self.points, self.start)

    def neighbours(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Pairs of cells whose boxes are nearer than gamma, each once, so many at a time that they
        fit in memory.
        """
        centre = (self.low + self.high) / 2
        # Centres lie at most gamma and two half diagonals apart, and what rounding adds to that.
        rounding = 4 * np.sqrt(centre.shape[1]) * np.spacing(np.abs(centre).max())
        reach = (self.gamma + float(_length(self.high - self.low).max())) * (1 + 1e-9) + rounding
        tree = cKDTree(centre)
        for begin, end in self._portions(tree.query_ball_point(centre, reach, return_length=True)):
            near = cKDTree(centre[begin:end]).sparse_distance_matrix(
                tree, reach, output_type="ndarray"
            )
            one, two = begin + near["i"], near["j"]
            one, two = one[one < two], two[one < two]
            apart = np.maximum(self.low[one] - self.high[two], self.low[two] - self.high[one])
            touching = _length(np.maximum(apart, 0)) < self.gamma
            yield one[touching], two[touching]

    def by_first_point(self, one: NDArray[np.int64], two: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the first points of two cells are nearer than gamma: cheap, and inside a dense
        blob nearly always enough.
        """
        return np.asarray(
            _length(self.points[self.start[one]] - self.points[self.start[two]]) < self.gamma
        )

    def by_nearest(self, one: NDArray[np.int64], two: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether any point of cell one[i] is nearer than gamma to any of cell two[i]: exact."""
        few, many = (
            np.where(self.size[one] <= self.size[two], one, two),
            np.where(self.size[one] <= self.size[two], two, one),
        )
        result = np.zeros(len(few), bool)
        for begin, end in self._portions(self.size[few]):
            size = self.size[few[begin:end]]
            pair = np.repeat(np.arange(begin, end), size)
            place = (
                np.arange(len(pair))
                - np.repeat(np.cumsum(size) - size, size)
                + self.start[few[pair]]
            )
            points = self.points[place]
            box = np.maximum(
                np.maximum(self.low[many[pair]] - points, points - self.high[many[pair]]), 0
            )
            worth = _length(box) < self.gamma
            points, pair = points[worth], pair[worth]
            # Asked a hair too far and then measured, so that the comparison with gamma is strict
            # whatever the tree's rounding.
            query = np.column_stack([points, self.names[many[pair]]])
            near = np.asarray(
                self.tree.query(query, distance_upper_bound=self.gamma * (1 + 1e-9))[1]
            )
            found = near < len(self.points)
            hit = _length(points[found] - self.points[near[found]]) < self.gamma
            result[pair[found][hit]] = True
        return result

    def _portions(self, rows: NDArray[np.integer[Any]]) -> Iterator[tuple[int, int]]:
        """Cut 0 … len(rows)−1, where item i makes rows[i] rows of coordinates, into ranges of what
        is looked at in one go.
        """
        until = np.cumsum(rows)
        begin = seen = 0
        while begin < len(until):
            end = max(
                begin + 1,
                int(
                    np.searchsorted(
                        until, seen + CHUNK_COORDINATES // self.points.shape[1], side="right"
                    )
                ),
            )
            yield begin, end
            begin, seen = end, int(until[end - 1])


def _length(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Euclidean length of each row."""
    return np.asarray(np.sqrt((vectors**2).sum(1)))


def _join(
    nodes: int, one: NDArray[np.integer[Any]], two: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:
    """The component of each of 0 … nodes−1 when one[i] and two[i] are linked."""
    links = coo_array((np.ones(len(one), bool), (one, two)), shape=(nodes, nodes))
    return np.asarray(connected_components(links, directed=False)[1], np.int64)
