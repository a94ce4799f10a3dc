"""Partitions with true groups: the clients of a group share their classes, their labeling or the
rotation of their images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedclade.core.inputs import one_tensor
from fedclade.data.array_checks import type_name
from fedclade.data.datasets import Dataset
from fedclade.data.partitioning.base import (
    Index,
    Split,
    Transform,
    assign_classes,
    assign_randomly,
    blocks,
    by_class,
    cut,
    labels_of,
    shares,
)
from fedclade.data.partitioning.transforms import (
    distinct_permutations,
    distinct_swaps,
    relabel,
    rotate,
)
from fedclade.errors import InvalidInputError, require, require_int


@dataclass(frozen=True)
class LabelClusters:
    """The clients of a cluster share a few classes.

    FLT: Scenario 1 (`overlap=0`: random disjoint classes) and Scenario 2 (`classes=3, overlap=1`).

    With an overlap, the clusters form a ring over the order of the classes. Clusters that
    share a class divide its samples, so a client has fewer of a shared class (2:1:1 in Scenario 2),
    unless `samples` is set. A client's test part has all test samples of the cluster's classes.

    Args:
        clusters: The number of clusters.
        classes: The number of classes of a cluster.
        overlap: The number of classes that two neighboring clusters share.
        samples: The number of training samples of a client, the same of each class; None to assign
            all samples.
        key: A key of the data set, such as "topic", whose ids are used as classes; None for the
            labels.
        shuffle: Whether each cluster has random classes; if not, it has consecutive ones, such as
            the digits 0 to 4 and 5 to 9.
        reuse: Whether clusters that share a class have the same samples of it, as in the
            experiments of FLT's authors, instead of a part each.
    """

    name: ClassVar[str] = "label_clusters"
    clusters: int = 5
    classes: int = 2
    overlap: int = 0
    samples: int | None = None
    key: str | None = None
    shuffle: bool = True
    reuse: bool = False

    def __post_init__(self) -> None:
        require_int("partition.clusters", self.clusters, 1)
        require_int("partition.classes", self.classes, 1)
        require_int("partition.overlap", self.overlap, 0)
        require(
            2 * self.overlap <= self.classes,
            "partition.overlap",
            self.overlap,
            f"must be at most half of classes = {self.classes}",
        )
        require(
            self.overlap == 0 or self.clusters >= 3,
            "partition.clusters",
            self.clusters,
            "must be at least 3 with an overlap",
        )
        if self.samples is not None:
            require_int("partition.samples", self.samples, 1)

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, test_labels = self._labels(data)
        pools = by_class(labels, rng)
        cluster_classes = self._classes_of_clusters(np.array(list(pools)), rng)
        groups = blocks(clients, self.clusters)
        members = np.bincount(groups)
        pieces: dict[tuple[int, int], Index] = {}  # the rows of each (cluster, class)
        for label in np.unique(cluster_classes):
            sharing = np.flatnonzero((cluster_classes == label).any(1))
            pool = pools[label]
            by_cluster = (
                [pool] * len(sharing)
                if self.reuse
                else cut(pool, shares(len(pool), members[sharing]))
            )
            pieces |= {
                (int(cluster), int(label)): piece
                for cluster, piece in zip(sharing, by_cluster, strict=True)
            }
        cluster_rows = [
            {label: pieces[cluster, label] for label in labels}
            for cluster, labels in enumerate(cluster_classes.tolist())
        ]
        at_least = [
            sum(
                len(pools[label]) // (1 if self.reuse else int((cluster_classes == label).sum()))
                for label in labels
            )
            for labels in cluster_classes.tolist()
        ]
        _check_members(
            [sum(map(len, rows.values())) for rows in cluster_rows],
            members,
            self.clusters * min(at_least),
            clients,
        )
        most = self.classes * min(
            len(piece) // int(members[cluster]) for (cluster, _), piece in pieces.items()
        )
        train: list[Index] = []
        for cluster, rows in enumerate(cluster_rows):
            train += self._assign(cluster, rows, int(members[cluster]), most)
        test = _test_rows(test_labels, cluster_classes)
        return Split(train, test=test, test_part_id=groups, groups=groups)

    def _labels(self, data: Dataset) -> tuple[Index, Index]:
        """The classes of the training and of the test samples: labels, or the ids of a key."""
        if self.key is None:
            return labels_of(data, self.name)[0], data.y_test.numpy()
        allowed = f"the data set {data.name!r} has {', '.join(data.keys) or 'no keys'}"
        require(self.key in data.keys, "partition.key", self.key, allowed)
        train, test = data.keys[self.key]
        return train.numpy(), np.empty(0, np.int64) if test is None else test.numpy()

    def _classes_of_clusters(self, known: Index, rng: np.random.Generator) -> Index:
        step = self.classes - self.overlap
        most = len(known) // step
        fewer = (
            f"at most {most} clusters or fewer classes"
            if most >= (3 if self.overlap else 1)
            else "fewer classes"
        )
        require(
            self.clusters * step <= len(known),
            "partition.clusters",
            self.clusters,
            f"{self.clusters} clusters of {self.classes} classes with an overlap of {self.overlap}"
            f" need {self.clusters * step} classes, but there are {len(known)}; ask for {fewer}",
        )
        order = (rng.permutation(known) if self.shuffle else known)[: self.clusters * step]
        ring: Index = order[
            (step * np.arange(self.clusters)[:, None] + np.arange(self.classes)) % len(order)
        ]
        return ring

    def _assign(
        self, cluster: int, rows: Mapping[int, Index], members: int, most: int
    ) -> list[Index]:
        """Assign the rows of a cluster, by class, to its `members` clients. `most` is the number of
        samples for which the rows of all clusters suffice.
        """
        if self.samples is None:
            return assign_classes(rows, {label: np.arange(members) for label in rows}, members)
        quotient, remainder = divmod(self.samples, self.classes)
        quota = np.full((members, self.classes), quotient)
        # The remaining samples come from the classes in turn, so that all classes give equally
        # many.
        extra_client = np.arange(members).repeat(remainder)
        quota[extra_client, np.arange(members * remainder) % self.classes] += 1
        for label, needed in zip(rows, quota.sum(0).tolist(), strict=True):
            fewer = f"at most {most} samples or fewer clients" if most else "fewer clients"
            require(
                needed <= len(rows[label]),
                "partition.samples",
                self.samples,
                f"cluster {cluster} needs {needed} training samples of class {label} for its"
                f" {members} clients, but has {len(rows[label])}; ask for {fewer}",
            )
        pieces = [cut(part, quota[:, column]) for column, part in enumerate(rows.values())]
        return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]


@dataclass(frozen=True)
class PowerLawClusters:
    """Clusters of consecutive classes, in which the clients' sizes follow a power law.

    FLT: Scenario 4, Algorithm 4. In a cluster with N samples and M clients, client m = 1 … M gets
    floor(a + exp(b m²)) samples with a = floor(N / 2M) and b such that the sum is N. The first
    client gets the samples that rounding leaves. A client's test part has all test samples of the
    cluster's classes.

    Args:
        clusters: The number of clusters.
        classes: The number of classes of a cluster; the last cluster has the remaining classes.
    """

    name: ClassVar[str] = "power_law_clusters"
    clusters: int = 10
    classes: int = 5

    def __post_init__(self) -> None:
        require_int("partition.clusters", self.clusters, 1)
        require_int("partition.classes", self.classes, 1)

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, _ = labels_of(data, self.name)
        known, groups = np.unique(labels), blocks(clients, self.clusters)
        most = (len(known) - 1) // self.classes + 1
        require(
            self.clusters <= most,
            "partition.clusters",
            self.clusters,
            f"{len(known)} classes are too few for these clusters of {self.classes}; ask for at"
            f" most {most} clusters or fewer classes",
        )
        cluster_classes = np.split(known, self.classes * np.arange(1, self.clusters))
        cluster_rows = [
            rng.permutation(np.flatnonzero(np.isin(labels, classes))) for classes in cluster_classes
        ]
        available, members = [len(rows) for rows in cluster_rows], np.bincount(groups)
        _check_members(available, members, self.clusters * min(available), clients)
        train: list[Index] = []
        for rows, num_members in zip(cluster_rows, members.tolist(), strict=True):
            train += cut(rows, power_law(len(rows), num_members))
        test = _test_rows(data.y_test.numpy(), cluster_classes)
        return Split(train, test=test, test_part_id=groups, groups=groups)


def power_law(samples: int, clients: int) -> Index:
    """The sizes of one cluster's clients in `PowerLawClusters`."""
    from scipy.optimize import brentq

    base, square = samples // (2 * clients), np.arange(1, clients + 1) ** 2
    # At the upper end of the interval the last client has all samples. At 0 each client has
    # base + 1, which is never too many.
    slope = brentq(
        lambda b: clients * base + np.exp(b * square).sum() - samples,
        0,
        math.log(samples) / clients**2,
    )
    sizes: Index = np.floor(base + np.exp(slope * square)).astype(np.int64)
    sizes[0] += samples - sizes.sum()
    return sizes


