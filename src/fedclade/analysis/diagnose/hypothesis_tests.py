"""Do clients differ, in what, and by how much more than chance: pure functions over what they said
of themselves.

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
    """share: of the variance, that between clients, from 0 to 1; times_chance: the statistic over
    what chance gives on average; p: how likely chance alone gives as much; power: how likely a
    difference that matters would have been found (with few samples it would not). Where nothing can
    be compared it is (0, 1, 1, 0).
    """

    share: float
    times_chance: float
    p: float
    power: float


NONE = Difference(0.0, 1.0, 1.0, 0.0)
MATTERS = 0.05  # the share of a fifth of the labels swapped, on MNIST and emnist47
ERRORS = 3.1  # standard errors that a difference must be above chance to count: p = 0.001


@dataclass(frozen=True)
class _Part:
    """One group's part in a statistic: what was found, what chance gives on average, and the weight
    of the variance between clients.
    """

    found: float
    chance: float
    weight: float
    # draws of the statistic by chance (labels), or found less chance for each number (inputs)
    more: Array
    degrees: float = 0.0  # how many of these numbers are free


def of_labels(counts: Array, rng: np.random.Generator, group: Groups | None = None) -> Difference:
    """p(y): chi-square of the table clients x classes, against tables drawn with the same sizes and
    class totals.

    The share is 1 where every client has one class, with clients of equal size.
    """
    parts = [
        part
        for who in _groups(len(counts), group)
        if (part := _labels(counts[who], rng)) is not None
    ]
    if not parts:
        return NONE
    found = sum(part.found for part in parts)
    draws = np.sum([part.more for part in parts], 0)
    p = float((1 + (draws >= found).sum()) / (1 + DRAWS))
    return _difference(parts, p, float(draws.std()), lambda between: min(1.0, between))


def _labels(counts: Array, rng: np.random.Generator) -> _Part | None:
    table = counts[counts.sum(1) > 0][:, counts.sum(0) > 0].astype(np.int64)
    clients, classes = table.shape
    if clients < 2 or classes < 2:
        return None
    sizes, total = table.sum(1), int(table.sum())
    from scipy.stats import (
        random_table,
    )  # slow to import, and a node of a federation starts a process for every letter

    by_chance = random_table(sizes, table.sum(0), seed=rng)
    chance = (clients - 1) * (classes - 1) * total / (total - 1)
    weight = (total - (sizes**2).sum() / total) * (classes - 1)
    return _Part(
        chi_square(table),
        chance,
        float(weight),
        np.array([chi_square(by_chance.rvs()) for _ in range(DRAWS)]),
    )


def chi_square(table: NDArray[np.number[Any]]) -> float:
    """Pearson's statistic of a table of counts without empty rows and columns."""
    expected = np.outer(table.sum(1), table.sum(0)) / table.sum()
    return float(((table - expected) ** 2 / expected).sum())


def of_inputs(statistics: ClassStatistics, group: Groups | None = None) -> Difference:
    """p(x): the clients' means of the features, whatever the labels."""
    return _told([_inputs(statistics.only(who)) for who in _groups(len(statistics.counts), group)])


def _inputs(statistics: ClassStatistics) -> _Part | None:
    mean = statistics.sums.sum(1) / statistics.sizes[:, None]
    apart = (statistics.means - mean[:, None]) * np.sqrt(statistics.counts)[..., None]
    scatter = statistics.scatter.sum(0) + np.einsum("mcd,mce->de", apart, apart)
    return _between(mean[:, None], statistics.sizes[:, None], scatter[None])


def of_inputs_given_labels(statistics: ClassStatistics, group: Groups | None = None) -> Difference:
    """p(x | y): the clients' means of the features of one class, compared with other clients that
    have it.
    """
    some = (statistics.only(who) for who in _groups(len(statistics.counts), group))
    return _told([_between(part.means, part.counts, part.scatter) for part in some])


def _between(mean: Array, n: Array, scatter: Array) -> _Part | None:
    """How much means (M, K, d) of n (M, K) samples differ between clients in each of K columns; (K,
    d, d) is the scatter within cells.

    Whitened with the scatter, n (z - z_column)² is on average (1 - n / n_column) times the column's
    variance, if nothing differs.
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
    centre = np.einsum("mk,mkd->kd", n, z) / total[:, None]
    inflated = known / max(
        1.0, known - d - 1
    )  # the inverse of an estimated covariance is too large by this, on average
    squares = (n[..., None] * (z - centre) ** 2)[n > 0]
    chance = (inflated * (1 - n / total)[..., None] * variance)[n > 0]
    weight = d * float((total - (n**2).sum(0) / total).sum())
    free = d * float((1 - n / total)[n > 0].sum())
    return _Part(
        float(squares.sum()), float(chance.sum()), weight, (squares - chance).ravel(), free
    )


def _told(parts: list[_Part | None]) -> Difference:
    """Whether squares are more than chance gives: a t-test over them all, which takes nothing for
    granted about the features.
    """
    known = [part for part in parts if part is not None]
    if not known:
        return NONE
    excess, free = (
        np.concatenate([part.more for part in known]),
        sum(part.degrees for part in known),
    )
    mean, error = float(excess.mean()), float(excess.std()) / np.sqrt(free)
    p = float(stdtr(max(1.0, free - 1), -mean / error)) if error > 0 else float(mean <= 0)
    return _difference(known, p, error * len(excess), lambda between: between / (1 + between))


def _difference(
    parts: list[_Part], p: float, error: float, share: Callable[[float], float]
) -> Difference:
    """`error` is the standard error of what was found."""
    found, chance, weight = (
        sum(getattr(part, name) for part in parts) for name in ("found", "chance", "weight")
    )
    power = float(ndtr(MATTERS * weight / error - ERRORS)) if error > 0 else 1.0
    return Difference(
        share(max(0.0, found - chance) / weight), found / chance if chance > 0 else 1.0, p, power
    )


def _groups(clients: int, group: Groups | None) -> Iterator[Groups]:
    label = np.zeros(clients, np.int64) if group is None else group
    for each in np.unique(label):
        yield np.flatnonzero(label == each)


def of_sizes(sizes: Array) -> float:
    """How unequal sizes are: their standard deviation in units of their mean."""
    return float(sizes.std() / sizes.mean())
