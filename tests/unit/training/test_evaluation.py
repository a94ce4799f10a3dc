"""Evaluations of a sample of the clients, and runs whose personal models are too large to store."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedclade as fc
from fedclade.core.rng import fold_in
from fedclade.data import Clients
from fedclade.errors import FedcladeWarning, InvalidInputError
from fedclade.io.schemas import RoundRecord
from fedclade.training import evaluation
from fedclade.training.client_sampling import cohort_of


def run(clients: Clients, method: fc.Method | None = None, **settings: Any) -> fc.Result:
    defaults: dict[str, Any] = {"rounds": 3, "eval_every": 1, "lr": 0.1, "device": "cpu"}
    return fc.run(method or fc.FedAvg(), clients, fc.models.MLP(8), **{**defaults, **settings})


def test_a_sample_is_evaluated_until_the_last_round_and_then_all(small_digits: Clients) -> None:
    whole, sampled = run(small_digits), run(small_digits, eval_clients=4)
    early = run(small_digits, rounds=1)
    chosen = cohort_of(fold_in(0, "evaluated"), len(small_digits), 4)
    accuracy = torch.tensor(early.clients["accuracy"], dtype=torch.float64)
    assert sampled.history[0]["accuracy"] == pytest.approx(float(accuracy[chosen].mean()))
    assert sampled.history[0]["accuracy"] != whole.history[0]["accuracy"]
    assert sampled.clients["accuracy"] == whole.clients["accuracy"]
    assert sampled.summary["accuracy"] == whole.summary["accuracy"]
    few, all_clients = sampled.history[0]["accuracy_stderr"], whole.history[0]["accuracy_stderr"]
    assert few > all_clients  # type: ignore[operator]


def test_a_share_is_a_sample_too_and_one_is_all(small_digits: Clients) -> None:
    chosen = cohort_of(fold_in(0, "evaluated"), len(small_digits), 5)
    share = run(small_digits, eval_clients=5 / len(small_digits))
    number = run(small_digits, eval_clients=len(chosen))
    assert share.history[0]["accuracy"] == number.history[0]["accuracy"]
    assert (
        run(small_digits, eval_clients=1.0).history[0]["accuracy"] != share.history[0]["accuracy"]
    )


def test_a_run_that_stops_early_ends_with_an_evaluation_of_all(small_digits: Clients) -> None:
    def stop(row: RoundRecord) -> bool:
        return row["round"] == 1

    stopped = run(small_digits, eval_clients=4, on_round=stop)
    assert stopped.clients["accuracy"] == run(small_digits, rounds=1).clients["accuracy"]


@pytest.mark.parametrize("wrong", [0, 1.5, 10**6])
def test_a_sample_must_be_of_the_clients(wrong: float, small_digits: Clients) -> None:
    with pytest.raises(InvalidInputError) as caught:
        run(small_digits, eval_clients=wrong)
    assert caught.value.field == "run.eval_clients"


@pytest.mark.parametrize("layer", ["none", "finetune"])
def test_personal_models_that_are_too_large_are_evaluated_and_not_stored(
    layer: Any, small_digits: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"method": fc.Local(), "personal": fc.PersonalConfig(layer=layer, epochs=1)}
    expected = run(small_digits, rounds=1, **settings)
    monkeypatch.setattr(evaluation, "MOST_PERSONAL_BYTES", 1000)
    with pytest.warns(FedcladeWarning, match="not stored"):
        result = run(small_digits, rounds=1, **settings)
    assert result.clients["accuracy"] == expected.clients["accuracy"]
    with pytest.raises(InvalidInputError, match="too large"):
        result.model_of(0)
