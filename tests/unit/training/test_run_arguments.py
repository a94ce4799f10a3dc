"""The arguments of `fc.run`: objects and their short forms, one client a round, and the log."""

from __future__ import annotations

import inspect
import logging
import warnings
from dataclasses import fields
from typing import Any

import pytest
import torch

import fedclade as fc
from fedclade.data import Clients
from fedclade.training.config import EngineConfig

MODEL = fc.models.MLP(4)


def weights(result: fc.Result) -> list[torch.Tensor]:
    return [weight for client in range(3) for weight in result.model_of(client).parameters()]


def test_all_arguments_after_the_model_are_keywords() -> None:
    parameters = inspect.signature(fc.run).parameters.values()
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == ["method", "clients", "model"]


def test_every_argument_is_documented_and_every_setting_has_a_short_form() -> None:
    document = inspect.getdoc(fc.run) or ""
    arguments = set(inspect.signature(fc.run).parameters)
    assert [name for name in arguments if f"\n    {name}: " not in document] == []
    only_in_files = {"shards", "client_state"}  # for several simulators and their disks
    for settings in (fc.LocalConfig, fc.TrainingConfig, EngineConfig):
        assert {field.name for field in fields(settings)} - only_in_files <= arguments


@pytest.mark.parametrize("settings", [fc.LocalConfig(), fc.TrainingConfig()])
def test_the_documented_defaults_are_those_of_the_objects(
    settings: fc.LocalConfig | fc.TrainingConfig,
) -> None:
    lines = " ".join((inspect.getdoc(fc.run) or "").split())
    for field in fields(settings):
        _, text = lines.split(f" {field.name}: ", 1)
        default = text.split(" by default", 1)[0].rsplit(" ", 1)[1]
        value = getattr(settings, field.name)
        expected = "none" if value == () else f"{value}".removesuffix(".0")
        assert default.removesuffix(".0") == expected, field.name


def test_objects_and_short_forms_give_the_same_run(digits: Clients) -> None:
    local = fc.LocalConfig(lr=0.05, batch_size=5, momentum=0.5)
    training = fc.TrainingConfig(rounds=2, clients_per_round=0.3, seed=3)
    by_objects = fc.run(fc.FedAvg(), digits, MODEL, local=local, training=training)
    by_short_forms = fc.run(
        fc.FedAvg(),
        digits,
        MODEL,
        lr=0.05,
        batch_size=5,
        momentum=0.5,
        rounds=2,
        clients_per_round=0.3,
        seed=3,
    )
    assert by_objects.summary["accuracy"] == by_short_forms.summary["accuracy"]
    assert all(map(torch.equal, weights(by_objects), weights(by_short_forms)))


def test_a_short_form_replaces_one_field_of_the_object(digits: Clients) -> None:
    training = fc.TrainingConfig(rounds=5, seed=3)
    result = fc.run(fc.FedAvg(), digits, MODEL, training=training, rounds=1, eval_every=0)
    assert len(result.history) == 1
    expected = fc.run(fc.FedAvg(), digits, MODEL, rounds=1, seed=3)
    assert all(map(torch.equal, weights(result), weights(expected)))


@pytest.mark.parametrize(
    ("argument", "value"),
    [("local", {"lr": 0.1}), ("local", fc.TrainingConfig()), ("training", fc.LocalConfig())],
)
def test_an_object_of_the_wrong_kind_is_refused(
    argument: str, value: object, digits: Clients
) -> None:
    settings: dict[str, Any] = {argument: value}
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == argument):
        fc.run(fc.FedAvg(), digits, MODEL, **settings)


def test_one_client_a_round_is_done_with_a_warning(digits: Clients) -> None:
    with pytest.warns(fc.FedcladeWarning) as caught:
        result = fc.run(fc.FedAvg(), digits, MODEL, rounds=2, clients_per_round=1)
    assert [warning.message.field for warning in caught] == ["run.clients_per_round"]  # type: ignore[union-attr]
    assert caught[0].filename == __file__
    assert [row["clients"] for row in result.history] == [1, 1]


@pytest.mark.parametrize("clients_per_round", [1.0, 2, 0.01])
def test_other_cohorts_give_no_warning(clients_per_round: float, digits: Clients) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fc.run(fc.FedAvg(), digits, MODEL, rounds=1, clients_per_round=clients_per_round)


def test_the_log_has_the_start_and_each_round_and_nothing_is_printed(
    digits: Clients, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG, logger="fedclade"):
        fc.run(fc.FedAvg(), digits, MODEL, rounds=3, eval_every=2)
    assert {record.name for record in caplog.records} == {"fedclade"}
    start, *rounds = caplog.records
    assert start.levelno == logging.INFO
    assert [record.levelname for record in rounds] == ["DEBUG", "INFO", "INFO"]
    assert "accuracy" in rounds[1].getMessage()
    assert capfd.readouterr() == ("", "")


def test_without_a_handler_the_log_is_silent(
    digits: Clients, capfd: pytest.CaptureFixture[str]
) -> None:
    fc.run(fc.FedAvg(), digits, MODEL, rounds=1)
    assert capfd.readouterr() == ("", "")
