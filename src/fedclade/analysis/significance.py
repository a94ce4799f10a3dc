"""Which differences between methods are statistically significant, with seeds as replicates.

With one seed, all methods have the same clients and the same batches. So the difference of two
methods is computed per seed, from their means over all clients, and a paired t test compares these
differences with their spread. All pairs are tested, and Holm's correction keeps the probability of
one or more false "real" verdicts below 5 %. The clients of one seed share one training run, so they
are not independent replicates: they only show how a difference is distributed.
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
_ENOUGH_SEEDS = 5  # fewer give wide intervals
Measure = Literal["accuracy", "loss"]
Verdict = Literal["real", "uncertain", "not shown", "the same", "one seed"]


@dataclass(frozen=True)
class Measured:
    """The measurements of one run.

    Args:
        title: the method and its settings.
        seed: the run's seed.
        federation: any value that is equal for two runs if they have the same clients at a seed.
        summary: the run's summary.
        clients: the run's columns per client.
    """

    title: str
    seed: int
    federation: Any
    summary: Mapping[str, Any]
    clients: Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Pair:
    """The comparison of two methods.

    Args:
        first: the method with the better mean.
        second: the other method.
        difference: `first` minus `second`, in points of accuracy or in loss, averaged over seeds.
        half_width: half the width of the difference's 95 % interval; None with one seed.
        p: p-value of the paired t test; None with one seed.
        p_holm: p after the correction for all pairs; None with one seed.
        gain: share of the clients for which `first` is better; None if the clients differ.
        lose: share of the clients for which `first` is worse; None if the clients differ.
        verdict: the result in one word.
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
    """All pairs, and the result as sentences.

    Args:
        measure: accuracy, or loss if no accuracy was measured, or None without test data.
        seeds: the seeds that every method has.
        best: the method with the best mean.
        pairs: the comparisons, those with the best method first.
        in_words: the result as sentences.
    """

    measure: Measure | None
    seeds: tuple[int, ...]
    best: str | None
    pairs: tuple[Pair, ...]
    in_words: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"level": LEVEL, **asdict(self)}


def differences(runs: Sequence[Measured]) -> Differences:
    """Compare every pair of titles, over the seeds that all of them have."""
    runs_of: dict[str, dict[int, Measured]] = {}
    for run in runs:
        runs_of.setdefault(run.title, {})[run.seed] = run
    seeds = tuple(sorted(set.intersection(*(set(by_seed) for by_seed in runs_of.values()))))
    measures: tuple[Measure, ...] = ("accuracy", "loss")
    measure = next(
        (name for name in measures if all(run.summary.get(name) is not None for run in runs)), None
    )
    if len(runs_of) < 2 or not seeds:
        return Differences(measure, seeds, None, (), ())
    if measure is None:
        return Differences(
            None,
            seeds,
            None,
            (),
            ("Nothing to compare: some runs have no clients with test data.",),
        )
    better = 1 if measure == "accuracy" else -1
    order = sorted(
        runs_of,
        key=lambda title: (
            -better * statistics.fmean(runs_of[title][seed].summary[measure] for seed in seeds)
        ),
    )
    names = list(combinations(order, 2))
    by_seed = [
        [runs_of[a][seed].summary[measure] - runs_of[b][seed].summary[measure] for seed in seeds]
        for a, b in names
    ]
    tested = [paired_t(per_seed) for per_seed in by_seed]
    corrected = holm([p for _, p in tested]) if len(seeds) > 1 else [math.nan] * len(names)
    pairs = []
    for (first, second), per_seed, (half_width, p), p_holm in zip(
        names, by_seed, tested, corrected, strict=True
    ):
        gain, lose = _by_client(
            measure, better, [(runs_of[first][seed], runs_of[second][seed]) for seed in seeds]
        )
        difference, verdict = statistics.fmean(per_seed), _verdict(per_seed, p, p_holm)
        tests = (None, None, None) if len(seeds) == 1 else (half_width, p, p_holm)
        pairs.append(
            Pair(first, second, difference, tests[0], tests[1], tests[2], gain, lose, verdict)
        )
    same_clients = all(
        runs_of[order[0]][seed].federation == runs_of[other][seed].federation
        for other in order
        for seed in seeds
    )
    return Differences(
        measure,
        seeds,
        order[0],
        tuple(pairs),
        tuple(_in_words(measure, seeds, pairs, same_clients)),
    )


def paired_t(by_seed: Sequence[float]) -> tuple[float, float]:
    """Half the width of the 95 % t interval of the mean difference, and the two-sided p-value; NaN
    for fewer than two seeds.
    """
    n = len(by_seed)
    if n < 2:
        return math.nan, math.nan
    mean, spread = statistics.fmean(by_seed), statistics.stdev(by_seed)
    if spread <= 1e-9:
        # Equal to the last digit, which happens with accuracies on few samples. t would be
        # infinite, so use the sign test: n equal signs.
        return 0.0, 1.0 if abs(mean) <= 1e-9 else 0.5 ** (n - 1)
    t = abs(mean) * math.sqrt(n) / spread
    return _half_width(n) * spread, float(2 * stdtr(n - 1, -t))


def _half_width(n: int) -> float:
    """Half the width of the interval of a mean of n values, in standard deviations."""
    return float(stdtrit(n - 1, (1 + LEVEL) / 2)) / math.sqrt(n)


def holm(p: Sequence[float]) -> list[float]:
    """Holm's correction: multiply the smallest p by n, the next by n − 1, …, and keep the order."""
    corrected, largest = [0.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
        corrected[index] = largest
    return corrected


def _by_client(
    measure: Measure, better: int, pairs: Sequence[tuple[Measured, Measured]]
) -> tuple[float | None, float | None]:
    """The shares of the clients, over all seeds, for which the first is better and worse."""
    gains = [
        better * (value - other)
        for first, second in pairs
        if first.federation == second.federation
        for value, other in zip(
            first.clients.get(measure, ()), second.clients.get(measure, ()), strict=True
        )
        if value is not None and other is not None
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
    measure: Measure, seeds: Sequence[int], pairs: Sequence[Pair], same_clients: bool
) -> list[str]:
    """A heading, and a line for each pair that contains the best method. These pairs come first."""
    with_best = [pair for pair in pairs if pair.first == pairs[0].first]
    other_data = (
        []
        if same_clients
        else ["The runs have different clients, so the data may cause a difference too."]
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
                f"One seed cannot show which differences are real; use five ({more}). In this seed"
                f" {hint}."
            ),
            *other_data,
        ]
    correction = f", corrected for {len(pairs)} pairs" if len(pairs) > 1 else ""
    words = [
        f"Which differences are real, over {len(seeds)} seeds (paired by seed, ± is a 95 %"
        f" interval{correction}):"
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
                f"{names}: uncertain, {_size(measure, pair)}; significant without the correction,"
                f" but not among {len(pairs)} pairs."
            )
        else:
            words.append(f"{names}: no difference shown, {_size(measure, pair)}.")
    if len(seeds) < _ENOUGH_SEEDS and any(
        pair.verdict in ("uncertain", "not shown") for pair in with_best
    ):
        narrower = _half_width(_ENOUGH_SEEDS) / _half_width(len(seeds))
        words.append(
            f"With {_ENOUGH_SEEDS} seeds and the same spread, ± would be {narrower:.0%} as wide."
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
