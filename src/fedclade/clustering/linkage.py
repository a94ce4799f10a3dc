"""Hierarchical clustering: linkage matrices and where to cut them.

A tree of M clients is scipy's linkage matrix (M−1, 4). Row s merges nodes tree[s, 0] and tree[s, 1]
at height tree[s, 2] into node M+s, which has tree[s, 3] clients. Nodes below M are the clients.
Heights never decrease. A cut applies only the first merges. It gives the label of each client
(M,), numbered by first appearance.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering.graph import canonical_labels, check_symmetric
from fedclade.errors import require

LinkageMatrix = NDArray[np.float64]

ROUNDING = 1e-9  # the tolerance of ratios, and of gaps in units of the top height
FLOAT64_UP_TO = 5000  # clients: a matrix of 200 MB
METHODS = ("single", "average", "complete", "ward")


def linkage(
    distance: NDArray[np.floating[Any]], method: Literal["single", "average", "complete", "ward"]
) -> LinkageMatrix:
    """The tree of a matrix of distances.

    Args:
        distance: (M, M) the symmetric distances.
        method: the linkage. "ward" treats the distances as Euclidean, as scipy does.
    """
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    require(method in METHODS, "method", method, f"must be one of {', '.join(METHODS)}")
    check_symmetric(distance, "distance")
    if len(distance) == 1:
        return np.empty((0, 4))
    return np.asarray(hierarchy.linkage(squareform(distance, checks=False), method))


def weighted_ward(
    points: NDArray[np.floating[Any]], weight: NDArray[np.number[Any]]
) -> LinkageMatrix:
    """Size-weighted Ward linkage: the height of a merge is the two-sample statistic
    n_A n_B / (n_A + n_B) · ‖μ_A − μ_B‖² / e.

    With points in units of the sampling noise at n = 1, the height is about 1 for two clients of
    one distribution, for any sizes.

    This is the nearest-neighbor chain algorithm: a chain of nearest neighbors ends in two clusters
    that are each other's nearest. They can be merged immediately, since under Ward's cost a merge
    never brings a third cluster nearer (reducibility). The merges are sorted at the end. Each merge
    updates a few rows, so the total is O(M²). The Lance-Williams formula updates the costs in one
    M × M matrix (float32 above 5,000 clients, else float64). The heights are computed from the
    means in float64.

    Args:
        points: (M, e) the means μ of the clients.
        weight: (M,) their sizes n.
    """
    # The means and sizes of the clusters: copies, since they change.
    mean, n = np.array(points, np.float64), np.array(weight, np.float64)
    require(
        mean.ndim == 2 and mean.size > 0, "points.shape", mean.shape, "must be (M, e) with M, e ≥ 1"
    )
    require(bool(np.isfinite(mean).all()), "points", "NaN or infinity", "must be finite")
    clients, dim = mean.shape
    require(n.shape == (clients,), "weight.shape", n.shape, f"must be ({clients},)")
    require(
        bool((np.isfinite(n) & (n > 0)).all()),
        "weight",
        float(n.min()),
        "must be above 0 and finite",
    )

    cost = _costs(mean, n)
    node, count, height = np.arange(clients), np.ones(clients, np.int64), np.zeros(clients)
    merges: list[tuple[int, int, float, int]] = []
    active = np.ones(clients, bool)
    chain: list[int] = []
    while len(merges) < clients - 1:
        if not chain:
            chain = [int(active.argmax())]
        top = chain[-1]
        nearest = int(cost[top].argmin())
        if len(chain) == 1 or cost[top, nearest] < cost[top, chain[-2]]:
            chain.append(nearest)
            continue
        b, a = chain.pop(), chain.pop()  # b is merged into a
        total = n[b] + n[a]
        # A height is at least that of its parts; max() ensures it despite rounding.
        statistic = float(n[b] * n[a] / total * ((mean[b] - mean[a]) ** 2).sum() / dim)
        height[a] = max(statistic, height[b], height[a])
        count[a] += count[b]
        merges.append((int(node[b]), int(node[a]), float(height[a]), int(count[a])))
        first, second = cost[a], cost[b]
        merged = ((n[a] + n) * first + (n[b] + n) * second - n * first[b]) / (total + n)
        # This ensures reducibility despite rounding: the chain cannot loop.
        merged = np.maximum(merged, np.minimum(first, second))
        merged[a] = np.inf
        cost[a], cost[:, a], cost[:, b] = merged, merged, np.inf
        # In this form equal means stay exactly equal, and their cost is exactly 0.
        mean[a] += n[b] / total * (mean[b] - mean[a])
        n[a], node[a], active[b] = total, clients + len(merges) - 1, False
    return _sorted(merges, clients)


def micro_clusters(
    points: NDArray[np.floating[Any]],
    weight: NDArray[np.number[Any]],
    clusters: int,
    block: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Many small clusters of clients, for a tree of more clients than an M × M matrix can have.

    The clients are divided at random into blocks, each block gets a tree of its own, and the M −
    `clusters` cheapest merges of all trees are applied. A random block is a sample of all clients,
    so the clusters differ by no direction that the clients do not differ by. (Blocks of neighbors
    would: the tree of clusters of pure noise then has a top that is several times too high.)

    The time is O(M · `block`), the memory O(`block`²).

    Args:
        points: (M, e) the means of the clients.
        weight: (M,) their sizes.
        clusters: the number of clusters, from the number of blocks to M. There are fewer if merges
            have equal heights.
        block: the largest number of clients of a block.
        rng: draws the blocks.
    """
    clients = len(points)
    blocks = np.array_split(rng.permutation(clients), -(-clients // block))
    require(
        len(blocks) <= clusters <= clients,
        "clusters",
        clusters,
        f"must be between the number of blocks, {len(blocks)}, and of clients, {clients}",
    )
    trees = [weighted_ward(points[members], weight[members]) for members in blocks]
    heights = np.concatenate([_heights(tree) for tree in trees])
    merges = clients - clusters
    highest = np.partition(heights, merges - 1)[merges - 1] if merges else -np.inf
    labels, formed = np.empty(clients, np.int64), 0
    for members, tree in zip(blocks, trees, strict=True):
        inner = _labels(tree, int(np.searchsorted(tree[:, 2], highest, side="right")))
        labels[members] = formed + inner
        formed += int(inner.max()) + 1
    return canonical_labels(labels)


def _costs(points: NDArray[np.float64], n: NDArray[np.float64]) -> NDArray[np.floating[Any]]:
    """Ward's cost for every pair of clients, infinite on the diagonal."""
    from scipy.spatial.distance import cdist

    clients = len(points)
    cost = np.empty((clients, clients), np.float64 if clients <= FLOAT64_UP_TO else np.float32)
    for start in range(0, clients, 512):
        rows = slice(start, start + 512)
        # Differences instead of the Gram matrix: an outlier does not reduce the precision of the
        # others, and the matrix is exactly symmetric.
        cost[rows] = cdist(points[rows], points, "sqeuclidean") * (
            n[rows, None] * n / (n[rows, None] + n)
        )
    np.fill_diagonal(cost, np.inf)
    return cost


def _sorted(merges: list[tuple[int, int, float, int]], clients: int) -> LinkageMatrix:
    """The merges in order of height, as scipy's linkage matrix. The sort is stable, and a parent is
    never lower than its parts. So parts stay before the parent.
    """
    tree = np.array(merges, np.float64).reshape(-1, 4)
    order = np.argsort(tree[:, 2], kind="stable")
    name = np.concatenate([np.arange(clients), clients + np.argsort(order)])
    tree[:, :2] = np.sort(name[tree[:, :2].astype(np.int64)], axis=1)
    return np.asarray(tree[order])


def cut_number(tree: LinkageMatrix, clusters: int) -> NDArray[np.int64]:
    """Cut a tree into exactly `clusters` clusters, even if merge heights are equal. (scipy's
    `maxclust` then gives fewer.)

    Args:
        tree: the linkage matrix.
        clusters: the number of clusters.
    """
    clients = len(_heights(tree)) + 1
    require(
        1 <= clusters <= clients,
        "clusters",
        clusters,
        f"must be between 1 and the number of clients, {clients}",
    )
    return _labels(tree, clients - clusters)


def cut_height(tree: LinkageMatrix, height: float) -> NDArray[np.int64]:
    """Cut a tree at a height: apply all merges strictly below `height`. This is scipy's `distance`
    criterion with < instead of ≤, as in FLT's graph.

    Args:
        tree: the linkage matrix.
        height: the height.
    """
    require(not np.isnan(height), "height", height, "must be a number")
    return _labels(tree, int(np.searchsorted(_heights(tree), height, side="left")))


def cut_gap(tree: LinkageMatrix) -> NDArray[np.int64]:
    """Cut a tree at the widest gap between successive merge heights. If several are equally wide,
    the highest one is cut, which gives fewer clusters.

    The ranges below the first merge and above the last do not count as gaps. So the result is one
    cluster for two clients, or if all heights are equal (up to rounding). Any other tree is cut:
    this rule does not test whether there are groups.

    Args:
        tree: the linkage matrix.
    """
    heights = _heights(tree)
    gaps = np.diff(heights)[::-1]  # from the top: gap g separates g + 2 clusters
    if len(gaps) == 0 or gaps.max() <= ROUNDING * heights[-1]:
        return _labels(tree, len(heights))
    widest = int(np.argmax(gaps >= gaps.max() - ROUNDING * heights[-1]))
    return cut_number(tree, widest + 2)


def cut_ratio(tree: LinkageMatrix, num_ratios: int | None = None) -> NDArray[np.int64]:
    """Cut a tree at the largest ratio between successive merge heights (Clade, step 4). If several
    ratios are equal, the highest one is cut.

    Heights below 1e-12 of the top are raised to that, so that equal points (height 0) cause no
    division by zero. The result is one cluster for two clients, or if all heights of these ratios
    are equal (up to rounding).

    Args:
        tree: the linkage matrix.
        num_ratios: how many ratios to compare, from the top; None for M // 2. The result has at
            most `num_ratios` + 1 clusters.
    """
    heights = _heights(tree)
    num_ratios = max(1, (len(heights) + 1) // 2) if num_ratios is None else num_ratios
    require(num_ratios >= 1, "num_ratios", num_ratios, "must be 1 or more")
    if len(heights) < 2 or heights[-1] <= 0:
        return _labels(tree, len(heights))
    ratio = step_ratios(tree, num_ratios)
    if ratio.max() <= 1 + ROUNDING:
        return _labels(tree, len(heights))
    widest = int(np.argmax(ratio >= ratio.max() * (1 - ROUNDING)))
    return cut_number(tree, widest + 2)


def step_ratios(tree: LinkageMatrix, num_ratios: int) -> NDArray[np.float64]:
    """The ratios between successive merge heights, from the top. Heights below 1e-12 of the top are
    raised to that.

    Args:
        tree: the linkage matrix.
        num_ratios: how many ratios.
    """
    heights = _heights(tree)
    down = np.maximum(heights[::-1], 1e-12 * max(float(heights[-1]), 1e-300))
    return np.asarray((down[:-1] / down[1:])[:num_ratios])


def _heights(tree: LinkageMatrix) -> NDArray[np.float64]:
    """The merge heights of a valid linkage matrix."""
    require(
        tree.ndim == 2 and tree.shape[1] == 4,
        "tree.shape",
        tree.shape,
        "must be (M−1, 4), scipy's linkage matrix",
    )
    heights = np.asarray(tree[:, 2])
    require(
        bool((np.diff(heights) >= 0).all()),
        "tree",
        "a merge is lower than the one before it",
        "merge heights must not decrease",
    )
    return heights


def _labels(tree: LinkageMatrix, merges: int) -> NDArray[np.int64]:
    """The cluster of each client after the first `merges` merges."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    clients = len(tree) + 1
    children = tree[:merges, :2].astype(np.int64).ravel()
    parents = np.repeat(clients + np.arange(merges), 2)
    edges = coo_array(
        (np.ones(len(children), bool), (children, parents)),
        shape=(2 * clients - 1, 2 * clients - 1),
    )
    return canonical_labels(connected_components(edges, directed=False)[1][:clients])
