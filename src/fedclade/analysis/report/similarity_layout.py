"""Pictures of who is like whom: a map, a matrix before and after reordering, a tree with its cut.

Pure maths: the same points give the same picture.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster import hierarchy
from scipy.spatial.distance import pdist, squareform
from sklearn.metrics import adjusted_rand_score  # type: ignore[import-untyped]

from fedclade.clustering.linkage import cut_number
from fedclade.core.pca import principal_axes

Array = NDArray[np.float64]
Labels = NDArray[np.int64]

FEWEST = 3  # fewer clients make no picture
LEAVES = 120  # more branches than this cannot be told apart on a page
TABLED = 12  # groups of which the mean distances are put into a table
MIXED = -2  # a branch whose clients are of several groups


@dataclass(frozen=True)
class Points:
    """What clients are compared by: a row for each of the clients `ids`, in a group each (-1: not
    known yet).
    """

    ids: Labels
    rows: Array
    cluster: Labels
    measure: Literal["euclidean", "cosine"]

    @property
    def placed(self) -> Array:
        """Points whose straight distance orders pairs as the measure does: under the cosine,
        directions.
        """
        if self.measure == "euclidean":
            return self.rows
        length = np.linalg.norm(self.rows, axis=1, keepdims=True)
        return self.rows / np.where(length > 0, length, 1)


def flat(points: Points) -> tuple[Array, float]:
    """The two principal directions (M, 2), and the share of the variance that they show."""
    placed = points.placed
    if np.ptp(placed, axis=0).max() == 0:
        return np.zeros((len(placed), 2)), 1.0
    rows = torch.from_numpy(placed)
    pca = principal_axes(rows, 2)
    shown = pca.singular_values.square().sum() / (rows.double() - pca.mean).square().sum()
    return pca.project(rows).numpy(), min(1.0, float(shown))


@dataclass(frozen=True)
class Related:
    """All pairs of clients and the tree of their merges."""

    points: Points
    distance: Array  # (M, M)
    tree: Array  # scipy's linkage matrix
    linkage: str

    @staticmethod
    def of(points: Points) -> Related:
        """Ward's tree of Euclidean points; average linkage of cosine distances, for which Ward's
        means have no meaning.
        """
        placed = points.placed
        apart = pdist(placed)
        if points.measure == "cosine":
            apart = apart**2 / 2  # 1 − cos of unit vectors
        linkage: Literal["ward", "average"] = "ward" if points.measure == "euclidean" else "average"
        return Related(
            points, squareform(apart), np.asarray(hierarchy.linkage(apart, linkage)), linkage
        )

    @property
    def leaves(self) -> Labels:
        return np.asarray(hierarchy.leaves_list(self.tree), np.int64)

    @property
    def order(self) -> Labels:
        """Clients group by group, and within a group as in the tree: whom the tree puts side by
        side are neighbours.
        """
        place = np.empty(len(self.leaves), np.int64)
        place[self.leaves] = np.arange(len(place))
        cluster = self.points.cluster
        middle = {group: place[cluster == group].mean() for group in np.unique(cluster)}
        return np.lexsort((place, cluster, [middle[group] for group in cluster]))

    def matrix(self, side: int) -> dict[str, Any]:
        """Distances as bytes, in the order of ids and group by group; several clients share a cell
        where there are more than `side`.
        """
        order, cluster = self.order, self.points.cluster
        high = float(np.quantile(self.distance, 0.99)) or 1.0
        sorted_groups = cluster[order]
        starts = np.flatnonzero(np.diff(sorted_groups, prepend=sorted_groups[0] - 1))
        ends = np.append(starts[1:], len(order))
        return {
            "clients": len(order),
            "side": min(side, len(order)),
            "high": high,
            "measure": self.points.measure,
            "before": _bytes(self.distance, side, high),
            "after": _bytes(self.distance[np.ix_(order, order)], side, high),
            "order": self.points.ids[order].tolist() if len(order) <= side else None,
            "ids": self.points.ids.tolist() if len(order) <= side else None,
            "groups": [
                [int(sorted_groups[a]), int(a), int(b)] for a, b in zip(starts, ends, strict=True)
            ],
            "between": self._between(),
        }

    def _between(self) -> dict[str, Any] | None:
        """Mean distances within and between groups: what the picture says, in numbers."""
        cluster = self.points.cluster
        groups, counts = np.unique(cluster, return_counts=True)
        if len(groups) > TABLED:
            return None
        share = (cluster[:, None] == groups) / counts
        mean = share.T @ self.distance @ share
        # A client's distance to itself is no distance within its group.
        inner = np.where(counts > 1, np.diag(mean) * counts / np.maximum(counts - 1, 1), np.nan)
        np.fill_diagonal(mean, inner)
        return {"groups": groups.tolist(), "mean": mean.tolist()}

    def dendrogram(self) -> dict[str, Any]:
        """The top of the tree as lines, each in its group's colour, and where it is cut into as
        many groups as the method found.
        """
        clients, cluster = len(self.points.ids), self.points.cluster
        pure = [int(group) for group in cluster]
        for left, right in self.tree[:, :2].astype(np.int64):
            pure.append(pure[left] if pure[left] == pure[right] else MIXED)
        shown = hierarchy.dendrogram(
            self.tree,
            p=min(LEAVES, clients),
            truncate_mode="lastp",
            no_plot=True,
            link_color_func=lambda node: str(node),
        )
        leaves = list(shown["leaves"] or ())
        sizes = [1 if node < clients else int(self.tree[node - clients, 3]) for node in leaves]
        lines = zip(shown["icoord"], shown["dcoord"], shown["color_list"], strict=True)
        # scipy puts leaves at 5, 15, 25 …
        links = [
            [(x[0] - 5) / 10, (x[2] - 5) / 10, y[0], y[1], y[3], pure[int(node)]]
            for x, y, node in lines
        ]
        found = len(np.unique(cluster))
        cut = self._cut(found)
        return {
            "linkage": self.linkage,
            "leaves": [[pure[node], size] for node, size in zip(leaves, sizes, strict=True)],
            "links": links,
            "groups": found,
            "cut": cut,
            "agreement": (
                float(adjusted_rand_score(cut_number(self.tree, found), cluster))
                if cut is not None
                else None
            ),
        }

    def _cut(self, groups: int) -> float | None:
        """A height between the merge that leaves `groups` groups and the next; None for one
        group.
        """
        if groups == 1:
            return None
        heights = np.append(0.0, self.tree[:, 2])
        at = len(heights) - groups
        return float((heights[at] + heights[at + 1]) / 2)


def _bytes(distance: Array, side: int, high: float) -> str:
    """A square of bytes in base64, row by row; cells are means over blocks of as nearly equal size
    as can be.
    """
    number = len(distance)
    if number > side:
        starts = np.arange(side) * number // side
        size = np.diff(np.append(starts, number))
        distance = np.add.reduceat(
            np.add.reduceat(distance, starts, axis=0), starts, axis=1
        ) / np.outer(size, size)
    grey = np.rint(255 * np.clip(distance / high, 0, 1)).astype(np.uint8)
    return base64.b64encode(grey.tobytes()).decode("ascii")
