"""A client whose replies are rejected several times is blocked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedclade as fc
from fedclade.core.pytree import Tree
from fedclade.data import Clients
from fedclade.errors import FedcladeError
from fedclade.training.client_sampling import blocked_clients, exclude_blocked
from fedclade.training.config import EngineConfig, LocalConfig, TrainingConfig
from fedclade.training.runner import TrainingRun


def row(number: int, *failures: tuple[int, bool]) -> dict[str, Any]:
    return {
        "round": number,
        "failures": [
            {"client": client, "reason": "why", "rejected": rejected}
            for client, rejected in failures
        ],
    }


def test_rejections_count_and_missing_replies_do_not() -> None:
    history = [
        row(1, (4, True), (2, False)),
        row(2, (4, True), (2, False)),
        row(3, (1, True), (2, False)),
        row(4, (4, True)),
    ]
    assert blocked_clients(history, 3).tolist() == [4]
    assert blocked_clients(history, 1).tolist() == [1, 4]
    assert blocked_clients(history, 0).tolist() == []
    assert exclude_blocked(torch.tensor([0, 1, 4, 5]), 6, history, 3).tolist() == [0, 1, 5]


def ill(client: int) -> Any:
    """Client `client` sends NaN, client 2 nothing."""

    def fault(key: int, sender: int, reply: Tree) -> Tree | None:
        if sender == client:
            return {name: value * torch.nan for name, value in reply.items()}
        return None if sender == 2 else reply

    return fault


def run(clients: Clients, faults: Any, rounds: int, **more: Any) -> fc.Result:
    fed = fc.Simulator(clients, faults=faults)
    settings = TrainingConfig(rounds, 1.0, eval_every=0, checkpoint_every=0, **more)
    return TrainingRun(
        fc.FedAvg(),
        clients,
        fc.models.MLP(4),
        LocalConfig(),
        settings,
        EngineConfig(),
        federation=fed,
    ).run()


def test_a_client_is_blocked_after_three_rejected_replies(digits: Clients) -> None:
    result = run(digits, ill(1), 5)
    everyone = len(digits)
    assert [row["clients"] for row in result.history] == [everyone] * 3 + [everyone - 1] * 2
    assert [[failure["client"] for failure in row["failures"]] for row in result.history] == [
        [1, 2]
    ] * 3 + [[2]] * 2
    assert result.summary["blocked_clients"] == 1
    assert run(digits, ill(1), 5, max_rejections=0).summary["failures"] == 10


def test_a_resumed_run_blocks_the_same_clients(digits: Clients, tmp_path: Path) -> None:
    def parts(rounds: int, folder: str, resume: bool = False) -> fc.Result:
        fed = fc.Simulator(digits, faults=ill(1))
        whole = TrainingRun(
            fc.FedAvg(),
            digits,
            fc.models.MLP(4),
            LocalConfig(),
            TrainingConfig(rounds, 1.0),
            EngineConfig(),
            federation=fed,
        )
        return whole.run(tmp_path / folder, resume)

    parts(4, "parts")
    resumed, whole = parts(6, "parts", resume=True), parts(6, "whole")
    assert [row["clients"] for row in resumed.history] == [row["clients"] for row in whole.history]


def test_a_run_stopped_after_its_last_round_resumes_to_the_same_summary(
    digits: Clients, tmp_path: Path
) -> None:
    """Client 1 is rejected for the third time in the last round, and sends valid replies in the
    evaluation, which then gives it a model.
    """

    def settle(folder: str, stop: bool) -> dict[str, Any]:
        replies = 0

        def fault(key: int, sender: int, reply: Tree) -> Tree | None:
            nonlocal replies
            replies += sender == 1
            return (
                {name: value * torch.nan for name, value in reply.items()}
                if sender == 1 and replies <= 3
                else reply
            )

        def last(row: dict[str, Any]) -> None:
            if row["round"] == 2:
                raise ZeroDivisionError

        def execute(resume: bool, on_round: Any) -> dict[str, Any]:
            fed, settings = fc.Simulator(digits, faults=fault), TrainingConfig(2, 1.0, eval_every=0)
            whole = TrainingRun(
                fc.Clade(),
                digits,
                fc.models.MLP(4),
                LocalConfig(),
                settings,
                EngineConfig(),
                federation=fed,
            )
            return whole.run(tmp_path / folder, resume, on_round).summary

        if stop:
            with pytest.raises(ZeroDivisionError):
                execute(False, last)
        return {name: value for name, value in execute(stop, None).items() if name != "seconds"}

    expected = settle("whole", stop=False)
    assert expected["blocked_clients"] == 1
    assert expected["clients_without_model"] == 0
    assert settle("parts", stop=True) == expected


def test_if_every_client_is_blocked_the_run_ends_with_the_reason(digits: Clients) -> None:
    with pytest.raises(FedcladeError, match=r"round 3\b.*\b3 times.*finite.*local\.lr") as caught:
        fc.run(fc.FedAvg(), digits, fc.models.MLP(4), rounds=5, clients_per_round=1.0, lr=1e38)
    assert caught.value.field == "run.max_rejections"


def test_the_setting_is_checked() -> None:
    with pytest.raises(
        fc.InvalidInputError, match="-1", check=lambda error: error.field == "run.max_rejections"
    ):
        replace(TrainingConfig(), max_rejections=-1)
