"""A partition with groups whose clients get another distribution during the run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from torch import Tensor

from fedclade.core.inputs import Inputs
from fedclade.data.datasets import Dataset
from fedclade.data.partitioning.base import Index, Split, Transform, labels_of
from fedclade.data.partitioning.grouped import planted, require_square_images
from fedclade.data.partitioning.transforms import distinct_swaps, relabel, rotate
from fedclade.errors import is_int, is_number, require, require_int

DriftKind: TypeAlias = Literal["swap_labels", "rotate", "move"]


@dataclass(frozen=True)
class Drift:
    """The clients of a group get another distribution from a round on.

    Each group has its own two labels swapped, as with `LabelSwap`; with kind = "rotate" each group
    has its own rotation, as with `Rotation`. From round `at` of its group on, a client has the same
    samples in another version, for training, validation and testing. Methods do not know of it.

    Args:
        kind: "swap_labels": the clients swap other labels, which no group has swapped before;
            "rotate": their images are turned further by half the angle between two groups; "move":
            they have the labels of the next group, so the number of groups stays.
        clusters: The number of groups.
        at: The first round with the new data, for each group, 0 for never; one number for all
            groups.
        share: The share of a group's clients that change.
        samples: The number of training samples of a client; None to assign all samples.
    """

    name: ClassVar[str] = "drift"
    kind: DriftKind = "swap_labels"
    clusters: int = 4
    at: int | tuple[int, ...] = 20
    share: float = 1.0
    samples: int | None = None

    def __post_init__(self) -> None:
        kinds = ("swap_labels", "rotate", "move")
        require(
            self.kind in kinds, "partition.kind", self.kind, f"must be one of {', '.join(kinds)}"
        )
        least = 2 if self.kind == "move" else 1
        require_int("partition.clusters", self.clusters, least)
        rounds = self.rounds
        require(
            len(rounds) == self.clusters
            and all(is_int(each, 0) for each in rounds)
            and any(rounds),
            "partition.at",
            self.at,
            f"must be a round, or a round for each of {self.clusters} groups: 1 or more, 0 for"
            " never, and not 0 for all",
        )
        require(
            is_number(self.share) and 0 < self.share <= 1,
            "partition.share",
            self.share,
            "must be above 0 and at most 1",
        )
        if self.samples is not None:
            require_int("partition.samples", self.samples, 1)

    @property
    def rounds(self) -> tuple[int, ...]:
        """The first round with new data of each group."""
        return tuple(self.at) if isinstance(self.at, tuple | list) else (self.at,) * self.clusters

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        transform, next_group = self._versions(data, rng.spawn(1)[0])
        split = planted(data, clients, self.clusters, self.samples, transform, rng)
        assert split.groups is not None
        changes_at = np.zeros(clients, np.int64)
        for group, first_round in enumerate(self.rounds):
            members = rng.permutation(np.flatnonzero(split.groups == group))
            changes_at[members[: max(1, round(self.share * len(members)))]] = first_round
        return replace(split, changes_at=changes_at, later_groups=next_group[split.groups])

    def _versions(self, data: Dataset, rng: np.random.Generator) -> tuple[Transform, Index]:
        """The transform of all groups, and the group that each group becomes."""
        group = np.arange(self.clusters)
        if self.kind == "rotate":
            require_square_images(data, self.name)
            return _every_second(rotate(2 * self.clusters), self.clusters), group + self.clusters
        labels, classes = labels_of(data, self.name)
        known, moves = np.unique(labels), self.kind == "move"
        versions_each = 1 if moves else 2
        pairs = math.comb(len(known), 2)
        require(
            self.clusters <= pairs // versions_each,
            "partition.clusters",
            self.clusters,
            f"{len(known)} classes have {pairs} pairs of labels to swap; ask for at most"
            f" {pairs // versions_each} groups with kind = '{self.kind}'",
        )
        versions = versions_each * self.clusters
        transform = relabel(distinct_swaps(known, versions, 1, classes, rng))
        return transform, (group + 1) % self.clusters if moves else group + self.clusters


def _every_second(transform: Transform, clusters: int) -> Transform:
    """The even groups of a transform first, then the odd ones."""

    def reordered(x: Inputs, y: Tensor, group: int) -> tuple[Inputs, Tensor]:
        return transform(x, y, 2 * group if group < clusters else 2 * (group - clusters) + 1)

    return reordered
