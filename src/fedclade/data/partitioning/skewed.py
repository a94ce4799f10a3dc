"""Partitions that skew labels or sizes. There is one group, or the groups are not known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedclade.data.datasets import Dataset
from fedclade.data.partitioning.base import (
    Index,
    Split,
    assign_classes,
    assign_randomly,
    by_class,
    check_positive,
    cut,
    fill_up,
    labels_of,
    shares,
)
from fedclade.errors import InvalidInputError, require, require_int

ATTEMPTS = 10  # random draws before the last one is repaired
BALANCED_ATTEMPTS = 200  # NIID-Bench never repairs a draw


@dataclass(frozen=True)
class Iid:
    """All clients have the same distribution and, up to one, the same number of samples.

    Flower: `IidPartitioner`.
    """

    name: ClassVar[str] = "iid"

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        return Split(
            assign_randomly(len(data.y_train), clients, None, rng),
            groups=np.zeros(clients, np.int64),
        )


@dataclass(frozen=True)
class Dirichlet:
    """Each class is divided among the clients in proportions drawn from Dirichlet(α).

    Flower: `DirichletPartitioner`.

    Args:
        alpha: The concentration α: the smaller it is, the fewer classes a client has.
        min_size: The smallest number of samples of a client (Flower: `min_partition_size`). A draw
            that violates it is repeated; after ten draws (200 if balanced), samples move from the
            largest clients to the others.
        balanced: Whether a client that already has N / n of the N samples, for n clients, gets
            nothing of the next classes (Flower: `self_balancing`). NIID-Bench, from which FLIS has
            its partitions, does so.
    """

    name: ClassVar[str] = "dirichlet"
    alpha: float = 0.5
    min_size: int = 1
    balanced: bool = False

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)
        require_int("partition.min_size", self.min_size, 1)
        require(
            isinstance(self.balanced, bool),
            "partition.balanced",
            self.balanced,
            "must be true or false",
        )

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, available = labels_of(data, self.name)[0], len(data.y_train)
        require(
            clients * self.min_size <= available,
            "partition.min_size",
            self.min_size,
            f"there are {available} training samples without the probe for {clients} clients; ask"
            f" for at most {available // clients}",
        )
        for _ in range(BALANCED_ATTEMPTS if self.balanced else ATTEMPTS):
            parts = self._draw(by_class(labels, rng), clients, rng)
            if min(map(len, parts)) >= self.min_size:
                return Split(parts)
        return Split(fill_up(parts, self.min_size, rng))

    def _draw(
        self, pools: Mapping[int, Index], clients: int, rng: np.random.Generator
    ) -> list[Index]:
        pieces: list[list[Index]] = []
        sizes = np.zeros(clients, np.int64)
        full = sum(map(len, pools.values())) / clients if self.balanced else np.inf
        for rows in pools.values():
            proportions = rng.dirichlet(np.full(clients, self.alpha)) * (sizes < full)
            if not proportions.any():  # all that is left of the proportions is rounded to 0
                proportions = (sizes < full).astype(np.float64)
            counts = shares(len(rows), proportions)
            pieces.append(cut(rows, counts))
            sizes += counts
        return [np.concatenate(of_client) for of_client in zip(*pieces, strict=True)]


@dataclass(frozen=True)
class Pathological:
    """Each client has a fixed number of classes.

    Client i has class i mod K of K classes, and random others. A class is divided evenly among its
    clients. FLIS: label skew of 20 % is 2 of 10 classes. Flower: `PathologicalPartitioner` with the
    assignment "first-deterministic".

    Args:
        classes_per_client: The number of classes of each client.
    """

    name: ClassVar[str] = "pathological"
    classes_per_client: int = 2

    def __post_init__(self) -> None:
        require_int("partition.classes_per_client", self.classes_per_client, 1)

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        pools = by_class(labels_of(data, self.name)[0], rng)
        known, per_client = np.array(list(pools)), self.classes_per_client
        require(
            per_client <= len(known),
            "partition.classes_per_client",
            per_client,
            f"there are {len(known)} classes; ask for at most {len(known)}",
        )
        rows = np.array([len(pool) for pool in pools.values()])
        for attempt in range(ATTEMPTS + 1):
            # A ring is the last attempt, because it spreads the owners evenly: if it fails too,
            # there are too many clients.
            chosen = (
                self._choose(clients, len(known), rng)
                if attempt < ATTEMPTS
                else _ring(clients, per_client, len(known))
            )
            needed = np.bincount(chosen.ravel(), minlength=len(known))
            if (needed <= rows).all():
                break
        else:
            scarce, fewest = int((needed - rows).argmax()), int(rows.min())
            most = max(len(known) * (fewest // per_client), min(fewest, len(known)))
            raise InvalidInputError(
                f"partition.clients = {clients}: with {per_client} classes per client,"
                f" {needed[scarce]} clients have class {known[scarce]}, which has {rows[scarce]}"
                f" training samples without the probe; ask for at most {most} clients.",
                "partition.clients",
            )
        owners = {
            int(label): np.flatnonzero((chosen == k).any(1))
            for k, label in enumerate(known)
            if (chosen == k).any()
        }
        return Split(assign_classes(pools, owners, clients))

    def _choose(self, clients: int, known: int, rng: np.random.Generator) -> Index:
        """(clients, classes_per_client) numbers of classes. If there are fewer clients than
        classes, the classes without a client are assigned first.
        """
        unowned = rng.permutation(np.arange(min(clients, known), known)).tolist()
        chosen = []
        for client in range(clients):
            own = [client % known]
            while len(own) < self.classes_per_client and unowned:
                own.append(unowned.pop())
            others = np.setdiff1d(np.arange(known), own)
            chosen.append(
                [
                    *own,
                    *rng.choice(others, self.classes_per_client - len(own), replace=False).tolist(),
                ]
            )
        return np.array(chosen)


@dataclass(frozen=True)
class NaturalId:
    """Each client is one id of a key of the data set, such as a writer.

    The clients are drawn at random from the ids. Ids that are text are the names of the clients.
    Flower: `NaturalIdPartitioner`.

    A client's test part has the test samples of its id. If there are none, it is a random fraction
    of the client's training samples, which are then not used for training.

    Args:
        key: The key of the data set.
        test_fraction: The fraction of the training samples that become the test part.
    """

    name: ClassVar[str] = "natural_id"
    key: str = "writer"
    test_fraction: float = 0.2

    def __post_init__(self) -> None:
        require(
            isinstance(self.key, str) and self.key != "",
            "partition.key",
            self.key,
            "must be the name of a key of the data set",
        )
        check_positive("test_fraction", self.test_fraction)
        require(
            self.test_fraction < 1, "partition.test_fraction", self.test_fraction, "must be below 1"
        )

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        present = f"its keys are {', '.join(sorted(data.keys))}" if data.keys else "it has no keys"
        require(
            self.key in data.keys,
            "partition.key",
            self.key,
            f"data set {data.name!r} has no array {self.key}_train of whole numbers or text"
            f" ({present})",
        )
        train_ids, test_ids = data.keys[self.key]
        known = np.unique(train_ids.numpy())
        most = len(known)
        require(
            clients <= most,
            "partition.clients",
            clients,
            f"there are {most} different ids in {self.key!r}; ask for at most {most}",
        )
        test_pools = {} if test_ids is None else by_class(test_ids.numpy(), rng)
        train_pools, nothing = by_class(train_ids.numpy(), rng), np.empty(0, np.int64)
        train, test, held_out = [], [], []
        chosen = np.sort(rng.choice(known, clients, replace=False)).tolist()
        for client in chosen:
            rows = train_pools[client]
            test.append(test_pools.get(client, nothing))
            # A client with a single sample keeps it for training.
            held = (
                0
                if len(test[-1])
                else min(max(1, round(len(rows) * self.test_fraction)), len(rows) - 1)
            )
            held_out.append(rows[:held])
            train.append(rows[held:])
        texts = data.key_names.get(self.key)
        names = None if texts is None else [texts[client] for client in chosen]
        return Split(train, test=test, held_out=held_out, names=names)


@dataclass(frozen=True)
class QuantitySkew:
    """All clients have the same distribution; their sizes are drawn from Dirichlet(α).

    Args:
        alpha: The concentration α: the smaller it is, the more the sizes differ.
    """

    name: ClassVar[str] = "quantity_skew"
    alpha: float = 0.5

    def __post_init__(self) -> None:
        check_positive("alpha", self.alpha)

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        order, groups = rng.permutation(len(data.y_train)), np.zeros(clients, np.int64)
        for _ in range(ATTEMPTS):
            sizes = shares(len(order), rng.dirichlet(np.full(clients, self.alpha)))
            if sizes.min() > 0:
                return Split(cut(order, sizes), groups=groups)
        return Split(fill_up(cut(order, sizes), 1, rng), groups=groups)


def _ring(clients: int, classes_per_client: int, known: int) -> Index:
    ring: Index = (np.arange(clients)[:, None] + np.arange(classes_per_client)) % known
    return ring
