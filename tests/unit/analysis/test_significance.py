"""Which differences are real: worked by hand, against scipy, and over many draws."""

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
    found = []
    for title, values in by_seed.items():
        for seed, value in enumerate(values):
            columns = {measure: clients[title][seed]} if clients else {}
            found.append(Measured(title, seed, "the same", {measure: value}, columns))
    return found


def test_paired_t_by_hand() -> None:
    # Mean 2, standard deviation 1, so t = 2 sqrt 3; the 97.5 % quantile of t with 2 degrees of
    # freedom is 4.3027.
    half_width, p = paired_t([1.0, 2.0, 3.0])
    assert half_width == pytest.approx(4.302653 / 3**0.5, rel=1e-6)
    assert p == pytest.approx(0.0741799, rel=1e-5)


@given(
    st.lists(st.floats(-50, 50), min_size=2, max_size=8).filter(lambda found: np.std(found) > 1e-3)
)
def test_paired_t_is_scipys(values: list[float]) -> None:
    half_width, p = paired_t(values)
    told = stats.ttest_1samp(values, 0)
    low, high = told.confidence_interval(0.95)
    assert p == pytest.approx(told.pvalue, rel=1e-6, abs=1e-12)
    assert half_width == pytest.approx((high - low) / 2, rel=1e-6)


def test_differences_without_spread_are_no_certainty() -> None:
    assert paired_t([1.0, 1.0, 1.0]) == (0.0, 0.25)  # three signs that agree: two of eight ways
    assert paired_t([0.0, 0.0]) == (0.0, 1.0)
    assert all(np.isnan(value) for value in paired_t([3.0]))