@dataclass(frozen=True)
class LabelSwap:
    """The same images with different labels: each group exchanges other pairs of labels.

    It changes fewer labels than `LabelPermutation`. The pairs of all groups are disjoint if there
    are enough classes. A client's test part is the whole test set with exchanged labels.

    Args:
        clusters: The number of groups.
        swaps: The number of pairs of labels that a group exchanges.
        samples: The number of training samples of a client; None to assign all samples.
    """

    name: ClassVar[str] = "label_swap"
    clusters: int = 4
    swaps: int = 1
    samples: int | None = None

    def __post_init__(self) -> None:
        require_int("partition.clusters", self.clusters, 1)
        require_int("partition.swaps", self.swaps, 1)
        if self.samples is not None:
            require_int("partition.samples", self.samples, 1)

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, classes = labels_of(data, self.name)
        known = np.unique(labels)
        most = len(known) // 2
        require(
            self.swaps <= most,
            "partition.swaps",
            self.swaps,
            f"there are {len(known)} classes; ask for at most {most}",
        )
        ways = math.comb(len(known), 2 * self.swaps) * math.prod(range(1, 2 * self.swaps, 2))
        _check_ways(self.clusters, ways, len(known))
        tables = distinct_swaps(known, self.clusters, self.swaps, classes, rng.spawn(1)[0])
        return planted(data, clients, self.clusters, self.samples, relabel(tables), rng)


