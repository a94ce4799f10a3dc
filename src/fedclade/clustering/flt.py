"""FLT: the embedding of all clients' cluster centers in a few dimensions, the graph of related
clients, and the relations and groups of newcomers.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.clustering.graph import close_components, components, threshold_graph
from fedclade.clustering.linkage import cut_gap, cut_number, linkage
from fedclade.clustering.set_distances import BLOCK, Kind, distances, distances_to
from fedclade.core.pca import principal_axes
from fedclade.errors import FedcladeWarning, InvalidInputError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Manifold: TypeAlias = Literal["umap", "pca", "none"]
Distance: TypeAlias = Kind
Cut: TypeAlias = Literal["threshold", "gap"]
Points: TypeAlias = NDArray[np.floating[Any]]
Counts: TypeAlias = NDArray[np.integer[Any]]
Related: TypeAlias = "csr_array[np.bool_, tuple[int, int]]"

DIMENSIONS = 2  # u, by default
NEIGHBORS = 15  # UMAP's default
_NO_GROUP = -1


def cluster_signatures(
    centers: Points,
    counts: Counts,
    manifold: Manifold,
    distance: Distance,
    cut: Cut,
    gamma: float,
    clusters: int | None,
    seed: int,
    graph: bool = True,
    dim: int = DIMENSIONS,
) -> tuple[NDArray[np.int64], Related | None]:
    """FLT's groups: the centers of all clients are embedded together, and clients are grouped by
    their distances A in the embedding.

    Args:
        centers: (M, k, e) the signatures.
        counts: (M,) the number of real centers of each client, the first ones of its k.
        manifold: the embedding, see `embed`.
        distance: the distance of two clients, see `set_distances.distances`.
        cut: "threshold" makes two clients related if A_ij < gamma; the groups are the connected
            components. "gap" cuts the average-linkage tree of A at the widest gap between merge
            heights.
        gamma: γ, the threshold.
        clusters: if not None, the number of groups in Ward's tree of A; `cut` is then ignored.
        seed: the seed of UMAP.
        graph: whether to return the graph.
        dim: u, the dimensions of the embedding.

    Returns:
        (M,) the group of each client; and the graph Ã (M, M), or None if there is no threshold or
        `graph` is False.
    """
    points = embed_centers(centers, counts, manifold, seed, dim)
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


def relate_newcomers(
    centers: Points,
    counts: Counts,
    is_new: NDArray[np.bool_],
    groups: NDArray[np.int64],
    manifold: Manifold,
    distance: Distance,
    gamma: float | None,
    seed: int,
    graph: bool = True,
    dim: int = DIMENSIONS,
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
    """FLT's one-off phase in stages: the centers of all M clients, known ones and N newcomers, are
    embedded together again, and the newcomers are related to all clients. Relations between known
    clients are not computed again.

    Args:
        centers: (M, k, e) the signatures.
        counts: (M,) their numbers of real centers.
        is_new: (M,) whether a client is a newcomer.
        groups: (M,) the groups of the known clients; the entries of newcomers are ignored.
        manifold: the embedding, see `embed`.
        distance: the distance of two clients, see `set_distances.distances`.
        gamma: γ; None if there is no threshold, and every newcomer joins a known group.
        seed: the seed of UMAP.
        graph: whether clients are related by the threshold; False if the members of a group are.
        dim: u, the dimensions of the embedding.

    Returns:
        (N,) the groups of the newcomers; (N, M) to whom they are related; and (N,) the nearest
        known client of each, as a place among the known ones.
    """
    points = embed_centers(centers, counts, manifold, seed, dim)
    A = distances_to(points[is_new], counts[is_new], points, counts, distance)
    limit = np.inf if gamma is None else gamma
    joined = newcomer_groups(A, is_new, groups, limit)
    if graph and gamma is not None:
        related = limit > A
        related[:, is_new] |= related[:, is_new].T | np.eye(len(A), dtype=bool)
    else:
        all_groups = groups.copy()
        all_groups[is_new] = joined
        related = joined[:, None] == all_groups
    return joined, related, A[:, ~is_new].argmin(1)


def newcomer_groups(
    A: NDArray[np.float64], is_new: NDArray[np.bool_], groups: NDArray[np.int64], gamma: float
) -> NDArray[np.int64]:
    """(N,) the groups of newcomers. A newcomer joins the group of the nearest known client if that
    is closer than gamma. The other newcomers join a newcomer with a group to which they are
    connected, or open a new group with those to which they are connected.

    Args:
        A: (N, M) the distances of the newcomers to all clients.
        is_new: (M,) whether a client is a newcomer.
        groups: (M,) the groups of the known clients; the entries of newcomers are ignored.
        gamma: γ; infinity if every newcomer joins a known group.
    """
    from scipy.sparse import csr_array

    known = A[:, ~is_new]
    nearest = known.argmin(1)
    joined = np.where(
        known[np.arange(len(A)), nearest] < gamma, groups[~is_new][nearest], _NO_GROUP
    )
    close = A[:, is_new] < gamma
    component = components(csr_array(close | close.T | np.eye(len(A), dtype=bool)))
    next_group = int(groups[~is_new].max()) + 1
    for members in (np.flatnonzero(component == c) for c in range(int(component.max()) + 1)):
        without = members[joined[members] == _NO_GROUP]
        with_group = members[joined[members] != _NO_GROUP]
        if len(without):
            joined[without] = joined[with_group[0]] if len(with_group) else next_group
            next_group += len(with_group) == 0
    return joined


def nearest_signature(
    centers: Points, counts: Counts, known: Points, known_counts: Counts, distance: Distance
) -> NDArray[np.int64]:
    """(M,) the index of the known signature that is nearest to each signature. It compares the
    centers, not their embeddings in u dimensions.

    The known signatures are compared block by block, so no matrix of all pairs is formed.

    Args:
        centers: (M, k, e) the signatures.
        counts: (M,) their numbers of real centers.
        known: (N, k, e) the known signatures.
        known_counts: (N,) their numbers of real centers.
        distance: the distance of two signatures, see `set_distances.distances`.
    """
    nearest, least = np.zeros(len(centers), np.int64), np.full(len(centers), np.inf)
    for start in range(0, len(known), BLOCK):
        block = slice(start, start + BLOCK)
        A = distances_to(centers, counts, known[block], known_counts[block], distance)
        closer = A.min(1) < least
        nearest[closer], least[closer] = start + A.argmin(1)[closer], A.min(1)[closer]
    return nearest


def mixing_matrix(groups: NDArray[np.int64], related: Related | None) -> tuple[Tensor, Tensor]:
    """The distinct rows of Ã.

    Args:
        groups: (M,) the group of each client.
        related: the graph Ã; None if all clients of a group are related.

    Returns:
        (rows, M) the distinct rows, and (M,) the row of each client.
    """
    if related is not None:
        rows, index = torch.unique(torch.from_numpy(related.toarray()), dim=0, return_inverse=True)
        return rows, index
    index = torch.from_numpy(groups)
    return index == torch.arange(int(index.max()) + 1)[:, None], index


def extend_mixing(
    mixing: Tensor, row: Tensor, clients: Tensor, is_new: Tensor, related: Tensor, nearest: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct rows of Ã after newcomers were related, and where their models come from.

    Args:
        mixing: (rows, M) the distinct rows so far.
        row: (M,) the row of each known client.
        clients: (P,) the known clients and the newcomers, in ascending order.
        is_new: (P,) whether a client is a newcomer.
        related: (N, P) to whom the newcomers are related.
        nearest: (N,) the nearest known client of each, as a place among the known ones.

    Returns:
        (R, M) the distinct rows; (P,) the row of each client; and (R,) the old row whose model
        starts the new row: that of the known clients that have it, else that of the nearest one.
    """
    known, new = clients[~is_new], clients[is_new]
    matrix = mixing.new_zeros(mixing.shape[1], mixing.shape[1])
    matrix[known] = mixing[row[known]]
    matrix[new[:, None], clients] = related
    matrix[clients[:, None], new] = related.T
    rows, index = torch.unique(matrix[clients], dim=0, return_inverse=True)
    parent = torch.empty(len(rows), dtype=torch.int64)
    parent[index[is_new]] = row[known[nearest]]
    parent[index[~is_new]] = row[known]  # clients with equal new rows had equal old rows
    return rows, index, parent


