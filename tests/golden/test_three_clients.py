"""FedAvg and Local on the three clients of conftest.py."""

from __future__ import annotations

from typing import Any

import pytest

from fedclade import FedAvg, Local


def test_fedavg_weighs_clients_by_their_examples(case: Any) -> None:
    run = case(FedAvg())
    run.round(0, 1, 2)
    # (1 * 0.4 + 2 * 0.8 + 3 * 1.2) / 6
    assert run.served() == pytest.approx([5.6 / 6] * 3, abs=1e-7)


def test_fedavg_second_round_starts_from_the_mean(case: Any) -> None:
    run = case(FedAvg())
    run.round(0, 1, 2)
    w = 5.6 / 6
    run.round(0, 2)
    first, third = w - 0.2 * (w - 2), w - 0.4 * (2 * w - 3)
    assert run.served() == pytest.approx([(first + 3 * third) / 4] * 3, abs=1e-6)


def test_fedavg_ignores_absent_clients(case: Any) -> None:
    run = case(FedAvg(), absent=[2])
    run.round(0, 1, 2)
    assert run.served() == pytest.approx([(0.4 + 2 * 0.8) / 3] * 3, abs=1e-7)


def test_fedavg_keeps_its_model_in_a_round_without_replies(case: Any) -> None:
    run = case(FedAvg())
    run.round(0, 1, 2)
    before = run.served()
    run.absent = {0, 1, 2}
    run.round(0, 1, 2)
    assert run.served() == before


def test_fedavg_with_momentum_and_two_epochs(case: Any) -> None:
    run = case(FedAvg(), epochs=2, momentum=0.5)
    run.round(0)
    # g1 = -4: v = -4, w = 0.4; g2 = 2 (0.4 - 2) = -3.2: v = -5.2, w = 0.92
    assert run.served() == pytest.approx([0.92] * 3, abs=1e-6)


def test_fedavg_with_weight_decay(case: Any) -> None:
    run = case(FedAvg(), epochs=2, weight_decay=0.5)
    run.round(0)
    # w = 0.4; then g = 2 (0.4 - 2) + 0.5 * 0.4 = -3.0, w = 0.7
    assert run.served() == pytest.approx([0.7] * 3, abs=1e-6)


def test_local_trains_each_client_alone(case: Any) -> None:
    run = case(Local())
    run.round(0, 1, 2)
    assert run.served() == pytest.approx([0.4, 0.8, 1.2], abs=1e-7)


def test_local_continues_from_the_clients_own_model(case: Any) -> None:
    run = case(Local())
    run.round(0, 1, 2)
    run.round(1)
    # 0.8 - 0.2 (0.8 - 4)
    assert run.served() == pytest.approx([0.4, 1.44, 1.2], abs=1e-6)


def test_local_sends_nothing(case: Any) -> None:
    run = case(Local())
    run.round(0, 1, 2)
    assert (run.fed.traffic.up, run.fed.traffic.down) == (0, 0)


def test_fedavg_sends_one_model_each_way(case: Any) -> None:
    run = case(FedAvg())
    run.round(0, 2)
    assert (run.fed.traffic.up, run.fed.traffic.down) == (2 * 4, 2 * 4)