@dataclass(frozen=True)
class LabelPermutation:
    """The same images with different labels: each group permutes all labels in another way.

    The permutations are random, as in CFL's experiments. A client's test part is the whole test set
    with permuted labels.

    Args:
        clusters: The number of groups.
        samples: The number of training samples of a client; None to assign all samples.
    """

    name: ClassVar[str] = "label_permutation"
    clusters: int = 4
    samples: int | None = None

    def __post_init__(self) -> None:
        require_int("partition.clusters", self.clusters, 1)
        if self.samples is not None:
            require_int("partition.samples", self.samples, 1)

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, classes = labels_of(data, self.name)
        known = np.unique(labels)
        _check_ways(self.clusters, math.factorial(min(len(known), 20)), len(known))
        tables = distinct_permutations(known, self.clusters, classes, rng.spawn(1)[0])
        return planted(data, clients, self.clusters, self.samples, relabel(tables), rng)


@dataclass(frozen=True)
class Rotation:
    """The same labels with rotated images: each group has another angle.

    The square images of group g are rotated by g * 360 / clusters degrees. IFCA: rotated MNIST.
    Rotations by multiples of 90 degrees are exact, others interpolate. A client's test part is the
    whole rotated test set.

    Args:
        clusters: The number of groups (k in IFCA).
        samples: The number of training samples of a client (n in IFCA); None to assign all samples.
    """

    name: ClassVar[str] = "rotation"
    clusters: int = 4
    samples: int | None = None

    def __post_init__(self) -> None:
        require_int("partition.clusters", self.clusters, 1)
        if self.samples is not None:
            require_int("partition.samples", self.samples, 1)

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        require_square_images(data, self.name)
        return planted(data, clients, self.clusters, self.samples, rotate(self.clusters), rng)


def require_square_images(data: Dataset, scheme: str) -> None:
    """Raise `InvalidInputError` unless inputs are square images."""
    # Of the same kind as x_train, which would be copied.
    x = one_tensor(data.x_test, f"the partition {scheme}", "partition.name")
    if (
        x.ndim not in (3, 4)
        or x.shape[-1] != x.shape[-2]
        or x.dtype not in (torch.uint8, torch.float32)
    ):
        raise InvalidInputError(
            f"partition.name = {scheme!r}: it rotates square images, but the inputs of"
            f" {data.name!r} have shape {tuple(x.shape[1:])} and type {type_name(x)}. Give"
            " uint8 or float images of shape (channels, height, width), or use label_swap.",
            "partition.name",
        )


def planted(
    data: Dataset,
    clients: int,
    clusters: int,
    samples: int | None,
    transform: Transform,
    rng: np.random.Generator,
) -> Split:
    """Samples assigned at random, and the whole test set for all, transformed for each group."""
    groups = blocks(clients, clusters)
    train = assign_randomly(len(data.y_train), clients, samples, rng)
    return Split(
        train,
        test=[np.arange(len(data.y_test))],
        test_part_id=np.zeros(clients, np.int64),
        groups=groups,
        transform=transform,
    )


def _check_ways(clusters: int, ways: int, classes: int) -> None:
    """Check that there are enough different relabelings for the clusters."""
    allowed = f"{classes} classes have only {ways} different relabelings; ask for at most {ways}"
    require(clusters <= ways, "partition.clusters", clusters, allowed)


def _check_members(available: Sequence[int], members: Index, most: int, clients: int) -> None:
    """Check that each cluster has a sample for each of its clients; `most` is the largest number of
    clients for which that holds.
    """
    for cluster, (samples, num_members) in enumerate(zip(available, members, strict=True)):
        require(
            samples >= num_members,
            "partition.clients",
            clients,
            f"cluster {cluster} has {num_members} clients and {samples} training samples without"
            f" the probe; ask for at most {most} clients",
        )


def _test_rows(labels: Index, cluster_classes: Sequence[Index] | Index) -> list[Index]:
    return [np.flatnonzero(np.isin(labels, classes)) for classes in cluster_classes]
