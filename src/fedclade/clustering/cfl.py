"""CFL: the optimal bipartition of a cluster, the test that decides on a split, and the tree of
splits.

Symbols of the CFL paper: α_ij = cos(Δθ_i, Δθ_j); the bipartition c₁ ∪ c₂ = c minimises α_cross^max
= max over i ∈ c₁, j ∈ c₂ of α_ij.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fedclade.clustering.cosine import cosine
from fedclade.clustering.graph import check_symmetric
from fedclade.clustering.linkage import cut_number
from fedclade.clustering.linkage import linkage as linkage_matrix
from fedclade.errors import require

UNASSIGNED = -1
WARM_UP = 3  # rounds of a node before its scale is meaningful
# Clients of one distribution are split by chance at 1.02 to 1.08 times the noise inside the sides
# (docs/methods/cfl.md).
MARGIN = 1.2
BLOCK = 1024  # rows at a time: no matrix of all pairs of clients is formed


def bisect(
    updates: Tensor,
    weight: Tensor,
    eps1: float,
    eps2: float,
    gamma_max: float | Literal["auto"] = "auto",
    linkage: Literal["single", "complete"] = "single",
) -> Tensor | None:
    """The side (M,) of each client if their updates Δθ_i (M, P) call for a split of the cluster,
    else None.

    The cluster must be stationary while its clients are not: ‖Δθ_c‖ < eps1, Δθ_c the mean by
    `weight` (M,), and max_i ‖Δθ_i‖ > eps2. Then the optimal bipartition must exceed the noise.
    gamma_max is the largest noise of an update relative to its length: two updates of one direction
    are at most 2 arcsin(gamma_max) apart, so their similarity is at least 1 - 2 gamma_max². If all
    pairs across are less similar than that, gamma_max < sqrt((1 - α_cross^max) / 2), no two clients
    of one distribution are on different sides.
    """
    centre = (weight / weight.sum()).to(updates) @ updates
    if not (float(update_norms(centre[None])) < eps1 and float(update_norms(updates).max()) > eps2):
        return None
    similarity = cosine(updates).cpu().numpy()
    side, cross = bipartition(similarity, linkage)
    noise = noise_level(similarity, side) if gamma_max == "auto" else gamma_max
    return torch.from_numpy(side) if noise < math.sqrt((1 - cross) / 2) else None


def bipartition(
    similarity: NDArray[np.floating[Any]], linkage: Literal["single", "complete"] = "single"
) -> tuple[NDArray[np.bool_], float]:
    """CFL's split of a cluster in two: the side of each client (False for the first client's side),
    and α_cross^max between the sides.

    "single" is the paper's Algorithm 1, the bipartition with the least α_cross^max of all: single
    linkage merges the most similar pairs until two clusters are left, in O(M²). If several
    bipartitions are optimal, as with equal similarities, the same one is always chosen. "complete"
    (the authors' code) cuts the complete-linkage tree in two; it favours even sides and is not
    optimal.
    """
    require(
        linkage in ("single", "complete"), "linkage", linkage, "must be one of single, complete"
    )
    check_symmetric(similarity, "similarity")
    require(
        len(similarity) >= 2,
        "similarity.shape",
        similarity.shape,
        "must be of at least two clients: one cannot be split",
    )
    # Both linkages depend on the order of the distances only, and negation keeps it exactly.
    side = np.asarray(cut_number(linkage_matrix(-similarity, linkage), 2) == 1)
    return side, float(similarity[np.ix_(side, ~side)].max())


def separation_gap(
    similarity: NDArray[np.floating[Any]], groups: NDArray[np.integer[Any]]
) -> float:
    """CFL's g(α) = α_intra^min − α_cross^max over pairs i ≠ j: if it is above 0, the bipartition
    cannot split a group.

    Without a pair across groups α_cross^max is −1, the least cosine; without a pair inside a group
    α_intra^min is 1, the greatest.
    """
    check_symmetric(similarity, "similarity")
    groups = np.asarray(groups)
    require(
        groups.shape == (len(similarity),),
        "groups.shape",
        groups.shape,
        f"must be ({len(similarity)},), a group for each client",
    )
    same = groups[:, None] == groups
    inside = same & ~np.eye(len(groups), dtype=bool)
    return float(
        np.min(similarity, where=inside, initial=1.0)
        - np.max(similarity, where=~same, initial=-1.0)
    )


def noise_level(similarity: NDArray[np.floating[Any]], side: NDArray[np.bool_]) -> float:
    """γ_max estimated from the updates: the size of the noise, with a margin, if updates of one
    side differed by noise only.

    ᾱ is the mean similarity of a client to the most similar other client on its side. The bound
    similarity >= 1 - 2 γ_max² gives γ_max = MARGIN sqrt((1 - ᾱ) / 2). If each side has one client,
    the noise cannot be estimated; 0 then leaves the decision to eps1 and eps2.
    """
    same_side = (side[:, None] == side) & ~np.eye(len(side), dtype=bool)
    closest = np.where(same_side, similarity, -np.inf).max(1)[same_side.any(1)]
    return MARGIN * math.sqrt((1 - closest.mean()) / 2) if len(closest) else 0.0


def update_norms(updates: Tensor) -> Tensor:
    """(M,) the norm of each update."""
    norms: Tensor = torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64)
    return norms.cpu()


@dataclass(frozen=True)
class ParameterTree:
    """A tree of models that grows by splitting leaves in two, and the clients in its leaves.

    Node 0 is the root; children have higher numbers than their parent. The model of a leaf is
    trained. An inner node keeps its model at the time of the split, and the cache has the projected
    updates that its clients made from this model: they decided the split.
    """

    models: dict[str, Tensor]  # a row for each node
    cluster_ids: Tensor  # (clients,) the leaf of each, or -1
    parent: Tensor  # (nodes,) the parent of each, -1 for the root
    age: Tensor  # (nodes,) rounds that it was trained in
    scale: Tensor  # (nodes,) the longest update of its rounds so far
    # (nodes,) inner node: its split was validated and is permanent; leaf: its split was reverted
    # and is not tried again
    frozen: Tensor
    cached: Tensor  # (entries, d) the updates that decided splits
    cached_at: Tensor  # (entries,) the child that the client of the update went to
    # (trained clients, d) the latest update of each client that made one; rows for all clients
    # would be copied every round
    latest: Tensor
    latest_row: Tensor  # (clients,) its row there, or -1
    latest_at: Tensor  # (clients,) the node that it was made in, or -1

    @classmethod
    def initial(cls, models: dict[str, Tensor], clients: int, size: int) -> Self:
        """A root with this model and all clients in it; updates are projected to `size` numbers."""
        zero, nowhere = torch.zeros(1, dtype=torch.int64), torch.full((clients,), UNASSIGNED)
        none = torch.zeros(0, size)
        return cls(
            models,
            nowhere + 1,
            zero - 1,
            zero,
            zero.double(),
            zero.bool(),
            none,
            zero[:0],
            none,
            nowhere,
            nowhere,
        )

    def is_leaf(self) -> Tensor:
        """(nodes,) which nodes have no children."""
        return ~torch.isin(torch.arange(len(self.parent)), self.parent)

    def children(self, node: int) -> list[int]:
        """The two nodes that `node` was split into, or none."""
        return [child for child, parent in enumerate(self.parent.tolist()) if parent == node]

    def members(self, node: int) -> Tensor:
        """Ids of the clients at this node or below it."""
        inside = torch.arange(len(self.parent)) == node
        for child in range(node + 1, len(self.parent)):
            inside[child] = inside[self.parent[child]]
        return torch.nonzero((self.cluster_ids >= 0) & inside[self.cluster_ids]).flatten()

    def latest_updates(self) -> tuple[Tensor, Tensor]:
        """(clients, d) the latest update of each, projected; and which clients have made one."""
        # Clients without an update have row -1, the row of zeros.
        rows = torch.cat([self.latest, self.latest.new_zeros(1, self.latest.shape[1])])
        return rows[self.latest_row], self.latest_row >= 0

    def with_num_clients(self, clients: int) -> Self:
        """Add clients that have joined since, not assigned to a node yet."""
        if clients <= len(self.cluster_ids):
            return self
        nowhere = torch.full((clients - len(self.cluster_ids),), UNASSIGNED)
        return replace(
            self,
            cluster_ids=torch.cat([self.cluster_ids, nowhere]),
            latest_row=torch.cat([self.latest_row, nowhere]),
            latest_at=torch.cat([self.latest_at, nowhere]),
        )

    def trained(self, ids: Tensor, lengths: Tensor, projected: Tensor) -> Self:
        """After a round in which these clients made updates of these lengths in their nodes.

        For the children of a split of this round, the updates that decided it are the first.
        """
        at = self.cluster_ids[ids]
        age = self.age + torch.isin(torch.arange(len(self.age)), at)
        longest = self.scale.scatter_reduce(0, at, lengths, "amax")
        row = self.latest_row[ids]
        new = row == UNASSIGNED
        row = torch.where(new, len(self.latest) + new.cumsum(0) - 1, row)
        return replace(
            self,
            age=age,
            scale=longest,
            latest=torch.cat([self.latest, projected[new]]).index_copy_(0, row, projected),
            latest_row=self.latest_row.index_copy(0, ids, row),
            latest_at=self.latest_at.index_copy(0, ids, at),
        )

    def split(self, node: int, ids: Tensor, side: Tensor, projected: Tensor) -> Self:
        """Split a leaf into two children, both with its model. The clients `ids`, whose updates
        decided the split, go to their side.

        The node's other clients follow the update that is most similar to their own latest one;
        clients that made none in this node become unassigned.
        """
        child = len(self.parent) + side.long()
        known = torch.nonzero((self.cluster_ids == node) & (self.latest_at == node)).flatten()
        nearest = most_similar(
            self.latest[self.latest_row[known]],
            torch.zeros_like(known),
            projected,
            torch.zeros_like(ids),
        )
        cluster = torch.where(self.cluster_ids == node, UNASSIGNED, self.cluster_ids).index_copy(
            0, known, child[nearest]
        )

        def two_more(values: Tensor, new: int) -> Tensor:
            return torch.cat([values, values.new_full((2,), new)])

        return replace(
            self,
            models={
                name: torch.cat([value, value[[node, node]]]) for name, value in self.models.items()
            },
            cluster_ids=cluster.index_copy(0, ids, child),
            parent=two_more(self.parent, node),
            age=two_more(self.age, 0),
            scale=two_more(self.scale, 0),
            frozen=two_more(self.frozen, 0),
            cached=torch.cat([self.cached, projected]),
            cached_at=torch.cat([self.cached_at, child]),
        )

    def revert(self, nodes: Tensor) -> Self:
        """Remove the children of these nodes, all leaves; their clients return to the node and its
        model.
        """
        left = ~torch.isin(self.parent, nodes)
        number = left.cumsum(0) - 1
        now = number[torch.where(left, torch.arange(len(left)), self.parent)]
        entry = left[self.cached_at]

        def renumbered(label: Tensor) -> Tensor:
            return torch.where(label < 0, label, now[label])

        return replace(
            self,
            models={name: value[left] for name, value in self.models.items()},
            cluster_ids=renumbered(self.cluster_ids),
            parent=renumbered(self.parent[left]),
            age=self.age[left],
            scale=self.scale[left],
            frozen=self.frozen[left],
            cached=self.cached[entry],
            cached_at=renumbered(self.cached_at[entry]),
            latest_at=renumbered(self.latest_at),
        )

    def unfrozen(self, age: int) -> Tensor:
        """(nodes,) whose split has not been validated, although both children are leaves of at
        least this age.
        """
        old = self.is_leaf() & (self.age >= age) & (self.parent >= 0)
        return (torch.bincount(self.parent[old], minlength=len(old)) == 2) & ~self.frozen

    def next_node(self, at: Tensor, projected: Tensor) -> Tensor:
        """The child of the inner node `at` (M,) that an update made from that node's model (M, d)
        belongs to: Algorithm 4.
        """
        return self.cached_at[most_similar(projected, at, self.cached, self.parent[self.cached_at])]


def project(updates: Tensor, bits: Tensor, size: int) -> Tensor:
    """Random projection (M, P) -> (M, size): each of the `size` numbers is the sum of P / size
    coordinates of its own, with random signs.

    The random integers `bits` (P,) determine the position and the sign of each coordinate. Inner
    products, and so lengths and cosines, are kept up to about 1 / sqrt(size) of the lengths. If
    P <= size, the updates are returned unchanged.
    """
    count = updates.shape[1]
    if count <= size:
        return updates
    order = bits.argsort(stable=True)
    sign = (2 * (bits[order] & 1) - 1).to(updates)
    order, rounds = order.to(updates.device), -(-count // size)

    def folded(rows: Tensor) -> Tensor:
        return (
            F.pad(rows[:, order] * sign, (0, rounds * size - count))
            .view(len(rows), rounds, size)
            .sum(1)
        )

    return torch.cat([folded(rows) for rows in torch.split(updates, BLOCK)])


def most_similar(updates: Tensor, at: Tensor, cached: Tensor, cached_at: Tensor) -> Tensor:
    """For each of the updates (M, d), the index of the cached update (N, d) with the largest cosine
    among those with cached_at == at.

    There must be at least one for each; if several are equally similar, it is the first.
    """
    direction = F.normalize(cached.double(), dim=1)
    nearest = [torch.zeros(0, dtype=torch.int64)]
    for rows, nodes in zip(torch.split(updates, BLOCK), torch.split(at, BLOCK), strict=True):
        similarity = F.normalize(rows.double(), dim=1) @ direction.T
        nearest.append(similarity.masked_fill(nodes[:, None] != cached_at, -math.inf).argmax(1))
    return torch.cat(nearest)
