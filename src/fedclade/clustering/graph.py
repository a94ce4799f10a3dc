"""Graphs of related clients and their connected components: FLT's adjacency matrix, and a spatial
index for many clients.

In FLT two clients are related if the distance of their signatures is below gamma, and a connected
component is a group. For thousands of clients the matrix of all distances fits in memory. For a
hundred thousand the components are computed from the points alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedclade.errors import require

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# Coordinates of pairs (two cells, or a point and a cell) that are processed at a time: bounds the
# memory for any number of points.
CHUNK_COORDINATES = 1_000_000


def check_symmetric(matrix: NDArray[np.floating[Any]], name: str) -> NDArray[np.floating[Any]]:
    """Return the matrix if it is square, finite and symmetric (up to rounding), else raise.

    Args:
        matrix: (M, M) the matrix.
        name: the name of the argument in the message.
    """
    require(
        matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0,
        f"{name}.shape",
        matrix.shape,
        "must be (M, M) with M ≥ 1",
    )
    # Neither this nor the strips below form a second matrix. max() propagates NaN.
    largest = max(float(matrix.max()), -float(matrix.min()))
    require(largest < np.inf, name, "NaN or infinity", "must be finite")
    slack = 1e-6 * largest
    for start in range(0, len(matrix), 512):
        strip = slice(start, start + 512)
        difference = float(np.abs(matrix[strip] - matrix[:, strip].T).max())
        require(
            difference <= slack,
            name,
            f"[i, j] and [j, i] differ by {difference:.3g}",
            "must be symmetric",
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
    """FLT's graph Ã = Γ(A) (M, M): clients i and j are related if A_ij < gamma. Every client is
    related to itself.

    Args:
        distance: (M, M) the distances A.
        gamma: γ, the threshold.
    """
    from scipy.sparse import csr_array

    require(gamma > 0, "gamma", gamma, "must be above 0")
    related = check_symmetric(distance, "distance") < gamma
    np.fill_diagonal(related, True)
    return csr_array(related)


def components(graph: csr_array[Any, tuple[int, int]]) -> NDArray[np.int64]:
    """(M,) the connected component of each client in an undirected graph (M, M), numbered by first
    appearance.
    """
    from scipy.sparse.csgraph import connected_components

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
    """Connected components of the graph with an edge between points closer than gamma (strictly)
    and between all points of one owner.

    With clients as owners these are the components of FLT's graph under the printed distance A_ij =
    min_rs ‖u_ir − u_js‖.

    Neither distances nor edges are stored. The points are binned into cells whose diameter is below
    gamma, so each cell is connected. Two neighboring cells are merged if a point of one is closer
    than gamma to a point of the other; this is computed only for cells that are not in one
    component yet. The result is exact in any dimension. The algorithm is fast in 2-D and 3-D. In
    high dimensions a cell holds one point, and all other cells are its neighbors.

    Args:
        points: (N, d) the points u.
        gamma: γ, the threshold.
        owner: (N,) the owner 0 … K−1 of each point; None if each point has a separate owner.

    Returns:
        (K,) the component of each owner, numbered by first appearance.
    """
    coordinates = np.asarray(points, np.float64)
    require(
        coordinates.ndim == 2 and coordinates.size > 0,
        "points.shape",
        coordinates.shape,
        "must be (N, d) with N, d ≥ 1",
    )
    require(bool(np.isfinite(coordinates).all()), "points", "NaN or infinity", "must be finite")
    require(0 < gamma < np.inf, "gamma", gamma, "must be above 0 and finite")
    owner = np.arange(len(coordinates)) if owner is None else np.asarray(owner)
    require(
        owner.shape == (len(coordinates),),
        "owner.shape",
        owner.shape,
        f"must be ({len(coordinates)},), an owner for each point",
    )
    require(int(owner.min()) >= 0, "owner", int(owner.min()), "must be 0 or more")
    missing = np.flatnonzero(np.bincount(owner) == 0)
    require(
        len(missing) == 0,
        "owner",
        f"no point of {missing[:5].tolist()}",
        "each owner 0 … K−1 needs a point",
    )

    cells = _Cells(coordinates, gamma)
    owners = int(owner.max()) + 1
    # Cells and owners are nodes of one graph, cells first; a point is an edge between its owner and
    # its cell.
    labels = _components(len(cells.low) + owners, cells.of, len(cells.low) + owner)
    for a, b in cells.neighbors():
        for linked in (cells.by_first_point, cells.by_nearest):
            unknown = labels[a] != labels[b]
            a, b = a[unknown], b[unknown]
            close = linked(a, b)
            count = int(labels.max()) + 1
            labels = _components(count, labels[a[close]], labels[b[close]])[labels]
    return canonical_labels(labels[len(cells.low) :])


class _Cells:
    """Points in cells whose diameter is below gamma, sorted by cell: points[start[c] : start[c] +
    size[c]] are in the box low[c] … high[c].
    """

    def __init__(self, points: NDArray[np.float64], gamma: float) -> None:
        from scipy.spatial import cKDTree

        self.gamma = gamma
        # A cell is a cube whose diagonal is slightly below gamma: rounding must not put two points
        # gamma apart into one cell.
        side = gamma / np.sqrt(points.shape[1]) * (1 - 1e-6)
        grid = np.floor((points - points.min(0)) / side)
        of = np.unique(grid, axis=0, return_inverse=True)[1].reshape(-1)
        self._sort(points, of)
        # If there are too many cells for exact cell numbers, a cell may be too wide. Then each of
        # its points becomes a cell.
        wide = _length(self.high - self.low) >= gamma
        if wide.any():
            of = np.where(wide[of], len(wide) + np.arange(len(of)), of)
            self._sort(points, np.unique(of, return_inverse=True)[1])
        # One tree finds the nearest point in a given cell: an extra coordinate encodes the cell.
        # Along it, cells are more than gamma apart.
        self.names = 2.0 * gamma * np.arange(len(self.low))
        self.tree = cKDTree(np.column_stack([self.points, np.repeat(self.names, self.size)]))

    def _sort(self, points: NDArray[np.float64], of: NDArray[np.int64]) -> None:
        self.of = of
        self.points = points[np.argsort(of, kind="stable")]
        self.size = np.bincount(of)
        self.start = np.cumsum(self.size) - self.size
        self.low = np.minimum.reduceat(self.points, self.start)
        self.high = np.maximum.reduceat(self.points, self.start)

    def neighbors(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Pairs of cells whose boxes are closer than gamma, each pair once, in chunks that fit in
        memory.
        """
        from scipy.spatial import cKDTree

        center = (self.low + self.high) / 2
        # The centers of such cells are at most gamma plus two half diagonals apart, plus rounding.
        rounding = 4 * np.sqrt(center.shape[1]) * np.spacing(np.abs(center).max())
        reach = (self.gamma + float(_length(self.high - self.low).max())) * (1 + 1e-9) + rounding
        tree = cKDTree(center)
        for begin, end in self._chunks(tree.query_ball_point(center, reach, return_length=True)):
            near = cKDTree(center[begin:end]).sparse_distance_matrix(
                tree, reach, output_type="ndarray"
            )
            a, b = begin + near["i"], near["j"]
            a, b = a[a < b], b[a < b]
            gap = np.maximum(self.low[a] - self.high[b], self.low[b] - self.high[a])
            close = _length(np.maximum(gap, 0)) < self.gamma
            yield a[close], b[close]

    def by_first_point(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether the first points of cells a[i] and b[i] are closer than gamma: cheap, and nearly
        always sufficient inside a dense cluster.
        """
        return np.asarray(
            _length(self.points[self.start[a]] - self.points[self.start[b]]) < self.gamma
        )

    def by_nearest(self, a: NDArray[np.int64], b: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether any point of cell a[i] is closer than gamma to any point of cell b[i]: exact."""
        smaller, larger = (
            np.where(self.size[a] <= self.size[b], a, b),
            np.where(self.size[a] <= self.size[b], b, a),
        )
        result = np.zeros(len(smaller), bool)
        for begin, end in self._chunks(self.size[smaller]):
            size = self.size[smaller[begin:end]]
            pair = np.repeat(np.arange(begin, end), size)
            index = (
                np.arange(len(pair))
                - np.repeat(np.cumsum(size) - size, size)
                + self.start[smaller[pair]]
            )
            points = self.points[index]
            box = np.maximum(
                np.maximum(self.low[larger[pair]] - points, points - self.high[larger[pair]]), 0
            )
            reachable = _length(box) < self.gamma
            points, pair = points[reachable], pair[reachable]
            # The query's bound is slightly above gamma and the distance is computed again, so that
            # the comparison with gamma is strict for any rounding of the tree.
            query = np.column_stack([points, self.names[larger[pair]]])
            near = np.asarray(
                self.tree.query(query, distance_upper_bound=self.gamma * (1 + 1e-9))[1]
            )
            has_neighbor = near < len(self.points)
            close = _length(points[has_neighbor] - self.points[near[has_neighbor]]) < self.gamma
            result[pair[has_neighbor][close]] = True
        return result

    def _chunks(self, rows: NDArray[np.integer[Any]]) -> Iterator[tuple[int, int]]:
        """Split 0 … len(rows)−1 into ranges that fit in memory; item i has rows[i] rows of
        coordinates.
        """
        until = np.cumsum(rows)
        begin = done = 0
        while begin < len(until):
            end = max(
                begin + 1,
                int(
                    np.searchsorted(
                        until, done + CHUNK_COORDINATES // self.points.shape[1], side="right"
                    )
                ),
            )
            yield begin, end
            begin, done = end, int(until[end - 1])


def _length(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """The Euclidean length of each row."""
    return np.asarray(np.sqrt((vectors**2).sum(1)))


def _components(
    nodes: int, a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:
    """The component of each of the nodes 0 … nodes−1 of the graph with edges (a[i], b[i])."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    edges = coo_array((np.ones(len(a), bool), (a, b)), shape=(nodes, nodes))
    return np.asarray(connected_components(edges, directed=False)[1], np.int64)