def test_holm_by_hand() -> None:
    # 0.01 x 4, 0.02 x 3, 0.03 x 2 = 0.06 as before, 0.04 x 1 raised to 0.06.
    assert holm([0.02, 0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.06, 0.04, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_lies_between_nothing_and_bonferroni_and_keeps_the_order(p: list[float]) -> None:
    corrected = holm(p)
    for one, two in zip(p, corrected, strict=True):
        assert one <= two <= min(1.0, len(p) * one) + 1e-12
    order = np.argsort(p, kind="stable")
    assert list(np.array(corrected)[order]) == sorted(corrected)


def test_a_false_real_is_rare() -> None:
    """Four methods that do not differ, three seeds, common luck of a seed: 5 % of comparisons may
    name something real.
    """
    draw, false = np.random.default_rng(0), 0
    for _ in range(400):
        noise = draw.normal(0, 1, (4, 3)) + draw.normal(0, 10, 3)
        found = differences(runs(**{f"m{i}": list(noise[i]) for i in range(4)}))
        false += any(pair.verdict == "real" for pair in found.pairs)
    assert false <= 400 * 0.05 + 3 * (400 * 0.05 * 0.95) ** 0.5


def test_the_luck_of_a_seed_cancels() -> None:
    found = differences(runs(good=[90.0, 50.0, 70.0], bad=[80.1, 40.0, 59.9]))
    (pair,) = found.pairs
    assert (pair.first, pair.second, pair.verdict) == ("good", "bad", "real")
    assert pair.difference == pytest.approx(10.0)
    assert found.in_words[1].startswith("good is better than bad, by 10.00 ± 0.25 points")


def verdicts(pairs: tuple[Pair, ...]) -> dict[tuple[str, str], str]:
    return {(pair.first, pair.second): pair.verdict for pair in pairs}


def test_all_pairs_the_better_one_first_and_the_words_for_those_of_the_best() -> None:
    found = differences(
        runs(
            fedavg=[60.0, 62.0, 61.0],
            clade=[90.0, 92.1, 91.0],
            cfl=[90.2, 92.0, 90.6],
            copy=[90.0, 92.1, 91.0],
        )
    )
    assert found.best == "clade"
    assert len(found.pairs) == 6
    told = verdicts(found.pairs)
    assert told["clade", "copy"] == "the same"
    assert told["clade", "cfl"] == told["copy", "cfl"] == "not shown"
    assert told["clade", "fedavg"] == told["cfl", "fedavg"] == "real"
    heading, *lines, last = found.in_words
    assert (
        heading == "Which differences are real, over 3 seeds (paired by seed, ± is a 95 % interval,"
        " corrected for 6 pairs):"
    )
    assert lines == [
        "clade and copy have the same accuracy in every seed.",
        "clade and cfl: no difference shown, 0.10 ± 0.75 points.",
        "clade is better than fedavg, by 30.03 ± 0.14 points.",
    ]
    assert last == "With 5 seeds ± would be 50% as wide, for the same spread."


def test_what_counts_alone_and_not_among_many_is_uncertain() -> None:
    draw = np.random.default_rng(1)
    others = {f"m{i}": list(50 + draw.normal(0, 1, 3)) for i in range(5)}
    found = differences(runs(best=[55.0, 55.0, 55.0], second=[54.0, 53.8, 54.25], **others))
    pair = next(pair for pair in found.pairs if (pair.first, pair.second) == ("best", "second"))
    assert pair.p is not None
    assert pair.p_holm is not None
    assert pair.p < 0.05 < pair.p_holm
    assert pair.verdict == "uncertain"
    assert any(
        "best and second: uncertain" in line and "among 21 pairs" in line for line in found.in_words
    )


def test_one_seed_cannot_tell_and_the_clients_are_a_hint() -> None:
    clients: dict[str, list[list[float | None]]] = {
        "a": [[90.0, 80.0, 70.0, 60.0, None]],
        "b": [[80.0, 80.0, 60.0, 65.0, 50.0]],
    }
    found = differences(runs(clients=clients, a=[75.0], b=[71.25]))
    (pair,) = found.pairs
    assert (pair.verdict, pair.p, pair.p_holm, pair.half_width) == ("one seed", None, None, None)
    assert (pair.gain, pair.lose) == (0.5, 0.25)
    (line,) = found.in_words
    assert line.startswith(
        "One seed cannot tell which differences are real; five can (compare --seeds 5"
    )
    assert line.endswith("a leads b by 3.75 points (50% of the clients gain, 25% lose).")


def test_clients_count_over_all_seeds() -> None:
    clients: dict[str, list[list[float | None]]] = {
        "a": [[1.0, 2.0], [3.0, 4.0]],
        "b": [[0.0, 3.0], [2.0, 3.0]],
    }
    (pair,) = differences(runs(clients=clients, a=[1.5, 3.5], b=[1.5, 2.5])).pairs
    assert (pair.gain, pair.lose) == (0.75, 0.25)


def test_less_loss_is_better() -> None:
    clients: dict[str, list[list[float | None]]] = {
        "high": [[0.9, 0.8]] * 2,
        "low": [[0.4, 0.9]] * 2,
    }
    found = differences(runs("loss", clients, high=[0.8, 0.9], low=[0.5, 0.61]))
    assert (found.measure, found.best) == ("loss", "low")
    (pair,) = found.pairs
    assert pair.difference == pytest.approx(-0.295)
    assert (pair.gain, pair.lose) == (0.5, 0.5)
    assert "0.2950 ± 0.0635 in loss" in found.in_words[1]


def test_other_clients_are_not_paired_by_client_and_told_of() -> None:
    columns = {"accuracy": [50.0, 60.0]}
    found = differences(
        [
            Measured(name, seed, name, {"accuracy": 50.0 + seed}, columns)
            for name in "ab"
            for seed in (0, 1)
        ]
    )
    assert found.pairs[0].gain is None
    assert (
        found.in_words[-1]
        == "The runs are on different clients: a difference is as much one of the data."
    )


def test_without_test_data_there_is_nothing_to_compare() -> None:
    found = differences(
        [Measured(name, 0, "same", {"accuracy": None, "loss": None}, {}) for name in "ab"]
    )
    assert (found.measure, found.pairs) == (None, ())
    assert found.in_words == ("Nothing to compare: not every run has clients with test data.",)


def test_one_method_alone_has_no_differences_and_all_is_json() -> None:
    alone = differences(runs(only=[1.0, 2.0]))
    assert (alone.pairs, alone.in_words) == ((), ())
    said: dict[str, Any] = json.loads(
        json.dumps(differences(runs(a=[1.0, 2.0], b=[0.5, 2.5])).to_json(), allow_nan=False)
    )
    assert said["level"] == 0.95
    assert said["seeds"] == [0, 1]
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
    } == said["pairs"][0].keys()
