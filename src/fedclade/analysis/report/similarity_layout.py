"""Similarity of clients: a map, a distance matrix before and after reordering, and a dendrogram
with its cut.

Pure functions: the same points give the same plots.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
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

MIN_CLIENTS = 3  # for a plot
MAX_LEAVES = 120  # more branches cannot be distinguished on a page
MAX_TABLE_GROUPS = 12  # in the table of mean distances
MIXED = -2  # a branch with clients of several groups


@dataclass(frozen=True)
class Points:
    """The features by which clients are compared.

    Args:
        ids: the clients.
        rows: the features, a row for each client.
        cluster: the group of each client; -1 if not known yet.
        measure: the distance.
    """

    ids: Labels
    rows: Array
    cluster: Labels
    measure: Literal["euclidean", "cosine"]

    @property
    def coordinates(self) -> Array:
        """Points whose Euclidean distance gives the same order of pairs as the measure: unit
        vectors for the cosine.
        """
        if self.measure == "euclidean":
            return self.rows
        length = np.linalg.norm(self.rows, axis=1, keepdims=True)
        return self.rows / np.where(length > 0, length, 1)


def project_2d(points: Points) -> tuple[Array, float]:
    """The first two principal components (M, 2), and their share of the variance."""
    coordinates = points.coordinates
    if np.ptp(coordinates, axis=0).max() == 0:
        return np.zeros((len(coordinates), 2)), 1.0
    rows = torch.from_numpy(coordinates)
    pca = principal_axes(rows, 2)
    share = pca.singular_values.square().sum() / (rows.double() - pca.mean).square().sum()
    return pca.project(rows).numpy(), min(1.0, float(share))


def client_map(points: Points, names: Sequence[str] | None) -> dict[str, Any]:
    """The description of the map: a point for each client.

    Args:
        points: the clients.
        names: the names to write next to them; None for no names.
    """
    xy, share = project_2d(points)
    return {
        "kind": "map",
        "label": (
            f"Map of {len(points.ids):,} clients; two principal components with"
            f" {100 * share:.0f} % of the variance"
        ),
        "x": {"label": "First component"},
        "y": {"label": "Second component"},
        "id": points.ids.tolist(),
        "px": xy[:, 0].tolist(),
        "py": xy[:, 1].tolist(),
        "groups": points.cluster.tolist(),
        "names": names,
        "share": share,
    }


@dataclass(frozen=True)
class Related:
    """The distances of all pairs of clients, and the tree of their merges."""

    points: Points
    distance: Array  # (M, M)
    tree: Array  # scipy's linkage matrix
    linkage: str

    @staticmethod
    def of(points: Points) -> Related:
        """Ward's linkage for Euclidean distances; average linkage for cosine distances, for which
        Ward's linkage is not defined.
        """
        distances = pdist(points.coordinates)
        if points.measure == "cosine":
            distances = distances**2 / 2  # 1 − cos of unit vectors
        linkage: Literal["ward", "average"] = "ward" if points.measure == "euclidean" else "average"
        return Related(
            points,
            squareform(distances),
            np.asarray(hierarchy.linkage(distances, linkage)),
            linkage,
        )

    @property
    def leaves(self) -> Labels:
        return np.asarray(hierarchy.leaves_list(self.tree), np.int64)

    @property
    def order(self) -> Labels:
        """Clients ordered by group, and within a group by their place in the tree."""
        place = np.empty(len(self.leaves), np.int64)
        place[self.leaves] = np.arange(len(place))
        cluster = self.points.cluster
        middle = {group: place[cluster == group].mean() for group in np.unique(cluster)}
        return np.lexsort((place, cluster, [middle[group] for group in cluster]))

    def matrix(self, side: int, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Distances as bytes, ordered by id and ordered by group. If there are more than `side`
        clients, several share a cell.

        Args:
            side: the largest number of rows.
            names: the name of each client, in the order of the points; None for no names.
        """
        order, cluster = self.order, self.points.cluster
        high = float(np.quantile(self.distance, 0.99)) or 1.0
        sorted_groups = cluster[order]
        starts = np.flatnonzero(np.diff(sorted_groups, prepend=sorted_groups[0] - 1))
        ends = np.append(starts[1:], len(order))
        return {
            "kind": "matrix",
            "label": f"Distances between {len(order):,} clients",
            "scale": f"{self.points.measure} distance".capitalize(),
            "names": None if names is None else [names[place] for place in order],
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
        """Mean distances within and between groups: the matrix plot as a table."""
        cluster = self.points.cluster
        groups, counts = np.unique(cluster, return_counts=True)
        if len(groups) > MAX_TABLE_GROUPS:
            return None
        share = (cluster[:, None] == groups) / counts
        mean = share.T @ self.distance @ share
        # Exclude the distance of a client to itself.
        inner = np.where(counts > 1, np.diag(mean) * counts / np.maximum(counts - 1, 1), np.nan)
        np.fill_diagonal(mean, inner)
        return {"groups": groups.tolist(), "mean": mean.tolist()}

    def dendrogram(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """The top of the tree as lines, each with its group, and the height that cuts the tree into
        as many groups as the method found.

        Args:
            names: the name of each client, in the order of the points; None for no names.
        """
        clients, cluster = len(self.points.ids), self.points.cluster
        # The group of each node, or MIXED.
        node_group = [int(group) for group in cluster]
        for left, right in self.tree[:, :2].astype(np.int64):
            same = node_group[left] == node_group[right]
            node_group.append(node_group[left] if same else MIXED)
        drawn = hierarchy.dendrogram(
            self.tree,
            p=min(MAX_LEAVES, clients),
            truncate_mode="lastp",
            no_plot=True,
            link_color_func=lambda node: str(node),
        )
        leaves = list(drawn["leaves"] or ())
        sizes = [1 if node < clients else int(self.tree[node - clients, 3]) for node in leaves]
        lines = zip(drawn["icoord"], drawn["dcoord"], drawn["color_list"], strict=True)
        # scipy puts leaves at 5, 15, 25 …
        links = [
            [(x[0] - 5) / 10, (x[2] - 5) / 10, y[0], y[1], y[3], node_group[int(node)]]
            for x, y, node in lines
        ]
        groups = len(np.unique(cluster))
        cut = self._cut(groups)
        return {
            "kind": "tree",
            "label": f"Dendrogram of {clients:,} clients, {self.linkage} linkage",
            "x": {"label": "Clients; neighbors are similar"},
            "y": {"label": "Height of the merge"},
            "names": [names[node] for node in leaves] if names is not None else None,
            "linkage": self.linkage,
            "leaves": [[node_group[node], size] for node, size in zip(leaves, sizes, strict=True)],
            "links": links,
            "groups": groups,
            "cut": cut,
            "agreement": (
                float(adjusted_rand_score(cut_number(self.tree, groups), cluster))
                if cut is not None
                else None
            ),
        }

    def _cut(self, groups: int) -> float | None:
        """A height between the merge that gives `groups` groups and the next merge; None for one
        group.
        """
        if groups == 1:
            return None
        heights = np.append(0.0, self.tree[:, 2])
        index = len(heights) - groups
        return float((heights[index] + heights[index + 1]) / 2)


def _bytes(distance: Array, side: int, high: float) -> str:
    """A square of bytes in base64, row by row. A cell is the mean over a block; blocks have nearly
    equal sizes.
    """
    number = len(distance)
    if number > side:
        starts = np.arange(side) * number // side
        size = np.diff(np.append(starts, number))
        distance = np.add.reduceat(
            np.add.reduceat(distance, starts, axis=0), starts, axis=1
        ) / np.outer(size, size)
    gray = np.rint(255 * np.clip(distance / high, 0, 1)).astype(np.uint8)
    return base64.b64encode(gray.tobytes()).decode("ascii")
