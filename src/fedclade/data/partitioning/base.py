"""The interface of partition schemes, and how they assign samples. Pure numpy; all random numbers
come from `rng`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core.inputs import Inputs
from fedclade.data.datasets import Dataset
from fedclade.errors import InvalidInputError, require

Index = NDArray[np.int64]
Transform = Callable[[Inputs, Tensor, int], tuple[Inputs, Tensor]]


@dataclass(frozen=True, eq=False)
class Split:
    """The assignment of the rows of `data.x_train` and `data.x_test` to clients.

    Args:
        train: rows of x_train, one array per client, none of them empty.
        test: rows of x_test, one array per test part; None to draw a test part for each client that
            follows its labels.
        test_part_id: the entry of `test` of each client; None: client i has entry i.
        held_out: rows of x_train that also belong to the test parts, one array per test part; they
            are in no client's `train`.
        groups: the true group of each client; None if it is not known.
        transform: (x, y, group) -> (x, y) changes the training and test samples of a group's
            clients.
        names: the name of each client; None: clients have numbers only.
        changes_at: the first round in which each client has other data, 0 for never; None: the data
            of no client change.
        later_groups: the group of each client from that round on. `transform` changes the client's
            original samples as those of this group.
    """

    train: Sequence[Index]
    test: Sequence[Index] | None = None
    test_part_id: Index | None = None
    held_out: Sequence[Index] | None = None
    groups: Index | None = None
    transform: Transform | None = None
    names: Sequence[str] | None = None
    changes_at: Index | None = None
    later_groups: Index | None = None


class Scheme(Protocol):
    """How to divide a data set among clients. To add a scheme, write a class with a name and this
    method, and pass an instance to `partition`.

        class ByBrightness:
            name = "by_brightness"

            def split(self, data, clients, rng):
                order = data.x_train.float().flatten(1).mean(1).argsort().numpy()
                return Split(train=np.array_split(order, clients))

    `name` is the scheme's name in experiment files and results.
    """

    name: ClassVar[str]

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        """Assign the samples to clients.

        Args:
            data: The data set without the probe samples.
            clients: The number of clients.
            rng: The source of all random numbers, so that the same seed gives the same bytes.
        """
        ...


def check_positive(field: str, value: object) -> None:
    """Raise `InvalidInputError` unless `value` is a finite number above 0."""
    # The upper end keeps sums over all clients finite.
    positive = isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) < 1e100
    require(positive, f"partition.{field}", value, "must be a number above 0 (and finite)")


def labels_of(data: Dataset, scheme: str) -> tuple[Index, int]:
    """The training labels and the number of classes, for schemes that need class labels."""
    classes = data.classes
    if classes is None:
        raise InvalidInputError(
            f"partition.name = {scheme!r}: needs class labels, but the targets of {data.name!r} are"
            " floats. Store labels as integers, or use iid, quantity_skew, natural_id or rotation.",
            "partition.name",
        )
    if data.y_train.ndim > 1:
        raise InvalidInputError(
            f"partition.name = {scheme!r}: needs one class label per sample, but the targets of"
            f" {data.name!r} are sequences. Use iid, quantity_skew, natural_id, or label_clusters"
            " with a key.",
            "partition.name",
        )
    return data.y_train.numpy(), classes


def by_class(labels: Index, rng: np.random.Generator) -> dict[int, Index]:
    """The rows of each class that occurs, in random order."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]
    known, starts = np.unique(labels[order], return_index=True)
    return dict(zip(known.tolist(), np.split(order, starts)[1:], strict=True))


def shares(total: int, weights: NDArray[np.float64] | Index) -> Index:
    """Whole numbers with the sum `total` in proportion to `weights`, by largest remainder."""
    exact = total * weights / weights.sum()
    whole: Index = np.floor(exact).astype(np.int64)
    most_missing = np.argsort(whole - exact, kind="stable")
    whole[most_missing[: total - whole.sum()]] += 1
    return whole


def cut(rows: Index, sizes: Index) -> list[Index]:
    """Consecutive pieces of these sizes. The remaining rows are dropped."""
    return np.split(rows, np.cumsum(sizes))[: len(sizes)]


def blocks(clients: int, clusters: int) -> Index:
    """The cluster of each client. The clients of a cluster are consecutive, and the sizes of two
    clusters differ by at most one.
    """
    require(
        clients >= clusters,
        "partition.clusters",
        clusters,
        f"there are {clients} clients; ask for at most {clients} clusters or at least {clusters}"
        " clients",
    )
    return np.sort(np.arange(clients) % clusters)


