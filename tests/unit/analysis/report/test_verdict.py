"""The verdict of a comparison: it never says more than the test shows."""

from __future__ import annotations

from collections.abc import Sequence

from fedclade.analysis.report.verdict import short_verdict, verdict
from fedclade.analysis.significance import Differences, Measured, differences


def found(by_method: dict[str, Sequence[float]]) -> Differences:
    """The test of these accuracies, one for each seed."""
    return differences(
        [
            Measured(
                method, seed, "f", {"accuracy": value, "loss": 0.1}, {"accuracy": [value, value]}
            )
            for method, values in by_method.items()
            for seed, value in enumerate(values)
        ]
    )


def test_a_clear_best() -> None:
    result = found({"b": (70.0, 71.0, 72.0, 73.0), "a": (90.0, 91.5, 92.0, 93.0)})
    assert short_verdict(result) == "a is better than b"
    assert verdict(result).startswith("a is better than b, by 20.1 ± 0.4 points (0 % of the")


def test_no_difference_is_no_winner() -> None:
    result = found({"a": (70.0, 75.0, 71.0), "b": (72.0, 71.0, 74.5)})
    assert short_verdict(result) == "no difference shown between b and a"
    assert "3 seeds show no difference between b and a" in verdict(result)
    assert "better" not in verdict(result)


def test_a_best_that_is_level_with_some() -> None:
    result = found(
        {"a": (90.0, 91.0, 92.5), "b": (90.5, 91.5, 91.0), "c": (50.0, 51.2, 52.4)},
    )
    assert short_verdict(result) == "a is better than c, not shown better than b"
    assert "show no difference between a and b" in verdict(result)


def test_uncertain_differences_are_named() -> None:
    """Significant without the correction for all pairs only."""
    result = found({"a": (90.0, 91.0, 95.0), "b": (80.0, 84.4, 82.0), "c": (50.0, 84.0, 81.0)})
    uncertain = [pair.second for pair in result.pairs if pair.verdict == "uncertain"]
    assert uncertain == ["b"]
    assert short_verdict(result) == "no best one shown among a, b and c"
    assert "Uncertain: a against b, 9.9 ±" in verdict(result)


def test_one_seed_shows_nothing() -> None:
    result = found({"a": (90.0,), "b": (20.0,)})
    assert short_verdict(result) == "a leads, but one seed shows no difference"
    assert "One seed cannot show" in verdict(result)


def test_many_settings_are_counted() -> None:
    result = found({name: (70.0 + at % 2, 71.0, 72.0) for at, name in enumerate("abcdef")})
    assert short_verdict(result) == "no difference shown between 6 settings"
