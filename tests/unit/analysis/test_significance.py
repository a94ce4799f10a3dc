"""Significant differences: by hand, compared with scipy, and over many draws."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedclade.analysis.significance import Measured, Pair, differences, holm, paired_t


def runs(
    measure: str = "accuracy",
    clients: dict[str, list[list[float | None]]] | None = None,
    **by_seed: list[float],
) -> list[Measured]:
    measured = []
    for title, values in by_seed.items():
        for seed, value in enumerate(values):
            columns = {measure: clients[title][seed]} if clients else {}
            measured.append(Measured(title, seed, "the same", {measure: value}, columns))
    return measured


def test_paired_t_by_hand() -> None:
    # Mean 2, standard deviation 1, so t = 2 sqrt 3; the 97.5 % quantile of t with 2 degrees of
    # freedom is 4.3027.
    half_width, p = paired_t([1.0, 2.0, 3.0])
    assert half_width == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert p == pytest.approx(0.0741799, rel=1e-5)


@given(
    st.lists(st.floats(-50, 50), min_size=2, max_size=8).filter(
        lambda values: np.std(values) > 1e-3
    )
)
def test_paired_t_equals_scipy(values: list[float]) -> None:
    half_width, p = paired_t(values)
    expected = stats.ttest_1samp(values, 0)
    low, high = expected.confidence_interval(0.95)
    assert p == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    assert half_width == pytest.approx((high - low) / 2, rel=1e-6)


def test_differences_without_spread_are_not_certain() -> None:
    assert paired_t([1.0, 1.0, 1.0]) == (0.0, 0.25)  # three equal signs: two of eight outcomes
    assert paired_t([0.0, 0.0]) == (0.0, 1.0)
    assert all(np.isnan(value) for value in paired_t([3.0]))


def test_holm_by_hand() -> None:
    # 0.01 x 4, 0.02 x 3, 0.03 x 2 = 0.06 too, 0.04 x 1 raised to 0.06.
    assert holm([0.02, 0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.06, 0.04, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_is_at_most_bonferroni_and_keeps_the_order(p: list[float]) -> None:
    corrected = holm(p)
    for before, after in zip(p, corrected, strict=True):
        assert before <= after <= min(1.0, len(p) * before) + 1e-12
    order = np.argsort(p, kind="stable")
    assert list(np.array(corrected)[order]) == sorted(corrected)


def test_false_positives_are_rare() -> None:
    """Four equal methods, three seeds, a random effect per seed: at most 5 % of the comparisons may
    report a real difference.
    """
    draw, false = np.random.default_rng(0), 0
    for _ in range(400):
        noise = draw.normal(0, 1, (4, 3)) + draw.normal(0, 10, 3)
        result = differences(runs(**{f"m{i}": list(noise[i]) for i in range(4)}))
        false += any(pair.verdict == "real" for pair in result.pairs)
    assert false <= 400 * 0.05 + 3 * (400 * 0.05 * 0.95) ** 0.5


def test_the_effect_of_a_seed_cancels() -> None:
    result = differences(runs(good=[90.0, 50.0, 70.0], bad=[80.1, 40.0, 59.9]))
    (pair,) = result.pairs
    assert (pair.first, pair.second, pair.verdict) == ("good", "bad", "real")
    assert pair.difference == pytest.approx(10.0)
    assert "10.00 ± 0.25 points" in result.in_words[1]


def verdicts(pairs: tuple[Pair, ...]) -> dict[tuple[str, str], str]:
    return {(pair.first, pair.second): pair.verdict for pair in pairs}


def test_all_pairs_are_tested_and_those_of_the_best_are_described() -> None:
    result = differences(
        runs(
            fedavg=[60.0, 62.0, 61.0],
            clade=[90.0, 92.1, 91.0],
            cfl=[90.2, 92.0, 90.6],
            copy=[90.0, 92.1, 91.0],
        )
    )
    assert result.best == "clade"
    assert len(result.pairs) == 6
    verdict = verdicts(result.pairs)
    assert verdict["clade", "copy"] == "the same"
    assert verdict["clade", "cfl"] == verdict["copy", "cfl"] == "not shown"
    assert verdict["clade", "fedavg"] == verdict["cfl", "fedavg"] == "real"
    heading, *lines, last = result.in_words
    assert "3 seeds" in heading
    assert "6 pairs" in heading
    assert lines == [
        "clade and copy have the same accuracy in every seed.",
        "clade and cfl: no difference shown, 0.10 ± 0.75 points.",
        "clade is better than fedavg, by 30.03 ± 0.14 points.",
    ]
    assert "5 seeds" in last
    assert "50%" in last


def test_a_difference_that_only_the_correction_removes_is_uncertain() -> None:
    draw = np.random.default_rng(1)
    others = {f"m{i}": list(50 + draw.normal(0, 1, 3)) for i in range(5)}
    result = differences(runs(best=[55.0, 55.0, 55.0], second=[54.0, 53.8, 54.25], **others))
    pair = next(pair for pair in result.pairs if (pair.first, pair.second) == ("best", "second"))
    assert pair.p is not None
    assert pair.p_holm is not None
    assert pair.p < 0.05 < pair.p_holm
    assert pair.verdict == "uncertain"
    assert any("best and second" in line and "21 pairs" in line for line in result.in_words)


def test_one_seed_has_no_tests_but_counts_clients() -> None:
    clients: dict[str, list[list[float | None]]] = {
        "a": [[90.0, 80.0, 70.0, 60.0, None]],
        "b": [[80.0, 80.0, 60.0, 65.0, 50.0]],
    }
    result = differences(runs(clients=clients, a=[75.0], b=[71.25]))
    (pair,) = result.pairs
    assert (pair.verdict, pair.p, pair.p_holm, pair.half_width) == ("one seed", None, None, None)
    assert (pair.gain, pair.lose) == (0.5, 0.25)
    (line,) = result.in_words
    assert "compare --seeds 5" in line
    assert line.endswith("a leads b by 3.75 points (50% of the clients gain, 25% lose).")


def test_clients_are_counted_over_all_seeds() -> None:
    clients: dict[str, list[list[float | None]]] = {
        "a": [[1.0, 2.0], [3.0, 4.0]],
        "b": [[0.0, 3.0], [2.0, 3.0]],
    }
    (pair,) = differences(runs(clients=clients, a=[1.5, 3.5], b=[1.5, 2.5])).pairs
    assert (pair.gain, pair.lose) == (0.75, 0.25)


def test_a_lower_loss_is_better() -> None:
    clients: dict[str, list[list[float | None]]] = {
        "high": [[0.9, 0.8]] * 2,
        "low": [[0.4, 0.9]] * 2,
    }
    result = differences(runs("loss", clients, high=[0.8, 0.9], low=[0.5, 0.61]))
    assert (result.measure, result.best) == ("loss", "low")
    (pair,) = result.pairs
    assert pair.difference == pytest.approx(-0.295)
    assert (pair.gain, pair.lose) == (0.5, 0.5)
    assert "0.2950 ± 0.0635 in loss" in result.in_words[1]


def test_different_clients_are_not_paired() -> None:
    columns = {"accuracy": [50.0, 60.0]}
    result = differences(
        [
            Measured(name, seed, name, {"accuracy": 50.0 + seed}, columns)
            for name in "ab"
            for seed in (0, 1)
        ]
    )
    assert result.pairs[0].gain is None
    assert "different clients" in result.in_words[-1]


def test_without_test_data_there_is_nothing_to_compare() -> None:
    result = differences(
        [Measured(name, 0, "same", {"accuracy": None, "loss": None}, {}) for name in "ab"]
    )
    assert (result.measure, result.pairs) == (None, ())
    (line,) = result.in_words
    assert "test data" in line


def test_one_method_has_no_differences() -> None:
    result = differences(runs(only=[1.0, 2.0]))
    assert (result.pairs, result.in_words) == ((), ())


def test_differences_as_json() -> None:
    content: dict[str, Any] = json.loads(
        json.dumps(differences(runs(a=[1.0, 2.0], b=[0.5, 2.5])).to_json(), allow_nan=False)
    )
    assert content["level"] == 0.95
    assert content["seeds"] == [0, 1]
    assert {
        "first",
        "second",
        "difference",
        "half_width",
        "p",
        "p_holm",
        "gain",
        "lose",
        "verdict",
    } == content["pairs"][0].keys()
