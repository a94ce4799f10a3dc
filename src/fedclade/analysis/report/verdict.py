"""The verdict of a comparison in words. It says what the test of `analysis.significance` shows, and
nothing more.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedclade.analysis.significance import Differences, Pair

_NAMED = 3  # methods that a title names; of more it gives the number


def short_verdict(differences: Differences) -> str:
    """The verdict for a title."""
    with_best, best = _pairs_with_best(differences), differences.best
    if best is None or not with_best:
        return "nothing to compare"
    beaten = [pair.second for pair in with_best if pair.verdict == "real"]
    if len(differences.seeds) == 1:
        return f"{best} leads, but one seed shows no difference"
    if len(beaten) == len(with_best):
        return f"{best} is better than {_listed(beaten)}"
    if beaten:
        others = _listed([pair.second for pair in with_best if pair.verdict != "real"], either=True)
        return f"{best} is better than {_listed(beaten)}, not shown better than {others}"
    everyone = _listed([best, *(pair.second for pair in with_best)])
    if any(pair.verdict == "uncertain" for pair in with_best):
        return f"no best one shown among {everyone}"
    return f"no difference shown between {everyone}"


def verdict(differences: Differences) -> str:
    """The verdict as sentences: what the best setting is better than, and what is not shown."""
    with_best, best = _pairs_with_best(differences), differences.best
    if best is None or not with_best:
        return " ".join(differences.in_words)
    seeds = len(differences.seeds)
    if seeds == 1:
        closest = with_best[0]
        return (
            f"{best} has the best mean, {_size(differences, closest)} before {closest.second}. One"
            " seed cannot show whether this is more than chance: use five (--seeds 5)."
        )
    parts = [
        f"{best} is better than {pair.second}, by {_size(differences, pair)}{_hurt(pair)}."
        for pair in with_best
        if pair.verdict == "real"
    ]
    alike = [pair.second for pair in with_best if pair.verdict in ("not shown", "the same")]
    if alike:
        lead = "" if parts else f"{best} has the best mean, but "
        shows = f"{seeds} seeds show no difference between {best} and {_listed(alike, either=True)}"
        parts.append(f"{lead}{shows}.")
    parts += [
        f"Uncertain: {best} against {pair.second}, {_size(differences, pair)}."
        for pair in with_best
        if pair.verdict == "uncertain"
    ]
    return " ".join(parts)


def _pairs_with_best(differences: Differences) -> list[Pair]:
    return [pair for pair in differences.pairs if pair.first == differences.best]


def _size(differences: Differences, pair: Pair) -> str:
    digits, unit = (1, " points") if differences.measure == "accuracy" else (4, " in loss")
    spread = "" if pair.half_width is None else f" ± {pair.half_width:.{digits}f}"
    return f"{abs(pair.difference):.{digits}f}{spread}{unit}"


def _hurt(pair: Pair) -> str:
    return "" if pair.lose is None else f" ({100 * pair.lose:.0f} % of the clients lose)"


def _listed(names: Sequence[str], either: bool = False) -> str:
    """Names in a sentence; of many their number."""
    if len(names) > _NAMED:
        return f"{len(names)} others" if either else f"{len(names)} settings"
    word = "or" if either else "and"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"
