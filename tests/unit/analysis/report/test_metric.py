"""The report's numbers: the worst tenth, significant digits, an even selection."""

from __future__ import annotations

import math

import pytest

from fedclade.analysis.report.metric import ACCURACY, METRICS, evenly, mean, short

PERPLEXITY = METRICS[1]


def test_the_worst_tenth_is_at_the_low_end_of_accuracy_and_the_high_end_of_perplexity() -> None:
    values = [float(value) for value in range(20)]
    assert ACCURACY.worst_tenth(values) == 0.5
    assert PERPLEXITY.worst_tenth(values) == 18.5


@pytest.mark.parametrize(("clients", "counted"), [(1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_the_tenth_is_rounded_up(clients: int, counted: int) -> None:
    assert ACCURACY.worst_tenth([0.0] * counted + [1.0] * (clients - counted)) == 0
    assert ACCURACY.worst_tenth([0.0] * (counted - 1) + [1.0] * (clients - counted + 1)) != 0


def test_clients_that_were_not_evaluated_do_not_count() -> None:
    assert ACCURACY.worst_tenth([None, 3.0, None, 4.0]) == 3.0
    assert ACCURACY.worst_tenth([None]) is None


def test_a_value_has_the_unit_of_its_metric() -> None:
    assert ACCURACY.text(87.654) == "87.7 %"
    assert PERPLEXITY.text(12.345) == "12.3"


def test_mean_of_nothing_is_unknown() -> None:
    assert mean([]) is None
    assert mean([0.1] * 10) == 0.1  # no error adds up


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.23456789, 1.2346),
        (123456.7, 123460),
        (-0.000123456, -0.00012346),
        (2.0, 2),
        (math.nan, None),
        (math.inf, None),
        (123456789, 123456789),  # a whole number is kept
        (True, True),
        ("1.23456789", "1.23456789"),
        ((1.0, None), [1, None]),
        ({3: [0.1234567]}, {"3": [0.12346]}),
    ],
)
def test_short_rounds_only_floats(value: object, expected: object) -> None:
    rounded = short(value)
    assert rounded == expected
    assert type(rounded) is type(expected)


def test_short_keeps_the_given_number_of_digits() -> None:
    assert short(1.23456789, digits=3) == 1.23


@pytest.mark.parametrize(("number", "maximum"), [(0, 5), (5, 5), (6, 5), (100, 7), (7, 1)])
def test_evenly_selects_at_most_the_maximum(number: int, maximum: int) -> None:
    places = evenly(number, maximum)
    assert len(places) == min(number, maximum)
    assert len(set(places)) == len(places)
    assert all(0 <= place < number for place in places)
    gaps = [b - a for a, b in zip(places, [*places[1:], number], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1
