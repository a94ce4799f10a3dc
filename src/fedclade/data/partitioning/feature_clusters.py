"""A partition by features: every client has all classes, but another cluster of each class, at a
given distance between the clients.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import ClassVar, Literal, get_args

import numpy as np
from torch import Tensor

from fedclade.core.inputs import one_tensor
from fedclade.data.datasets import Dataset
from fedclade.data.feature_emd import (
    FITTED,
    PIVOTS,
    SAMPLES,
    Codes,
    Features,
    Measure,
    codes_of,
    optimal_transport,
    principal_components,
    some,
    transport_cost,
)
from fedclade.data.partitioning.base import Index, Split, by_class, check_positive, cut, labels_of
from fedclade.errors import InvalidInputError, require

PRECISION = 1 / 512  # of the fraction that is mixed

Mixing = Literal["random", "farthest"]
MOVED = 0.1  # the fraction of the farthest client's samples that move in one step
MAX_STEPS = 500
DRAWS = 5  # of the moved samples in one step, until the pairwise distances are normal
LEVEL = 0.05  # of the Shapiro-Wilk test
PAIR_SAMPLES = 100  # of a client, for the distances between pairs of clients


@dataclass(frozen=True)
class FeatureClusters:
    """Each client has all classes, but another cluster of each class in feature space.

    Each class is divided into as many clusters as there are clients: client k has cluster k of
    every class. From the appendix of FedGMCC (Lucchetti et al., arXiv 2204.11017).

    A fraction of each class is then assigned at random, which reduces the earth mover's distance
    (`earth_movers_distance` with default features and samples) to `emd`. Test samples are assigned
    in the same way, so that the test part of a client is like its training part.

    The clusters come from k-means centers with equal capacity: the assignment with the least total
    squared distance in which the clients' numbers of samples of a class differ by at most one.
    (The paper repeats samples of the smaller clusters.) The paper does not define which cluster of
    one class belongs to which cluster of another. Here a client gets the clusters whose centers lie
    in similar directions from the means of their classes.

    With mixing = "farthest" the distance is reduced as in the paper's appendix C, step by step: the
    client whose mean code is farthest from the mean of all codes gives a tenth of its samples,
    drawn at random, to random other clients. A step is drawn again, up to five times, if the
    distances between all pairs of clients are not normally distributed (Shapiro-Wilk test, level
    0.05). Steps end when the distance is at most `emd`. Here a client that receives a sample
    gives back one of its own, drawn at random: without this the farthest client stays the
    farthest and loses almost all of its samples. Class proportions then differ between clients.

    For other features, write a subclass with another name and `encoder`.

    Args:
        emd: The earth mover's distance in percent; None to mix nothing, which gives the largest
            distance.
        mixing: How samples move to reduce the distance: "random" or "farthest".
    """

    name: ClassVar[str] = "feature_clusters"
    emd: float | None = None
    mixing: Mixing = "random"

    def __post_init__(self) -> None:
        if self.emd is not None:
            check_positive("emd", self.emd)
        allowed = get_args(Mixing)
        require(
            self.mixing in allowed, "partition.mixing", self.mixing, f"must be one of {allowed}"
        )

    def encoder(self, data: Dataset, rng: np.random.Generator) -> Features:
        """The feature function: by default the first 32 principal components.

        Args:
            data: The data set without the probe samples.
            rng: The source of all random numbers.

        Returns:
            A function from inputs, as a model reads them, to codes with one row per sample.
        """
        return principal_components(
            _inputs_of(data)[some(np.arange(len(data.y_train)), FITTED, rng)], rng
        )

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, _ = labels_of(data, self.name)
        smallest = int(np.unique(labels, return_counts=True)[1].min())
        require(
            clients <= smallest,
            "partition.clients",
            clients,
            f"every client has every class, and the smallest class has {smallest} training samples"
            f" without the probe; ask for at most {smallest} clients",
        )
        features = self.encoder(data, rng)
        codes = codes_of(_inputs_of(data), features)
        x_test = one_tensor(data.x_test, f"the partition {self.name}", "partition.name")
        test_codes = codes_of(x_test, features) if len(x_test) else codes[:0]
        centers = _centers(codes, labels, clients, rng)
        train = _ClusteredRows(codes, labels, centers, rng)
        test = _ClusteredRows(test_codes, data.y_test.numpy(), centers, rng)
        if self.emd is not None and self.mixing == "farthest":
            return self._moved(self.emd, train, test, codes, rng)
        fraction = 0.0 if self.emd is None else self._mixed_fraction(self.emd, train, codes, rng)
        return Split(train.mixed(fraction), test=test.mixed(fraction))

    def _moved(
        self,
        emd: float,
        train: _ClusteredRows,
        test: _ClusteredRows,
        codes: Codes,
        rng: np.random.Generator,
    ) -> Split:
        """Move samples from the farthest client until the distance is at most `emd`."""
        measure = Measure(
            lambda rows: codes[rows], np.arange(len(codes)), train.sizes, SAMPLES, rng
        )
        parts, test_parts = train.mixed(0.0), test.mixed(0.0)
        distance = measure(parts).percent
        _check_reachable(emd, measure(train.mixed(1.0)).percent, distance, len(parts))
        center = codes[np.concatenate(parts)].mean(0)
        for _ in range(MAX_STEPS):
            if distance <= emd:
                return Split(parts, test=test_parts)
            means = np.array([codes[part].mean(0) for part in parts])
            farthest = int(np.square(means - center).sum(1).argmax())
            for _ in range(DRAWS):
                after = _exchanged(parts, farthest, rng)
                if _is_normal(_pair_distances(after, codes, rng)):
                    break
            parts, test_parts = after, _exchanged(test_parts, farthest, rng)
            distance = measure(parts).percent
        raise InvalidInputError(
            f"partition.emd = {emd}: not reached in {MAX_STEPS} steps. Ask for a larger distance,"
            " or use mixing = 'random'.",
            "partition.emd",
        )

    def _mixed_fraction(
        self, emd: float, train: _ClusteredRows, codes: Codes, rng: np.random.Generator
    ) -> float:
        """The fraction to mix for this distance, which falls about linearly with the fraction."""
        from scipy.optimize import brentq

        measure = Measure(
            lambda rows: codes[rows], np.arange(len(codes)), train.sizes, SAMPLES, rng
        )
        distance = cache(lambda fraction: measure(train.mixed(fraction)).percent)
        low, high = distance(1.0), distance(0.0)
        _check_reachable(emd, low, high, len(train.sizes))
        return float(brentq(lambda fraction: distance(fraction) - emd, 0.0, 1.0, xtol=PRECISION))


def _check_reachable(emd: float, low: float, high: float, clients: int) -> None:
    """Raise an error unless the distance is between those of mixed and of unmixed clients."""
    if not low < emd < high:
        least, most = max(0.0, math.ceil(10 * low) / 10), math.floor(10 * high) / 10
        remedy = (
            f"ask for more than {least:g} and at most {most:g}" if most > least else "leave emd out"
        )
        raise InvalidInputError(
            f"partition.emd = {emd}: {clients} clients of this data set can be"
            f" {max(0.0, low):.2f} to {max(0.0, high):.2f} percent apart; {remedy}.",
            "partition.emd",
        )


def _exchanged(parts: list[Index], giver: int, rng: np.random.Generator) -> list[Index]:
    """The parts after the giver exchanged a fraction of its rows for random rows of random others.
    Sizes stay the same.
    """
    after = [rng.permutation(part) for part in parts]
    others = [place for place, part in enumerate(parts) if place != giver and len(part)]
    number = min(len(parts[giver]), max(1, round(MOVED * len(parts[giver])))) if others else 0
    first = 0
    takers, counts = np.unique(
        rng.choice(others, number) if number else np.empty(0, np.int64), return_counts=True
    )
    for taker, wanted in zip(takers, counts, strict=True):
        count = min(wanted, len(after[taker]))  # of rows in random order
        leaving = after[giver][first : first + count].copy()
        after[giver][first : first + count] = after[taker][:count]
        after[taker][:count] = leaving
        first += count
    return after


def _pair_distances(parts: list[Index], codes: Codes, rng: np.random.Generator) -> list[float]:
    """The earth mover's distance of each pair of clients, from a few samples of each."""
    drawn = [codes[some(part, PAIR_SAMPLES, rng)] for part in parts]
    return [transport_cost(one, other) for one, other in combinations(drawn, 2)]


