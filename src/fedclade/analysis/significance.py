"""Which differences between methods are real: the runs of one seed belong together, and the seeds
are what is counted.

In one seed all methods meet the same clients and the same batches. So the difference of two methods
is taken seed by seed, of their means over all clients, and a paired t test asks whether these
differences are large beside how they vary. All pairs are tested, and Holm's correction keeps the
chance of even one false "real" below 5 %. The clients of one seed share one training and its luck:
however many they are, they replicate nothing, and only tell how a difference is spread.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any, Literal

from scipy.special import stdtr, stdtrit

LEVEL = 0.95
_ENOUGH = 5  # seeds: fewer give wide intervals
Measure = Literal["accuracy", "loss"]
Verdict = Literal["real", "uncertain", "not shown", "the same", "one seed"]


@dataclass(frozen=True)
class Measured:
    """What one run measured. `federation`: whatever is equal where the clients are the same for a
    seed.
    """

    title: str
    seed: int
    federation: Any
    summary: Mapping[str, Any]
    clients: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Pair:
    """`first`, the better one, less `second`: in points of accuracy, or in loss, the mean over the
    seeds.

    half_width: of its 95 % interval; p_holm: p after the correction for all pairs; with one seed
    there is none of them. gain, lose: the shares of the clients that `first` serves better and
    worse than `second`; None where the two have other clients.
    """

    first: str
    second: str
    difference: float
    half_width: float | None
    p: float | None
    p_holm: float | None
    gain: float | None
    lose: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Differences:
    """All pairs, and what is to be said. `measure`: accuracy, or loss where there is none, or None
    where no test data were.
    """

    measure: Measure | None
    seeds: tuple[int, ...]
    best: str | None
    pairs: tuple[Pair, ...]
    in_words: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"level": LEVEL, **asdict(self)}


def differences(runs: Sequence[Measured]) -> Differences:
    """Every pair of titles, over the seeds that all of them have."""
    of: dict[str, dict[int, Measured]] = {}
    for run in runs:
        of.setdefault(run.title, {})[run.seed] = run
    seeds = tuple(sorted(set.intersection(*(set(by_seed) for by_seed in of.values()))))
    measures: tuple[Measure, ...] = ("accuracy", "loss")
    measure = next(
        (name for name in measures if all(run.summary.get(name) is not None for run in runs)), None
    )
    if len(of) < 2 or not seeds:
        return Differences(measure, seeds, None, (), ())
    if measure is None:
        return Differences(
            None,
            seeds,
            None,
            (),
            ("Nothing to compare: not every run has clients with test data.",),
        )
    better = 1 if measure == "accuracy" else -1
    order = sorted(
        of,
        key=lambda title: (
            -better * statistics.fmean(of[title][seed].summary[measure] for seed in seeds)
        ),
    )
    names = list(combinations(order, 2))
    by_seed = [
        [of[a][seed].summary[measure] - of[b][seed].summary[measure] for seed in seeds]
        for a, b in names
    ]
    tested = [paired_t(each) for each in by_seed]
    corrected = holm([p for _, p in tested]) if len(seeds) > 1 else [math.nan] * len(names)
    pairs = []
    for (first, second), each, (half_width, p), p_holm in zip(
        names, by_seed, tested, corrected, strict=True
    ):
        gain, lose = _by_client(
            measure, better, [(of[first][seed], of[second][seed]) for seed in seeds]
        )
        difference, verdict = statistics.fmean(each), _verdict(each, p, p_holm)
        tests = (None, None, None) if len(seeds) == 1 else (half_width, p, p_holm)
        pairs.append(
            Pair(first, second, difference, tests[0], tests[1], tests[2], gain, lose, verdict)
        )
    one_federation = all(
        of[order[0]][seed].federation == of[other][seed].federation
        for other in order
        for seed in seeds
    )
    return Differences(
        measure,
        seeds,
        order[0],
        tuple(pairs),
        tuple(_in_words(measure, seeds, pairs, one_federation)),
    )


def paired_t(by_seed: Sequence[float]) -> tuple[float, float]:
    """Half-width of the 95 % t interval of the mean difference, and p of no difference, two-sided;
    NaN for fewer than two seeds.
    """
    n = len(by_seed)
    if n < 2:
        return math.nan, math.nan
    mean, spread = statistics.fmean(by_seed), statistics.stdev(by_seed)
    if spread <= 1e-9:
        # Equal to the last digit, as accuracies on few samples may be. t would be certain; what was
        # seen is n signs that agree.
        return 0.0, 1.0 if abs(mean) <= 1e-9 else 0.5 ** (n - 1)
    t = abs(mean) * math.sqrt(n) / spread
    return _errors(n) * spread, float(2 * stdtr(n - 1, -t))


def _errors(n: int) -> float:
    """Half-width of the interval of a mean of n, in standard deviations."""
    return float(stdtrit(n - 1, (1 + LEVEL) / 2)) / math.sqrt(n)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's correction: the smallest p times their number, the next times one less, …, and none
    below the one before.
    """
    corrected, largest = [0.0] * len(p), 0.0
    for rank, at in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[at]))
        corrected[at] = largest
    return corrected