def assign_randomly(
    rows: int, clients: int, samples: int | None, rng: np.random.Generator
) -> list[Index]:
    """Assign all rows evenly, or `samples` rows to each client."""
    order = rng.permutation(rows)
    if samples is None:
        return np.array_split(order, clients)
    require(
        samples * clients <= rows,
        "partition.samples",
        samples,
        f"{clients} clients need {samples * clients} training samples, but there are {rows} without"
        f" the probe; ask for at most {rows // clients} samples, or at most {rows // samples}"
        " clients",
    )
    return cut(order, np.full(clients, samples))


def assign_classes(
    pools: Mapping[int, Index], owners: Mapping[int, Index], clients: int
) -> list[Index]:
    """Divide each class evenly among its owners. The remainder goes to the owners with the fewest
    samples so far, so that the totals stay even.

    Args:
        pools: the rows of each class.
        owners: the clients that have each class.
        clients: the number of clients.
    """
    pieces: list[list[Index]] = [[np.empty(0, np.int64)] for _ in range(clients)]
    sizes = np.zeros(clients, np.int64)
    for label, class_owners in owners.items():
        quotient, remainder = divmod(len(pools[label]), len(class_owners))
        counts = np.full(len(class_owners), quotient)
        counts[np.argsort(sizes[class_owners], kind="stable")[:remainder]] += 1
        sizes[class_owners] += counts
        for client, piece in zip(class_owners, cut(pools[label], counts), strict=True):
            pieces[client].append(piece)
    return [np.concatenate(piece) for piece in pieces]


def fill_up(parts: Sequence[Index], least: int, rng: np.random.Generator) -> list[Index]:
    """Move random samples from the largest parts until each part has `least`. The total must
    suffice.
    """
    filled = [rng.permutation(part) for part in parts]
    sizes = np.array([len(part) for part in filled])
    for small in np.flatnonzero(sizes < least):
        while sizes[small] < least:
            large = int(sizes.argmax())
            filled[small] = np.append(filled[small], filled[large][-1])
            filled[large] = filled[large][:-1]
            sizes[small], sizes[large] = sizes[small] + 1, sizes[large] - 1
    return filled


def follow_labels(
    train: Sequence[Index], labels: Index, test_labels: Index, rng: np.random.Generator
) -> list[Index]:
    """For each client, draw a test part with the class proportions of its training part. The total
    size is about that of the test set.

    The rows of a class are used in order, so that none is used twice before all are used once, and
    never twice by one client.

    Args:
        train: the training rows of each client.
        labels: the labels of all training samples.
        test_labels: the labels of all test samples.
        rng: the source of all random numbers.
    """
    pools = by_class(test_labels, rng)
    if not pools:
        return [np.empty(0, np.int64) for _ in train]
    classes, available = np.array(list(pools)), np.array([len(pool) for pool in pools.values()])
    sizes = np.array([len(rows) for rows in train])
    client, label = np.arange(len(train)).repeat(sizes), labels[np.concatenate(train)]
    tested = np.isin(label, classes)  # not the classes without test samples
    # From here on an entry is a client and one of its classes, in this order; its label is the
    # position of the class in `classes`.
    entry, counts = np.unique(
        client[tested] * len(classes) + np.searchsorted(classes, label[tested]), return_counts=True
    )
    client, label = np.divmod(entry, len(classes))
    total = np.maximum(1, np.rint(sizes * len(test_labels) / len(labels)).astype(np.int64))
    taken = np.minimum(_shares_each(client, total, counts), available[label])
    by_label, used = np.argsort(label, kind="stable"), np.empty_like(taken)
    # Rows of the class that earlier clients have taken.
    used[by_label] = _before(label[by_label], taken[by_label])

    entry = np.arange(len(taken)).repeat(taken)
    client, label = client[entry], label[entry]
    place = (used[entry] + _before(entry, np.ones_like(entry))) % available[label]
    rows = np.concatenate(list(pools.values()))[(np.cumsum(available) - available)[label] + place]
    return cut(rows, np.bincount(client, minlength=len(train)))


def _shares_each(group: Index, total: Index, weights: Index) -> Index:
    """The `shares` of total[g] for each group g. `group` has the group of each weight and is
    sorted.
    """
    exact = total[group] * weights / np.bincount(group, weights)[group]
    whole: Index = np.floor(exact).astype(np.int64)
    missing = total - np.bincount(group, whole, minlength=len(total)).astype(np.int64)
    most_missing = np.lexsort((whole - exact, group))
    whole[most_missing[_before(group, np.ones_like(group)) < missing[group]]] += 1
    return whole


def _before(group: Index, numbers: Index) -> Index:
    """For each number, the sum of the earlier numbers of its group; `group` is sorted."""
    before = np.cumsum(numbers) - numbers
    _, first, sizes = np.unique(group, return_index=True, return_counts=True)
    return np.asarray(before - before[first].repeat(sizes))
