"""FLT's mathematics: the centres of all clients laid out in the plane, which clients are related,
and who is nearest to a newcomer.
"""

from __future__ import annotations

import warnings
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from fedclade.clustering.graph import close_components, components, threshold_graph
from fedclade.clustering.linkage import cut_gap, cut_number, linkage
from fedclade.clustering.set_distances import BLOCK, Kind, distances, distances_to
from fedclade.core.pca import principal_axes
from fedclade.errors import InvalidInputError

Manifold: TypeAlias = Literal["umap", "pca", "none"]
Distance: TypeAlias = Kind
Cut: TypeAlias = Literal["threshold", "gap"]
Points: TypeAlias = NDArray[np.floating[Any]]
Counts: TypeAlias = NDArray[np.integer[Any]]
Related: TypeAlias = csr_array[np.bool_, tuple[int, int]]

DIMENSIONS = 2
NEIGHBOURS = 15  # UMAP's default


def cluster_signatures(
    centres: Points,
    counts: Counts,
    manifold: Manifold,
    distance: Distance,
    cut: Cut,
    gamma: float,
    clusters: int | None,
    seed: int,
    graph: bool = True,
) -> tuple[NDArray[np.int64], Related | None]:
    """The group of each client and, where a threshold was used, the graph Ã of which the groups are
    the connected components.

    `centres` is (M, k, e), of which the first counts[i] of client i are real. All of them are
    placed on the manifold together; A is the distance between clients there. Related is who is
    nearer than gamma (cut="threshold"); or groups come from a tree over A: `clusters` of them by
    Ward, or as many as the widest gap in the merge heights of average linkage leaves (cut="gap").
    Without `graph` only groups.
    """
    points = embed_centres(centres, counts, manifold, seed)
    if not graph and clusters is None and cut == "threshold" and distance == "min":
        # Only the components are wanted, and of nearest points a spatial index finds them: 100,000
        # clients need no matrix of all pairs.
        real = np.arange(points.shape[1]) < counts[:, None]
        return (
            close_components(points[real], gamma, np.repeat(np.arange(len(points)), counts)),
            None,
        )
    A = distances(points, counts, distance)
    if clusters is not None:
        return cut_number(linkage(A, "ward"), min(clusters, len(A))), None
    if cut == "gap":
        return cut_gap(linkage(A, "average")), None
    related = threshold_graph(A, gamma)
    return components(related), related if graph else None


def nearest_signature(
    centres: Points, counts: Counts, known: Points, known_counts: Counts, distance: Distance
) -> NDArray[np.int64]:
    """For each signature the place of the nearest one in `known`, measured between the embeddings
    themselves.

    The known ones come in blocks, of which only the nearest are kept.
    """
    found, least = np.zeros(len(centres), np.int64), np.full(len(centres), np.inf)
    for start in range(0, len(known), BLOCK):
        block = slice(start, start + BLOCK)
        A = distances_to(centres, counts, known[block], known_counts[block], distance)
        closer = A.min(1) < least
        found[closer], least[closer] = start + A.argmin(1)[closer], A.min(1)[closer]
    return found


def mixing_matrix(groups: NDArray[np.int64], related: Related | None) -> tuple[Tensor, Tensor]:
    """The distinct rows of Ã (rows, M), and for each client which is its own; without a graph the
    members of a group are related.
    """
    if related is not None:
        rows, row = torch.unique(torch.from_numpy(related.toarray()), dim=0, return_inverse=True)
        return rows, row
    row = torch.from_numpy(groups)
    return row == torch.arange(int(row.max()) + 1)[:, None], row


def embed_centres(centres: Points, counts: Counts, manifold: Manifold, seed: int) -> Points:
    """The real centres of all clients placed together: (M, k, e) -> (M, k, u), zeros where there is
    none.
    """
    real = np.arange(centres.shape[1]) < counts[:, None]
    placed = embed(centres[real], manifold, seed)
    points = np.zeros((*real.shape, placed.shape[1]))
    points[real] = placed
    return points


def embed(points: Points, kind: Manifold = "umap", seed: int = 0) -> Points:
    """The points (n, d) in the plane (n, 2): by UMAP with its default parameters and this seed, or
    by PCA. "none": as they are.

    Where UMAP cannot work, PCA takes its place with a warning. A graph of neighbours in several
    pieces alone is no such case: UMAP lays the pieces out side by side, and well separated groups
    look like that.
    """
    if kind == "none":
        return points
    if kind == "pca":
        return pca(points)
    # With up to twice as many points as neighbours every point is a neighbour of half of all: there
    # is nothing local to preserve.
    if len(points) <= 2 * NEIGHBOURS:
        return _instead(
            points,
            f"{len(points)} points are too few: with {NEIGHBOURS} neighbours it needs more than"
            f" {2 * NEIGHBOURS}",
        )
    threads = torch.get_num_threads()
    umap = _umap()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # about threads, pieces of the graph, …: what matters is looked at in the result
            placed: Points = umap.UMAP(
                n_neighbors=NEIGHBOURS, n_components=DIMENSIONS, random_state=seed, n_jobs=1
            ).fit_transform(points)
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        return _instead(points, f"it failed ({type(error).__name__}: {error})")
    finally:
        torch.set_num_threads(threads)  # numba sets those of the whole process
    lost = int((~np.isfinite(placed)).any(1).sum())
    if lost:
        return _instead(
            points,
            f"{lost} of {len(points)} points have no finite coordinates, cut off from the graph of"
            " neighbours",
        )
    return placed


def pca(points: Points) -> Points:
    """The first two principal components (n, 2); zeros where there are fewer."""
    x = torch.from_numpy(np.asarray(points, np.float64))
    return np.asarray(principal_axes(x, DIMENSIONS).project(x).numpy())


def _instead(points: Points, why: str) -> Points:
    warnings.warn(f"manifold: PCA instead of UMAP, because {why}.", stacklevel=3)
    return pca(points)


def _umap() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns that Tensorflow is not there
            import umap  # type: ignore[import-untyped]  # only when it is used: it compiles for many seconds
    except ImportError as error:
        raise InvalidInputError(
            "manifold = 'umap' needs the package umap-learn (pip install umap-learn); or use 'pca'"
            " or 'none'."
        ) from error
    return umap