def _by_client(
    measure: Measure, better: int, pairs: Sequence[tuple[Measured, Measured]]
) -> tuple[float | None, float | None]:
    """The shares of the clients, over all seeds, that the first serves better and worse than the
    second.
    """
    gains = [
        better * (mine - other)
        for first, second in pairs
        if first.federation == second.federation
        for mine, other in zip(
            first.clients.get(measure, ()), second.clients.get(measure, ()), strict=True
        )
        if mine is not None and other is not None
    ]
    if not gains:
        return None, None
    return sum(gain > 0 for gain in gains) / len(gains), sum(gain < 0 for gain in gains) / len(
        gains
    )


def _verdict(by_seed: Sequence[float], p: float, p_holm: float) -> Verdict:
    if len(by_seed) < 2:
        return "one seed"
    if not any(by_seed):
        return "the same"
    if p_holm < 1 - LEVEL:
        return "real"
    return "uncertain" if p < 1 - LEVEL else "not shown"


def _in_words(
    measure: Measure, seeds: Sequence[int], pairs: Sequence[Pair], one_federation: bool
) -> list[str]:
    """A heading, and a line for each pair of the best and another: theirs are the pairs at the
    front.
    """
    with_best = [pair for pair in pairs if pair.first == pairs[0].first]
    other_data = (
        []
        if one_federation
        else ["The runs are on different clients: a difference is as much one of the data."]
    )
    if len(seeds) == 1:
        closest = with_best[0]
        hint = (
            f"{closest.first} leads {closest.second} by"
            f" {_size(measure, closest)}{_clients(closest)}"
        )
        more = "compare --seeds 5, or --set run.seed=0,1,2,3,4"
        return [
            (
                f"One seed cannot tell which differences are real; five can ({more}). As it is,"
                f" {hint}."
            ),
            *other_data,
        ]
    of = f", corrected for {len(pairs)} pairs" if len(pairs) > 1 else ""
    words = [
        f"Which differences are real, over {len(seeds)} seeds (paired by seed, ± is a 95 %"
        f" interval{of}):"
    ]
    for pair in with_best:
        names = f"{pair.first} and {pair.second}"
        if pair.verdict == "the same":
            words.append(f"{names} have the same {measure} in every seed.")
        elif pair.verdict == "real":
            words.append(
                f"{pair.first} is better than {pair.second}, by"
                f" {_size(measure, pair)}{_clients(pair)}."
            )
        elif pair.verdict == "uncertain":
            words.append(
                f"{names}: uncertain, {_size(measure, pair)}; alone it would count, among"
                f" {len(pairs)} pairs it may be chance."
            )
        else:
            words.append(f"{names}: no difference shown, {_size(measure, pair)}.")
    if len(seeds) < _ENOUGH and any(
        pair.verdict in ("uncertain", "not shown") for pair in with_best
    ):
        narrower = _errors(_ENOUGH) / _errors(len(seeds))
        words.append(
            f"With {_ENOUGH} seeds ± would be {narrower:.0%} as wide, for the same spread."
        )
    return words + other_data


def _size(measure: Measure, pair: Pair) -> str:
    digits, unit = (2, " points") if measure == "accuracy" else (4, " in loss")
    spread = "" if pair.half_width is None else f" ± {pair.half_width:.{digits}f}"
    return f"{abs(pair.difference):.{digits}f}{spread}{unit}"


def _clients(pair: Pair) -> str:
    return (
        ""
        if pair.gain is None or pair.lose is None
        else f" ({pair.gain:.0%} of the clients gain, {pair.lose:.0%} lose)"
    )