def _is_normal(values: list[float]) -> bool:
    """Whether the Shapiro-Wilk test does not reject a normal distribution. It needs three different
    values.
    """
    from scipy.stats import shapiro  # slow to import

    return len(set(values)) < 3 or float(shapiro(values).pvalue) >= LEVEL


class _ClusteredRows:
    """The rows of each client when the samples of each class are assigned to its centers. Samples
    of a class without centers are dropped.
    """

    def __init__(
        self, codes: Codes, labels: Index, centers: dict[int, Codes], rng: np.random.Generator
    ) -> None:
        clients = len(next(iter(centers.values())))
        owner = np.full(len(labels), clients)
        self.sizes = np.zeros(clients, np.int64)
        for label, rows in by_class(labels, rng).items():
            if label in centers:
                capacity = np.full(clients, len(rows) // clients)
                # The remainder goes to the clients with the fewest samples so far, so that the
                # totals stay even.
                capacity[np.argsort(self.sizes, kind="stable")[: len(rows) % clients]] += 1
                owner[rows] = assign_with_capacity(codes[rows], centers[label], capacity)
                self.sizes += capacity
        self._rows = np.argsort(owner, kind="stable")[: self.sizes.sum()]
        self._labels = labels[self._rows]
        self._seed = int(rng.integers(2**63))

    def mixed(self, fraction: float) -> list[Index]:
        """The rows of each client when a fraction of each class is shuffled among its clients."""
        rng, rows = np.random.default_rng(self._seed), self._rows.copy()
        for positions in by_class(self._labels, rng).values():
            shuffled = positions[: round(fraction * len(positions))]
            rows[shuffled] = self._rows[rng.permutation(shuffled)]
        return cut(rows, self.sizes)


def _centers(
    codes: Codes, labels: Index, clients: int, rng: np.random.Generator
) -> dict[int, Codes]:
    """The k-means centers of each class; row k is the center of client k."""
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist
    from sklearn.cluster import KMeans  # type: ignore[import-untyped]  # slow to import
    from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    by_label: dict[int, Codes] = {}
    # The sum, over the classes so far, of the offset of each client's center from the class mean.
    directions = np.zeros((clients, codes.shape[1]))
    for label, rows in by_class(labels, rng).items():
        # With several threads the order of additions changes from run to run.
        with threadpool_limits(1), warnings.catch_warnings():
            # Equal samples give equal centers, about which k-means warns.
            warnings.simplefilter("ignore", ConvergenceWarning)
            centers = (
                KMeans(clients, n_init=1, random_state=int(rng.integers(2**31)))
                .fit(codes[rows])
                .cluster_centers_
            )
        offsets = centers - codes[rows].mean(0)
        mean_directions = directions / max(1, len(by_label))
        order = linear_sum_assignment(cdist(mean_directions, offsets, "sqeuclidean"))[1]
        by_label[label] = centers[order]
        directions += offsets[order]
    return by_label


def assign_with_capacity(codes: Codes, centers: Codes, capacity: Index) -> Index:
    """The center of each code, such that center k has capacity[k] codes and the sum of squared
    distances is the least possible.

    This is a transport problem with integer masses, whose optimum is an integer solution.
    """
    from scipy.spatial.distance import cdist

    if len(codes) == 0:
        return np.empty(0, np.int64)
    costs = cdist(codes, centers, "sqeuclidean")
    plan = optimal_transport().emd(
        np.ones(len(codes)), capacity.astype(np.float64), costs, numItermax=PIVOTS
    )
    assignment: Index = np.asarray(plan).argmax(1)
    return assignment


def _inputs_of(data: Dataset) -> Tensor:
    return one_tensor(data.x_train, f"the partition {FeatureClusters.name}", "partition.name")
