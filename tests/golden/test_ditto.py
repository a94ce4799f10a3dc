"""Ditto of examples/ditto.py on the three clients of conftest.py, by hand.

λ = 0.5, lr = 0.1, a full-batch step in each round. Round 1 starts from w = v = 0, so there is no
pull: v = 0.4, 0.8, 1.2 and the global model is g = (0.4 + 2 · 0.8 + 3 · 1.2) / 6 = 14 / 15.
Round 2:
client 0: w = g + 0.2 (2 - g) = 1.1467; v = 0.4 - 0.1 (2 (0.4 - 2) + 0.5 (0.4 - g)) = 0.7467
client 1: w = g + 0.2 (4 - g) = 1.5467; v = 0.8 - 0.1 (2 (0.8 - 4) + 0.5 (0.8 - g)) = 1.4467
client 2: w = g + 0.4 (3 - 2 g) = 1.3867; v = 1.2 - 0.1 (4 (2.4 - 3) + 0.5 (1.2 - g)) = 1.4267
so that the global model is (1.1467 + 2 · 1.5467 + 3 · 1.3867) / 6 = 1.4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fedclade as fc
from fedclade.conformance import MethodUnderTest
from fedclade.conformance.method_run import ENGINES, EngineName
from fedclade.core import State
from fedclade.registry import import_file

FILE = Path(__file__).resolve().parents[2] / "examples" / "ditto.py"


@pytest.fixture
def ditto() -> Any:
    return import_file(str(FILE)).Ditto


def global_model(state: State) -> float:
    return float(state.models["0.weight"].flatten()[0])


def test_two_rounds_by_hand(case: Any, ditto: Any) -> None:
    run = case(ditto(lam=0.5))
    assert global_model(run.round(0, 1, 2)) == pytest.approx(14 / 15, abs=1e-6)
    assert run.served() == pytest.approx([0.4, 0.8, 1.2], abs=1e-6)
    assert global_model(run.round(0, 1, 2)) == pytest.approx(1.4, abs=1e-6)
    assert run.served() == pytest.approx([0.74666667, 1.44666667, 1.42666667], abs=1e-6)


def test_an_absent_client_keeps_its_personal_model(case: Any, ditto: Any) -> None:
    run = case(ditto(lam=0.5))
    run.round(0, 1, 2)
    run.absent = {1}
    run.round(0, 1, 2)
    assert run.served() == pytest.approx([0.74666667, 0.8, 1.42666667], abs=1e-6)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_global_model_is_that_of_fedavg(case: Any, ditto: Any, momentum: float) -> None:
    runs = [case(method, epochs=3, momentum=momentum) for method in (ditto(), fc.FedAvg())]
    for _ in range(2):
        first, second = (run.round(0, 1, 2) for run in runs)
        assert torch.equal(first.models["0.weight"], second.models["0.weight"])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_without_the_pull_a_client_trains_alone(case: Any, ditto: Any, momentum: float) -> None:
    personal, alone = (
        case(method, epochs=3, momentum=momentum) for method in (ditto(lam=0.0), fc.Local())
    )
    for _ in range(2):
        personal.round(0, 1, 2)
        alone.round(0, 1, 2)
    assert personal.served() == pytest.approx(alone.served(), abs=1e-6)


def test_a_negative_pull_is_refused(ditto: Any) -> None:
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == "method.lam"):
        ditto(lam=-1.0)


def test_it_passes_every_check(ditto: Any) -> None:
    fc.check_method(ditto)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_client_has_its_own_model(ditto: Any, engine: EngineName) -> None:
    served = MethodUnderTest(ditto(), engine).plain_run().served
    models = torch.cat([value.flatten(1) for value in served.values()], 1)
    assert len(torch.unique(models, dim=0)) == len(models)
