"""Tests whether clients differ, in what, and by how much more than chance: pure functions of
`ClassStatistics`.

Three things may differ: the labels p(y), the inputs p(x), and the inputs of one label p(x | y). For
each the module estimates the share of the variance between clients, corrected for chance: 0 on
average if nothing differs, for any sizes. `group` limits the test to differences between clients
of one group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, stdtr

from fedclade.analysis.diagnose.class_statistics import ClassStatistics
from fedclade.clustering.clade import whitening_matrix

Array = NDArray[np.float64]
Groups = NDArray[np.int64]
DRAWS = 200
# degrees of freedom for each feature: with fewer the spread of a covariance looks like a difference
SAMPLES_PER_FEATURE = 32


@dataclass(frozen=True)
class Difference:
    """A difference between clients. If nothing can be compared it is (0, 1, 1, 0).

    Attributes:
        share: the share of the variance that is between clients, from 0 to 1.
        times_chance: the statistic divided by its expectation under chance.
        p: the probability that chance alone gives at least this statistic.
        power: the probability that a relevant difference would have been found; small with few
            samples.
    """

    share: float
    times_chance: float
    p: float
    power: float


NONE = Difference(0.0, 1.0, 1.0, 0.0)
MATTERS = 0.05  # the share of a fifth of the labels swapped, on MNIST and emnist47
ERRORS = 3.1  # a difference counts if it is this many standard errors above chance: p = 0.001


@dataclass(frozen=True)
class _Part:
    """One group's part in a statistic.

    Args:
        statistic: the value of the statistic.
        chance: its expectation under chance.
        weight: the weight of the variance between clients.
        samples: draws of the statistic under chance (labels), or each square minus its expectation
            under chance (inputs).
        degrees: the degrees of freedom of `samples` (inputs).
    """

    statistic: float
    chance: float
    weight: float
    samples: Array
    degrees: float = 0.0


def of_labels(counts: Array, rng: np.random.Generator, group: Groups | None = None) -> Difference:
    """p(y): chi-square of the table clients x classes, compared with random tables that have the
    same sizes and class totals.

    The share is 1 if every client has one class and all clients have equal size.
    """
    parts = [
        part
        for members in _groups(len(counts), group)
        if (part := _labels(counts[members], rng)) is not None
    ]
    if not parts:
        return NONE
    statistic = sum(part.statistic for part in parts)
    draws = np.sum([part.samples for part in parts], 0)
    p = float((1 + (draws >= statistic).sum()) / (1 + DRAWS))
    return _difference(parts, p, float(draws.std()), lambda between: min(1.0, between))


def _labels(counts: Array, rng: np.random.Generator) -> _Part | None:
    table = counts[counts.sum(1) > 0][:, counts.sum(0) > 0].astype(np.int64)
    clients, classes = table.shape
    if clients < 2 or classes < 2:
        return None
    sizes, total = table.sum(1), int(table.sum())
    # Slow to import, and a Flower node starts a process for every message.
    from scipy.stats import random_table

    random_tables = random_table(sizes, table.sum(0), seed=rng)
    chance = (clients - 1) * (classes - 1) * total / (total - 1)
    weight = (total - (sizes**2).sum() / total) * (classes - 1)
    return _Part(
        chi_square(table),
        chance,
        float(weight),
        np.array([chi_square(random_tables.rvs()) for _ in range(DRAWS)]),
    )


def chi_square(table: NDArray[np.number[Any]]) -> float:
    """Pearson's statistic of a table of counts without empty rows and columns."""
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    return float(((table - expected) ** 2 / expected).sum())


def of_inputs(statistics: ClassStatistics, group: Groups | None = None) -> Difference:
    """p(x): the clients' means of the features, without regard to labels."""
    return _t_test(
        [_inputs(statistics.only(members)) for members in _groups(len(statistics.counts), group)]
    )