def embed_centers(
    centers: Points, counts: Counts, manifold: Manifold, seed: int, dim: int = DIMENSIONS
) -> Points:
    """Embed the real centers of all clients together: (M, k, e) -> (M, k, u), with zeros for the
    other centers.

    Args:
        centers: (M, k, e) the signatures.
        counts: (M,) their numbers of real centers.
        manifold: the embedding, see `embed`.
        seed: the seed of UMAP.
        dim: u, the dimensions of the embedding.
    """
    real = np.arange(centers.shape[1]) < counts[:, None]
    embedded = embed(centers[real], manifold, seed, dim)
    points = np.zeros((*real.shape, embedded.shape[1]))
    points[real] = embedded
    return points


def embed(points: Points, kind: Manifold = "umap", seed: int = 0, dim: int = DIMENSIONS) -> Points:
    """Embed points (n, d) in u dimensions (n, u).

    If UMAP fails, PCA is used instead, with a warning. A neighbor graph with several components is
    not a failure: UMAP embeds them apart, as it should for well-separated groups.

    Args:
        points: (n, d) the points.
        kind: "umap" with UMAP's default parameters, "pca", or "none": the points unchanged.
        seed: the seed of UMAP.
        dim: u.
    """
    if kind == "none":
        return points
    if kind == "pca":
        return pca(points, dim)
    # With at most twice as many points as neighbors, half of all points are neighbors of each
    # point: there is no local structure to preserve.
    if len(points) <= 2 * NEIGHBORS:
        return _pca_fallback(
            points,
            dim,
            f"{len(points)} points are too few: with {NEIGHBORS} neighbors UMAP needs more than"
            f" {2 * NEIGHBORS}",
        )
    threads = torch.get_num_threads()
    umap = _umap()
    try:
        with warnings.catch_warnings():
            # UMAP warns about threads and components of the graph; the result is checked below.
            warnings.simplefilter("ignore")
            embedded: Points = umap.UMAP(
                n_neighbors=NEIGHBORS, n_components=dim, random_state=seed, n_jobs=1
            ).fit_transform(points)
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:
        return _pca_fallback(points, dim, f"UMAP failed ({type(error).__name__}: {error})")
    finally:
        torch.set_num_threads(threads)  # numba changes the number for the whole process
    lost = int((~np.isfinite(embedded)).any(1).sum())
    if lost:
        return _pca_fallback(
            points,
            dim,
            f"{lost} of {len(points)} points have no finite coordinates: they have no neighbors in"
            " UMAP's graph",
        )
    return embedded


def pca(points: Points, dim: int = DIMENSIONS) -> Points:
    """The first principal components (n, dim) of points (n, d), with zeros for missing ones."""
    x = torch.from_numpy(np.asarray(points, np.float64))
    return np.asarray(principal_axes(x, dim).project(x).numpy())


def _pca_fallback(points: Points, dim: int, reason: str) -> Points:
    warnings.warn(
        FedcladeWarning(f"manifold = 'umap': {reason}. PCA is used instead.", "manifold"),
        stacklevel=3,
    )
    return pca(points, dim)


def _umap() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning that Tensorflow is not installed
            import umap  # type: ignore[import-untyped]  # only here: it compiles for many seconds
    except ImportError as error:
        raise InvalidInputError(
            "manifold = 'umap': needs the package umap-learn (pip install umap-learn). Install it,"
            " or use 'pca' or 'none'.",
            "manifold",
        ) from error
    return umap
