"""The cost of a round: the difference of counters, and each failure once."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from fedclade.core.federation import Failure
from fedclade.engines.base import Traffic
from fedclade.training.round_costs import Counters


def federation(up: int, down: int, failures: list[Failure]) -> Any:
    def pop_failures() -> list[Failure]:
        popped = failures.copy()
        failures.clear()
        return popped

    return SimpleNamespace(traffic=Traffic(up, down), pop_failures=pop_failures)


def test_a_round_counts_the_bytes_since_its_start() -> None:
    fed = federation(100, 1000, [])
    counters = Counters(fed)
    fed.traffic.up += 7
    fed.traffic.down += 11
    assert counters.row(fed) == {"failures": [], "bytes_up": 7, "bytes_down": 11}


def test_the_first_round_includes_the_bytes_before_it() -> None:
    row = Counters(federation(100, 1000, []), begin=time.perf_counter()).row(
        federation(100, 1000, [])
    )
    assert (row["bytes_up"], row["bytes_down"]) == (100, 1000)


def test_a_failure_is_listed_once() -> None:
    fed = federation(0, 0, [Failure(3, "no answer in time")])
    counters = Counters(fed)
    (failure,) = counters.row(fed)["failures"]
    assert (failure["client"], failure["reason"]) == (3, "no answer in time")
    assert counters.row(fed)["failures"] == []


def test_seconds_count_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters(federation(0, 0, []), begin=10.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 12.345678)
    assert counters.seconds() == 2.3457