def _inputs(statistics: ClassStatistics) -> _Part | None:
    mean = statistics.sums.sum(1) / statistics.sizes[:, None]
    deviation = (statistics.means - mean[:, None]) * np.sqrt(statistics.counts)[..., None]
    scatter = statistics.scatter.sum(0) + np.einsum("mcd,mce->de", deviation, deviation)
    return _between(mean[:, None], statistics.sizes[:, None], scatter[None])


def of_inputs_given_labels(statistics: ClassStatistics, group: Groups | None = None) -> Difference:
    """p(x | y): the clients' means of the features of one class, compared with the other clients
    that have the class.
    """
    parts = (statistics.only(members) for members in _groups(len(statistics.counts), group))
    return _t_test([_between(part.means, part.counts, part.scatter) for part in parts])


def _between(mean: Array, n: Array, scatter: Array) -> _Part | None:
    """How much means differ between clients in each of K columns.

    After whitening with the scatter, n (z - z_column)² has the expectation (1 - n / n_column) times
    the column's variance if nothing differs.

    Args:
        mean: (M, K, d) means.
        n: (M, K) number of samples of each mean.
        scatter: (K, d, d) scatter within cells.
    """
    degrees = n.sum(0) - (n > 0).sum(0)
    known = float(degrees.sum())
    d = min(mean.shape[-1], int(known / SAMPLES_PER_FEATURE))
    shared = ((n > 0).sum(0) > 1) & (degrees > 0)
    if d < 1 or not shared.any():
        return None
    white = whitening_matrix(scatter[:, :d, :d].sum(0), known)
    mean, n, scatter, degrees = (
        mean[:, shared, :d],
        n[:, shared],
        scatter[shared, :d, :d],
        degrees[shared],
    )
    z, total = mean @ white, n.sum(0)
    variance = np.einsum("di,kde,ei->ki", white, scatter, white) / degrees[:, None]
    center = np.einsum("mk,mkd->kd", n, z) / total[:, None]
    # The inverse of an estimated covariance is too large by this factor, on average.
    inflated = known / max(1.0, known - d - 1)
    squares = (n[..., None] * (z - center) ** 2)[n > 0]
    chance = (inflated * (1 - n / total)[..., None] * variance)[n > 0]
    weight = d * float((total - (n**2).sum(0) / total).sum())
    free = d * float((1 - n / total)[n > 0].sum())
    return _Part(
        float(squares.sum()), float(chance.sum()), weight, (squares - chance).ravel(), free
    )


def _t_test(parts: list[_Part | None]) -> Difference:
    """Whether the squares exceed their expectation under chance: a t-test over all of them, without
    assumptions about the features.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return NONE
    excess, free = (
        np.concatenate([part.samples for part in known]),
        sum(part.degrees for part in known),
    )
    mean, error = float(excess.mean()), float(excess.std()) / np.sqrt(free)
    p = float(stdtr(max(1.0, free - 1), -mean / error)) if error > 0 else float(mean <= 0)
    return _difference(known, p, error * len(excess), lambda between: between / (1 + between))


def _difference(
    parts: list[_Part], p: float, error: float, share: Callable[[float], float]
) -> Difference:
    """`error` is the standard error of the statistic; `share` turns variance into a share."""
    statistic, chance, weight = (
        sum(getattr(part, name) for part in parts) for name in ("statistic", "chance", "weight")
    )
    power = float(ndtr(MATTERS * weight / error - ERRORS)) if error > 0 else 1.0
    return Difference(
        share(max(0.0, statistic - chance) / weight),
        statistic / chance if chance > 0 else 1.0,
        p,
        power,
    )


def _groups(clients: int, group: Groups | None) -> Iterator[Groups]:
    """The members of each group; all clients if there are no groups."""
    label = np.zeros(clients, np.int64) if group is None else group
    for number in np.unique(label):
        yield np.flatnonzero(label == number)


def of_sizes(sizes: Array) -> float:
    """How unequal sizes are: their standard deviation in units of their mean."""
    return float(sizes.std() / sizes.mean())
