"""FLT: the 2-D embedding of all clients' centres, the graph of related clients, and the nearest
known signature of a new client.
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
    """The group of each client and, with cut="threshold", the graph Ã whose connected components
    are the groups.

    `centres` is (M, k, e); the first counts[i] centres of client i are real. All real centres are
    embedded together, and A holds the distances between clients in the embedding. Two clients are
    related if their distance is below gamma (cut="threshold"). Or the groups come from a tree over
    A: `clusters` groups by Ward, or average linkage cut at the widest gap between merge heights
    (cut="gap"). With graph=False the graph is not returned.
    """
    points = embed_centres(centres, counts, manifold, seed)
    if not graph and clusters is None and cut == "threshold" and distance == "min":
        # Only the components are needed. A spatial index finds them without the M × M matrix.
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
    """For each signature the index of the nearest one in `known`, by the distance between the
    centres themselves, not between their 2-D embeddings.

    The known signatures are compared block by block, so no matrix of all pairs is formed.
    """
    nearest, least = np.zeros(len(centres), np.int64), np.full(len(centres), np.inf)
    for start in range(0, len(known), BLOCK):
        block = slice(start, start + BLOCK)
        A = distances_to(centres, counts, known[block], known_counts[block], distance)
        closer = A.min(1) < least
        nearest[closer], least[closer] = start + A.argmin(1)[closer], A.min(1)[closer]
    return nearest


def mixing_matrix(groups: NDArray[np.int64], related: Related | None) -> tuple[Tensor, Tensor]:
    """The distinct rows of Ã (rows, M), and the index of each client's row among them; without a
    graph all members of a group are related.
    """
    if related is not None:
        rows, index = torch.unique(torch.from_numpy(related.toarray()), dim=0, return_inverse=True)
        return rows, index
    index = torch.from_numpy(groups)
    return index == torch.arange(int(index.max()) + 1)[:, None], index


def embed_centres(centres: Points, counts: Counts, manifold: Manifold, seed: int) -> Points:
    """Embed the real centres of all clients together: (M, k, e) -> (M, k, u), zeros for centres
    that are not real.
    """
    real = np.arange(centres.shape[1]) < counts[:, None]
    embedded = embed(centres[real], manifold, seed)
    points = np.zeros((*real.shape, embedded.shape[1]))
    points[real] = embedded
    return points


def embed(points: Points, kind: Manifold = "umap", seed: int = 0) -> Points:
    """Embed points (n, d) in two dimensions (n, 2), by UMAP with its default parameters and this
    seed, or by PCA. "none" returns the points unchanged.

    If UMAP fails, PCA is used instead, with a warning. A neighbour graph with several components is
    not a failure: well-separated groups have one, and UMAP embeds its components apart.
    """
    if kind == "none":
        return points
    if kind == "pca":
        return pca(points)
    # With at most twice as many points as neighbours, half of all points are neighbours of each
    # point: there is no local structure to preserve.
    if len(points) <= 2 * NEIGHBOURS:
        return _pca_fallback(
            points,
            f"{len(points)} points are too few: with {NEIGHBOURS} neighbours it needs more than"
            f" {2 * NEIGHBOURS}",
        )
    threads = torch.get_num_threads()
    umap = _umap()
    try:
        with warnings.catch_warnings():
            # About threads, components of the graph, …: the result is checked below.
            warnings.simplefilter("ignore")
            embedded: Points = umap.UMAP(
                n_neighbors=NEIGHBOURS, n_components=DIMENSIONS, random_state=seed, n_jobs=1
            ).fit_transform(points)
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        return _pca_fallback(points, f"it failed ({type(error).__name__}: {error})")
    finally:
        torch.set_num_threads(threads)  # numba changes the whole process
    lost = int((~np.isfinite(embedded)).any(1).sum())
    if lost:
        return _pca_fallback(
            points,
            f"{lost} of {len(points)} points have no finite coordinates, cut off from the graph of"
            " neighbours",
        )
    return embedded


def pca(points: Points) -> Points:
    """The first two principal components (n, 2); zeros where there are fewer."""
    x = torch.from_numpy(np.asarray(points, np.float64))
    return np.asarray(principal_axes(x, DIMENSIONS).project(x).numpy())


def _pca_fallback(points: Points, why: str) -> Points:
    warnings.warn(f"manifold: PCA instead of UMAP, because {why}.", stacklevel=3)
    return pca(points)


def _umap() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Tensorflow is not installed
            import umap  # type: ignore[import-untyped]  # imported only here: it compiles for many seconds
    except ImportError as error:
        raise InvalidInputError(
            "manifold = 'umap' needs the package umap-learn (pip install umap-learn); or use 'pca'"
            " or 'none'."
        ) from error
    return umap
