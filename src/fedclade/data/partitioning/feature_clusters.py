"""A partition by what samples look like: every client has all classes, each in a manner of its own,
as far apart as asked for.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np
from scipy.optimize import brentq, linear_sum_assignment
from scipy.spatial.distance import cdist

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
)
from fedclade.data.partitioning.base import Index, Split, by_class, check_positive, cut, labels_of
from fedclade.errors import InvalidInputError, require

PRECISION = 1 / 512  # of the share that is mixed


@dataclass(frozen=True)
class FeatureClusters:
    """Each class is cut into as many clusters as there are clients, in feature space: client k has
    cluster k of every class.

    FedGMCC's appendix (Lucchetti et al., arXiv 2204.11017). Then a share of each class is
    assigned at random, large enough to bring the earth mover's distance (`earth_movers_distance`,
    default features and samples) down to `emd`; None mixes nothing, which gives the largest
    distance. Test samples are dealt in the same way, so that clients are tested on
    their own kind.

    Clusters are k-means centres with equal room: the assignment of least total squared distance in
    which all clients get equally many of each class, up to one. (The paper repeats samples of the
    smaller clusters.) Which cluster of one class goes with which of another the paper leaves open;
    here those whose centres lie in like directions from the middle of their classes go together.

    Other features: a subclass with a name and an `encoder` of its own.
    """

    name: ClassVar[str] = "feature_clusters"
    emd: float | None = None

    def __post_init__(self) -> None:
        if self.emd is not None:
            check_positive("emd", self.emd)

    def encoder(self, data: Dataset, rng: np.random.Generator) -> Features:
        """The features: a function of inputs as a model reads them. Here the first 32 principal
        components.
        """
        return principal_components(
            data.x_train[some(np.arange(len(data.y_train)), FITTED, rng)], rng
        )

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, _ = labels_of(data, self.name)
        smallest = int(np.unique(labels, return_counts=True)[1].min())
        allowed = (
            f"every client has every class, and the smallest has {smallest} training samples"
            " besides the probe"
        )
        require(
            clients <= smallest,
            "partition.clients",
            clients,
            f"{allowed}; ask for at most {smallest} clients",
        )
        features = self.encoder(data, rng)
        codes = codes_of(data.x_train, features)
        test_codes = codes_of(data.x_test, features) if len(data.x_test) else codes[:0]
        centres = _centres(codes, labels, clients, rng)
        train = _ClusteredRows(codes, labels, centres, rng)
        test = _ClusteredRows(test_codes, data.y_test.numpy(), centres, rng)
        share = 0.0 if self.emd is None else self._share(self.emd, train, codes, rng)
        return Split(train.mixed(share), test=test.mixed(share))

    def _share(
        self, wanted: float, train: _ClusteredRows, codes: Codes, rng: np.random.Generator
    ) -> float:
        """How much has to be mixed. The distance falls with the share: in a straight line, but for
        what sampling blurs.
        """
        measure = Measure(
            lambda rows: codes[rows], np.arange(len(codes)), train.sizes, SAMPLES, rng
        )
        distance = cache(lambda share: measure(train.mixed(share)).percent)
        low, high = distance(1.0), distance(0.0)
        if not low < wanted < high:
            least, most = max(0.0, math.ceil(10 * low) / 10), math.floor(10 * high) / 10
            remedy = (
                f"ask for at most {most:g} and more than {least:g}"
                if most > least
                else "leave emd out"
            )
            raise InvalidInputError(
                f"partition.emd = {wanted}: {len(train.sizes)} clients of these data can be"
                f" {max(0.0, low):.2f} to {max(0.0, high):.2f} percent apart; {remedy}."
            )
        return float(brentq(lambda share: distance(share) - wanted, 0.0, 1.0, xtol=PRECISION))


class _ClusteredRows:
    """Samples of each class at the centres of that class, client by client. Samples of a class
    without centres belong to nobody.
    """

    def __init__(
        self, codes: Codes, labels: Index, centres: dict[int, Codes], rng: np.random.Generator
    ) -> None:
        clients = len(next(iter(centres.values())))
        owner = np.full(len(labels), clients)
        self.sizes = np.zeros(clients, np.int64)
        for label, rows in by_class(labels, rng).items():
            if label in centres:
                room = np.full(clients, len(rows) // clients)
                # What does not divide goes to those who have least so far, so that totals stay even
                # too.
                room[np.argsort(self.sizes, kind="stable")[: len(rows) % clients]] += 1
                owner[rows] = nearest_with_room(codes[rows], centres[label], room)
                self.sizes += room
        self._rows = np.argsort(owner, kind="stable")[: self.sizes.sum()]
        self._labels = labels[self._rows]
        self._seed = int(rng.integers(2**63))

    def mixed(self, share: float) -> list[Index]:
        """The rows of each client when `share` of each class is shuffled among the clients that
        have it.
        """
        rng, rows = np.random.default_rng(self._seed), self._rows.copy()
        for places in by_class(self._labels, rng).values():
            chosen = places[: round(share * len(places))]
            rows[chosen] = self._rows[rng.permutation(chosen)]
        return cut(rows, self.sizes)


def _centres(
    codes: Codes, labels: Index, clients: int, rng: np.random.Generator
) -> dict[int, Codes]:
    """k-means centres of each class, client k's in row k."""
    from sklearn.cluster import KMeans  # type: ignore[import-untyped]  # slow to import
    from sklearn.exceptions import ConvergenceWarning  # type: ignore[import-untyped]
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    found: dict[int, Codes] = {}
    manner = np.zeros(
        (clients, codes.shape[1])
    )  # the sum, over the classes so far, of where each client's centre lies from the middle
    for label, rows in by_class(labels, rng).items():
        # With several threads it adds in an order that changes from run to run.
        with threadpool_limits(1), warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", ConvergenceWarning
            )  # of equal samples: centres may lie in one place
            centres = (
                KMeans(clients, n_init=1, random_state=int(rng.integers(2**31)))
                .fit(codes[rows])
                .cluster_centers_
            )
        offsets = centres - codes[rows].mean(0)
        order = linear_sum_assignment(cdist(manner / max(1, len(found)), offsets, "sqeuclidean"))[1]
        found[label] = centres[order]
        manner += offsets[order]
    return found


def nearest_with_room(codes: Codes, centres: Codes, room: Index) -> Index:
    """The centre of each code: centre k gets room[k] of them, and the sum of squared distances is
    the least possible.

    A transport problem with whole masses, whose solution is whole too.
    """
    if len(codes) == 0:
        return np.empty(0, np.int64)
    costs = cdist(codes, centres, "sqeuclidean")
    plan = optimal_transport().emd(
        np.ones(len(codes)), room.astype(np.float64), costs, numItermax=PIVOTS
    )
    chosen: Index = np.asarray(plan).argmax(1)
    return chosen
