"""Distances between sets of points. The signature of a client is such a set: in FLT k cluster
centers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclade.errors import require

Kind: TypeAlias = Literal["matching", "min", "chamfer"]

BLOCK = 256  # clients on each side of a tile
MAX_MATCHING_POINTS = 12  # points of a client with "matching": the table over subsets has 2^k rows
TABLE = 1 << 18  # numbers in that table: 2 MB, which fit into the CPU's cache


def distances(
    points: NDArray[np.floating[Any]],
    counts: NDArray[np.integer[Any]] | None = None,
    kind: Kind = "matching",
    block: int = BLOCK,
) -> NDArray[np.float64]:
    """FLT's A (M, M): the distance between the point sets u_i of each pair of clients. It is
    symmetric, and 0 on the diagonal.

    Pairs are computed in tiles of block × block clients of equal counts. Memory holds only the
    result and one tile.

    Args:
        points: (M, k, d) the points u_ir.
        counts: (M,) the number of real points of each client, the first ones of its k; None for
            all. The others are ignored.
        kind: "matching" is the best one-to-one matching π of the smaller set into the larger,
            min_π sqrt(Σ_r ‖u_ir − u_jπ(r)‖²) / k_small. "min" is the printed formula
            min_rs ‖u_ir − u_js‖. "chamfer" is the mean distance of a point to the nearest point of
            the other set, averaged over both directions.
        block: the number of clients on each side of a tile.
    """
    points, counts = _checked(points, counts, kind)
    require(block >= 1, "block", block, "must be 1 or more")
    tiles = _tiles(points, counts, block)
    result = np.zeros((len(points), len(points)))
    for i, (rows, small) in enumerate(tiles):
        for columns, large in tiles[i:]:
            value = _KINDS[kind](_squares(small, large))
            if rows is columns:  # both triangles are equal up to rounding: use one
                value = np.triu(value, 1)
                value += value.T
            result[np.ix_(rows, columns)] = value
            result[np.ix_(columns, rows)] = value.T
    return result


def distances_to(
    points: NDArray[np.floating[Any]],
    counts: NDArray[np.integer[Any]],
    others: NDArray[np.floating[Any]],
    other_counts: NDArray[np.integer[Any]],
    kind: Kind = "matching",
) -> NDArray[np.float64]:
    """(M, N) the same distances, from each of M clients to each of N others.

    Args:
        points: (M, k, d) the points of the clients.
        counts: (M,) their numbers of real points.
        others: (N, k', d) the points of the others.
        other_counts: (N,) their numbers of real points.
        kind: see `distances`.
    """
    tiles, other_tiles = (
        _tiles(*_checked(*sets, kind), BLOCK) for sets in ((points, counts), (others, other_counts))
    )
    result = np.empty((len(points), len(others)))
    for rows, tile in tiles:
        for columns, other in other_tiles:
            swap = len(tile) > len(other)
            value = _KINDS[kind](_squares(other, tile) if swap else _squares(tile, other))
            result[np.ix_(rows, columns)] = value.T if swap else value
    return result


def _checked(
    points: NDArray[np.floating[Any]], counts: NDArray[np.integer[Any]] | None, kind: Kind
) -> tuple[NDArray[np.float64], NDArray[np.integer[Any]]]:
    sets = np.asarray(points, np.float64)
    require(
        sets.ndim == 3 and sets.size > 0,
        "points.shape",
        sets.shape,
        "must be (M, k, d) with M, k, d ≥ 1",
    )
    clients, k, _ = sets.shape
    counts = np.full(clients, k) if counts is None else np.asarray(counts)
    require(
        counts.shape == (clients,),
        "counts.shape",
        counts.shape,
        f"must be ({clients},), a count for each client",
    )
    wrong = np.flatnonzero((counts < 1) | (counts > k))
    require(len(wrong) == 0, "counts", counts[wrong[:1]].tolist(), f"must be between 1 and k = {k}")
    require(
        bool(np.isfinite(sets[np.arange(k) < counts[:, None]]).all()),
        "points",
        "NaN or infinity",
        "the real points must be finite",
    )
    require(kind in _KINDS, "kind", kind, f"must be one of {', '.join(_KINDS)}")
    if kind == "matching":
        require(
            counts.max() <= MAX_MATCHING_POINTS,
            "counts",
            int(counts.max()),
            f'must be at most {MAX_MATCHING_POINTS} with kind="matching"; use "min" or "chamfer"',
        )
    return sets, counts


def _tiles(
    points: NDArray[np.float64], counts: NDArray[np.integer[Any]], block: int
) -> list[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Tiles of clients with equal counts, in ascending order of the count, so that the first set of
    a pair is never the larger. The point axis comes first: for one pair of points the values of all
    pairs of clients are contiguous.
    """
    tiles = []
    for count in np.unique(counts):
        clients = np.flatnonzero(counts == count)
        for start in range(0, len(clients), block):
            members = clients[start : start + block]
            tiles.append((members, np.ascontiguousarray(points[members, :count].swapaxes(0, 1))))
    return tiles


def _squares(small: NDArray[np.float64], large: NDArray[np.float64]) -> NDArray[np.float64]:
    """(k_small, k_large, rows, columns) the squares ‖u_ir − u_js‖² of all points r, s of all
    clients i, j of two tiles.
    """
    from scipy.spatial.distance import cdist

    squares = np.empty((len(small), len(large), small.shape[1], large.shape[1]))
    for r, s in np.ndindex(len(small), len(large)):
        cdist(small[r], large[s], "sqeuclidean", out=squares[r, s])
    return squares


def _matching(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    """(rows, columns) the root of the least sum of squares over all matchings, divided by k_small;
    `squares` is (k_small, k_large, rows, columns).

    table[S] is the least sum of a matching of the first |S| points of the smaller set to the points
    S of the larger: table[S] = min over s in S of table[S without s] + squares[|S| − 1, s]. It is
    computed for all pairs at the same time.
    """
    small, large, rows, columns = squares.shape
    flat = squares.reshape(small, large, rows * columns)
    best = np.empty(rows * columns)
    width = max(512, TABLE >> large)
    table, trial = np.empty((1 << large, width)), np.empty(width)
    steps, last = _subsets(small, large)
    for start in range(0, len(best), width):
        square = flat[:, :, start : start + width]
        size = square.shape[2]
        table[0] = 0
        for subset, r, predecessors in steps:
            row = table[subset, :size]
            (rest, s), *others = predecessors
            np.add(table[rest, :size], square[r, s], out=row)
            for rest, s in others:
                np.add(table[rest, :size], square[r, s], out=trial[:size])
                np.minimum(row, trial[:size], out=row)
        table[last, :size].min(0, out=best[start : start + width])
    return np.asarray(np.sqrt(best).reshape(rows, columns) / small)


@cache
def _subsets(
    small: int, large: int
) -> tuple[list[tuple[int, int, list[tuple[int, int]]]], list[int]]:
    """The order in which the table is filled: (S as bits, |S| − 1, [(S without s, s)]) for
    1 ≤ |S| ≤ small, by size of S; and the S with |S| = small.
    """
    subsets = sorted((s for s in range(1, 1 << large) if s.bit_count() <= small), key=int.bit_count)
    steps = [
        (s, s.bit_count() - 1, [(s ^ (1 << p), p) for p in range(large) if s >> p & 1])
        for s in subsets
    ]
    return steps, [s for s in subsets if s.bit_count() == small]


def _min(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.sqrt(squares.min((0, 1))))


def _chamfer(squares: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray((np.sqrt(squares.min(1)).mean(0) + np.sqrt(squares.min(0)).mean(0)) / 2)


_KINDS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "matching": _matching,
    "min": _min,
    "chamfer": _chamfer,
}
