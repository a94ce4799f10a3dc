"""The partitions of PFLlib's leaderboard."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np

from fedclade.data.datasets import Dataset
from fedclade.data.partitioning.base import Index, Split, by_class, check_positive, labels_of
from fedclade.errors import InvalidInputError, require, require_int

ATTEMPTS = 1000  # random draws
LEAST = 40  # samples of a client, so that its test part has a batch of 10
Skew: TypeAlias = Literal["pathological", "dirichlet"]


@dataclass(frozen=True)
class PFLlib:
    """The training and the test samples of the data set are divided among the clients together,
    and then each client's samples into a training and a test part.

    Args:
        skew: "pathological": the clients of a group have the same classes, of which each client has
            a part of random size; the groups have no class in common. "dirichlet": each class is
            divided in proportions drawn from Dirichlet(α); a client that already has its even share
            of all samples gets nothing of the next classes, and a draw is repeated until each
            client has 40 samples.
        classes_per_client: the number of classes of each client ("pathological").
        alpha: the concentration α ("dirichlet").
        test_fraction: the fraction of a client's samples that is its test part.
    """

    name: ClassVar[str] = "pfllib"
    merges_test: ClassVar[bool] = True
    skew: Skew = "pathological"
    classes_per_client: int = 2
    alpha: float = 0.1
    test_fraction: float = 0.25

    def __post_init__(self) -> None:
        kinds = ("pathological", "dirichlet")
        require(
            self.skew in kinds, "partition.skew", self.skew, f"must be one of {', '.join(kinds)}"
        )
        require_int("partition.classes_per_client", self.classes_per_client, 1)
        check_positive("alpha", self.alpha)
        check_positive("test_fraction", self.test_fraction)
        require(
            self.test_fraction < 1, "partition.test_fraction", self.test_fraction, "must be below 1"
        )

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, _ = labels_of(data, self.name)
        require(
            2 * clients <= len(labels),
            "partition.clients",
            clients,
            f"there are {len(labels)} samples, and a client needs two",
        )
        pools = list(by_class(labels, rng).values())
        groups = None
        if self.skew == "pathological":
            parts, groups = self._pathological(pools, clients, rng)
        else:
            parts = self._dirichlet(pools, clients, rng)
        train, held_out = [], []
        for rows in parts:
            rows = rng.permutation(rows)
            count = min(max(1, math.floor((1 - self.test_fraction) * len(rows))), len(rows) - 1)
            train.append(rows[:count])
            held_out.append(rows[count:])
        return Split(train, held_out=held_out, groups=groups)

    def _pathological(
        self, pools: list[Index], clients: int, rng: np.random.Generator
    ) -> tuple[list[Index], Index]:
        """The samples and the group of each client. A class goes to the first clients that have
        fewer than their number of classes.
        """
        wanted = np.full(clients, self.classes_per_client)
        sharing = math.ceil(clients / len(pools) * self.classes_per_client)
        least = min(LEAST, sum(map(len, pools)) / clients / 2)
        parts: list[list[Index]] = [[] for _ in range(clients)]
        classes: list[tuple[int, ...]] = [()] * clients
        for label, rows in enumerate(pools):
            owners = np.flatnonzero(wanted)[:sharing]
            if not len(owners):
                break
            even = len(rows) / len(owners)
            fewest = max(1, int(max(even / 10, least / len(pools))))
            sizes = rng.integers(fewest, max(fewest + 1, int(even)), len(owners) - 1)
            for owner, piece in zip(owners, np.split(rows, np.cumsum(sizes)), strict=True):
                parts[owner].append(piece)
                classes[owner] += (label,)
            wanted[owners] -= 1
        if short := [client for client in range(clients) if sum(map(len, parts[client])) < 2]:
            raise InvalidInputError(
                f"partition.clients = {clients}: client {short[0]} would have fewer than two"
                f" samples, with {self.classes_per_client} of {len(pools)} classes for each client."
                " Ask for fewer clients or more classes for each.",
                "partition.clients",
            )
        of_group = {owned: number for number, owned in enumerate(dict.fromkeys(classes))}
        groups = np.array([of_group[owned] for owned in classes], np.int64)
        return [np.concatenate(part) for part in parts], groups

    def _dirichlet(self, pools: list[Index], clients: int, rng: np.random.Generator) -> list[Index]:
        total = sum(map(len, pools))
        least = int(min(LEAST, total / clients / 2))
        for _ in range(ATTEMPTS):
            parts: list[list[Index]] = [[] for _ in range(clients)]
            sizes = np.zeros(clients)
            for rows in pools:
                order = rng.permutation(rows)
                proportions = rng.dirichlet(np.full(clients, self.alpha)) * (
                    sizes < total / clients
                )
                if not proportions.any():
                    proportions = (sizes < total / clients).astype(float)
                ends = (np.cumsum(proportions / proportions.sum()) * len(order)).astype(int)[:-1]
                for client, piece in enumerate(np.split(order, ends)):
                    parts[client].append(piece)
                    sizes[client] += len(piece)
            if sizes.min() >= max(2, least):
                return [np.concatenate(part) for part in parts]
        raise InvalidInputError(
            f"partition.alpha = {self.alpha}: in {ATTEMPTS:,} draws some client had fewer than"
            f" {least} samples. Use a larger alpha or fewer clients.",
            "partition.alpha",
        )
