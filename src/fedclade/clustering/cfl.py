"""CFL: the optimal bipartition of a cluster, the test that decides on a split, and the tree of
splits.

Symbols of the CFL paper: α_ij = cos(Δθ_i, Δθ_j) is the similarity of two updates. The bipartition
c₁ ∪ c₂ = c minimizes α_cross^max, the maximum of α_ij over i ∈ c₁, j ∈ c₂.
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
from fedclade.core.method_state import State
from fedclade.errors import require

UNASSIGNED = -1
WARM_UP = 3  # rounds before the scale of a node is meaningful
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
    """Split a cluster in two if the updates of its clients require it.

    A split needs three conditions. The cluster is stationary: ‖Δθ_c‖ < eps1, where Δθ_c is the
    weighted mean of the updates. Its clients are not: max_i ‖Δθ_i‖ > eps2. And the optimal
    bipartition exceeds the noise: gamma_max < sqrt((1 - α_cross^max) / 2).

    The third condition keeps clients of one distribution on the same side. Two updates of one
    direction with noise gamma_max are at most 2 arcsin(gamma_max) apart, so their similarity is at
    least 1 - 2 gamma_max². All pairs across the sides are less similar than that.

    Args:
        updates: (M, P) the updates Δθ_i.
        weight: (M,) the weights of the clients, such as their numbers of examples.
        eps1: ε₁, the norm below which the mean update is stationary.
        eps2: ε₂, the norm that the longest update must exceed.
        gamma_max: γ_max, the largest noise of an update relative to its length; "auto" estimates
            it (`noise_level`).
        linkage: see `bipartition`.

    Returns:
        (M,) the side of each client, or None if the cluster is not split.
    """
    mean = (weight / weight.sum()).to(updates) @ updates
    if not (float(update_norms(mean[None])) < eps1 and float(update_norms(updates).max()) > eps2):
        return None
    similarity = cosine(updates).cpu().numpy()
    side, cross = bipartition(similarity, linkage)
    noise = noise_level(similarity, side) if gamma_max == "auto" else gamma_max
    return torch.from_numpy(side) if noise < math.sqrt((1 - cross) / 2) else None


def bipartition(
    similarity: NDArray[np.floating[Any]], linkage: Literal["single", "complete"] = "single"
) -> tuple[NDArray[np.bool_], float]:
    """CFL's split of a cluster in two.

    Args:
        similarity: (M, M) the similarities α_ij.
        linkage: "single" is the paper's Algorithm 1. It merges the most similar pairs until two
            clusters are left, in O(M²), and gives the bipartition with the least α_cross^max. If
            several are optimal, the choice is deterministic. "complete" (the authors' code) cuts
            the complete-linkage tree in two; it prefers sides of equal size and is not optimal.

    Returns:
        (M,) the side of each client, False for the side of the first client; and α_cross^max.
    """
    require(
        linkage in ("single", "complete"), "linkage", linkage, "must be one of single, complete"
    )
    check_symmetric(similarity, "similarity")
    require(
        len(similarity) >= 2,
        "similarity.shape",
        similarity.shape,
        "must be (M, M) with M ≥ 2: one client cannot be split",
    )
    # Both linkages depend only on the order of the distances, and negation reverses the order of
    # the similarities exactly.
    side = np.asarray(cut_number(linkage_matrix(-similarity, linkage), 2) == 1)
    return side, float(similarity[np.ix_(side, ~side)].max())


def separation_gap(
    similarity: NDArray[np.floating[Any]], groups: NDArray[np.integer[Any]]
) -> float:
    """CFL's separation gap g(α) = α_intra^min − α_cross^max (Definition 2).

    α_intra^min is the least similarity of two clients of one group, 1 if no group has two clients.
    α_cross^max is that of the optimal bipartition of all clients (Eq. 17), which knows no groups.
    If the gap is above 0, the bipartition divides no group. The clients of a single group never
    have a gap above 0: there is nothing left to split.

    Args:
        similarity: (M, M) the similarities α_ij, M ≥ 2.
        groups: (M,) the group I(i) of each client.
    """
    _, cross = bipartition(similarity)
    groups = np.asarray(groups)
    require(
        groups.shape == (len(similarity),),
        "groups.shape",
        groups.shape,
        f"must be ({len(similarity)},), a group for each client",
    )
    inside = (groups[:, None] == groups) & ~np.eye(len(groups), dtype=bool)
    return float(np.min(similarity, where=inside, initial=1.0)) - cross


def noise_level(similarity: NDArray[np.floating[Any]], side: NDArray[np.bool_]) -> float:
    """An estimate of γ_max: the noise of the updates, with a margin, under the assumption that the
    updates of one side differ only by noise.

    ᾱ is the mean similarity of a client to the most similar other client on its side. The bound
    α_ij ≥ 1 - 2 γ_max² gives γ_max = MARGIN sqrt((1 - ᾱ) / 2). If each side has one client, the
    noise cannot be estimated. The result is then 0, so that eps1 and eps2 alone decide.

    Args:
        similarity: (M, M) the similarities α_ij.
        side: (M,) the side of each client.
    """
    same_side = (side[:, None] == side) & ~np.eye(len(side), dtype=bool)
    closest = np.where(same_side, similarity, -np.inf).max(1)[same_side.any(1)]
    return MARGIN * math.sqrt((1 - closest.mean()) / 2) if len(closest) else 0.0


def update_norms(updates: Tensor) -> Tensor:
    """(M,) the norm ‖Δθ_i‖ of each update (M, P)."""
    norms: Tensor = torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64)
    return norms.cpu()


@dataclass(frozen=True)
class ParameterTree(State):
    """A tree of models that grows by splitting leaves in two, and the clients in its leaves.

    Node 0 is the root. Children have higher numbers than their parent. The models of leaves are
    trained. An inner node keeps its model from the time of the split.

    Args:
        models: (nodes, …) the model of each node.
        cluster_ids: (clients,) the leaf of each client, or -1.
        parent: (nodes,) the parent of each node, -1 for the root.
        age: (nodes,) the number of rounds in which the node was trained.
        scale: (nodes,) the norm of the longest update of these rounds.
        frozen: (nodes,) for an inner node, whether its split was validated and is permanent; for a
            leaf, whether its split was reverted and must not be tried again.
        cached: (entries, d) the projected updates that decided splits; the clients made them from
            the model of the inner node.
        cached_at: (entries,) the child to which the client of each cached update went.
        latest: (trained clients, d) the latest projected update of each client that made one; rows
            for all clients would be copied in every round.
        latest_row: (clients,) the row of each client in `latest`, or -1.
        latest_at: (clients,) the node in which the client made its latest update, or -1.
    """

    parent: Tensor
    age: Tensor
    scale: Tensor
    frozen: Tensor
    cached: Tensor
    cached_at: Tensor
    latest: Tensor
    latest_row: Tensor
    latest_at: Tensor

    @classmethod
    def initial(cls, models: dict[str, Tensor], clients: int, size: int) -> Self:
        """A root with all clients in it.

        Args:
            models: (1, …) the model of the root.
            clients: the number of clients.
            size: d, the numbers to which updates are projected.
        """
        zero, unassigned = torch.zeros(1, dtype=torch.int64), torch.full((clients,), UNASSIGNED)
        no_updates = torch.zeros(0, size)
        return cls(
            models,
            unassigned + 1,
            zero - 1,
            zero,
            zero.double(),
            zero.bool(),
            no_updates,
            zero[:0],
            no_updates,
            unassigned,
            unassigned,
        )

    def is_leaf(self) -> Tensor:
        """(nodes,) which nodes have no children."""
        return ~torch.isin(torch.arange(len(self.parent)), self.parent)

    def children(self, node: int) -> list[int]:
        """The two nodes that `node` was split into, or none."""
        return [child for child, parent in enumerate(self.parent.tolist()) if parent == node]

    def members(self, node: int) -> Tensor:
        """The ids of the clients at this node or below it."""
        inside = torch.arange(len(self.parent)) == node
        for child in range(node + 1, len(self.parent)):
            inside[child] = inside[self.parent[child]]
        return torch.nonzero((self.cluster_ids >= 0) & inside[self.cluster_ids]).flatten()

    def latest_updates(self) -> tuple[Tensor, Tensor]:
        """(clients, d) the latest projected update of each client, and (clients,) whether it has
        made one.
        """
        # Clients without an update have row -1, which is the row of zeros.
        rows = torch.cat([self.latest, self.latest.new_zeros(1, self.latest.shape[1])])
        return rows[self.latest_row], self.latest_row >= 0

    def with_num_clients(self, clients: int) -> Self:
        """Add clients until there are `clients`. The new ones are not assigned to a node yet."""
        if clients <= len(self.cluster_ids):
            return self
        unassigned = torch.full((clients - len(self.cluster_ids),), UNASSIGNED)
        return replace(
            self,
            cluster_ids=torch.cat([self.cluster_ids, unassigned]),
            latest_row=torch.cat([self.latest_row, unassigned]),
            latest_at=torch.cat([self.latest_at, unassigned]),
        )

    def trained(self, ids: Tensor, lengths: Tensor, projected: Tensor) -> Self:
        """The tree after a round of training.

        After a split in this round, the updates that decided it count as the first updates in the
        children.

        Args:
            ids: (K,) the clients that made an update in their node.
            lengths: (K,) the norms of their updates.
            projected: (K, d) their projected updates.
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
        """Split a leaf into two children, both with its model.

        Another client of the leaf follows the update that is most similar to the client's latest
        one. It becomes unassigned if it made no update in this leaf.

        Args:
            node: the leaf.
            ids: (K,) the clients whose updates decided the split.
            side: (K,) the side of each of them.
            projected: (K, d) their projected updates.
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

        rows = torch.cat([torch.arange(len(self)), torch.tensor([node, node])])
        return replace(
            self.at_rows(rows),
            cluster_ids=cluster.index_copy(0, ids, child),
            parent=two_more(self.parent, node),
            age=two_more(self.age, 0),
            scale=two_more(self.scale, 0),
            frozen=two_more(self.frozen, 0),
            cached=torch.cat([self.cached, projected]),
            cached_at=torch.cat([self.cached_at, child]),
        )

    def revert(self, nodes: Tensor) -> Self:
        """Remove the children of these nodes. The children must be leaves; their clients return to
        the node and its model.
        """
        remaining = ~torch.isin(self.parent, nodes)
        number = remaining.cumsum(0) - 1
        new_number = number[torch.where(remaining, torch.arange(len(remaining)), self.parent)]
        entry = remaining[self.cached_at]

        def renumbered(label: Tensor) -> Tensor:
            return torch.where(label < 0, label, new_number[label])

        return replace(
            self.at_rows(torch.nonzero(remaining).flatten()),
            cluster_ids=renumbered(self.cluster_ids),
            parent=renumbered(self.parent[remaining]),
            age=self.age[remaining],
            scale=self.scale[remaining],
            frozen=self.frozen[remaining],
            cached=self.cached[entry],
            cached_at=renumbered(self.cached_at[entry]),
            latest_at=renumbered(self.latest_at),
        )

    def unfrozen(self, age: int) -> Tensor:
        """(nodes,) whether both children of the node are leaves of at least this age, and its split
        is not validated yet.
        """
        old = self.is_leaf() & (self.age >= age) & (self.parent >= 0)
        return (torch.bincount(self.parent[old], minlength=len(old)) == 2) & ~self.frozen

    def next_node(self, at: Tensor, projected: Tensor) -> Tensor:
        """The child to which each update belongs: Algorithm 4.

        Args:
            at: (M,) the inner node from whose model each update was made.
            projected: (M, d) the projected updates.
        """
        return self.cached_at[most_similar(projected, at, self.cached, self.parent[self.cached_at])]


def project(updates: Tensor, bits: Tensor, size: int) -> Tensor:
    """Random projection (M, P) -> (M, size): each of the `size` numbers is the sum of P / size
    different coordinates with random signs.

    Inner products, and so lengths and cosines, are preserved up to about 1 / sqrt(size) of the
    lengths. If P <= size, the updates are returned unchanged.

    Args:
        updates: (M, P) the updates.
        bits: (P,) random integers, which determine the position and the sign of each coordinate.
        size: the numbers of a projected update.
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
    """For each update, the index of the cached update of the same node with the largest cosine. If
    several are equally similar, it is the first.

    Args:
        updates: (M, d) the updates.
        at: (M,) their nodes. Each must have at least one cached update.
        cached: (N, d) the cached updates.
        cached_at: (N,) their nodes.
    """
    direction = F.normalize(cached.double(), dim=1)
    nearest = [torch.zeros(0, dtype=torch.int64)]
    for rows, nodes in zip(torch.split(updates, BLOCK), torch.split(at, BLOCK), strict=True):
        similarity = F.normalize(rows.double(), dim=1) @ direction.T
        nearest.append(similarity.masked_fill(nodes[:, None] != cached_at, -math.inf).argmax(1))
    return torch.cat(nearest)
