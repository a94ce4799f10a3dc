"""`local.lr = "auto"`: the choice, what it reads, and what a run keeps of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedclade as fc
from fedclade.analysis.cost_estimate import estimate_cost
from fedclade.analysis.diagnose import api
from fedclade.data.held_out import held_out
from fedclade.errors import DifferentExperimentError
from fedclade.io.run_dir import RunDirectory
from fedclade.training import lr_search
from fedclade.training.config import (
    EngineConfig,
    LearningRate,
    LocalConfig,
    PrivacyConfig,
    TrainingConfig,
)
from fedclade.training.lr_search import grid, search_lr
from fedclade.training.runner import TrainingRun


def run_of(
    clients: fc.data.Clients,
    lr: LearningRate = "auto",
    method: fc.Method | None = None,
    rounds: int = 12,
) -> TrainingRun:
    return TrainingRun(
        method or fc.FedAvg(),
        clients,
        fc.models.MLP(8),
        LocalConfig(lr),
        TrainingConfig(rounds, 0.5),
        EngineConfig(),
        "cpu",
    )


def test_the_value_with_the_highest_held_out_accuracy_is_chosen(
    small_digits: fc.data.Clients,
) -> None:
    search = search_lr(run_of(small_digits))
    assert [candidate["lr"] for candidate in search["candidates"]] == list(lr_search.SGD)
    assert search["rounds"] == lr_search.ROUNDS
    best = max(candidate["accuracy"] or 0.0 for candidate in search["candidates"])
    (chosen,) = (each for each in search["candidates"] if each["lr"] == search["lr"])
    assert chosen["accuracy"] == best
    # A learning rate of 0.003 has hardly left the initial model.
    assert search["lr"] > 0.01


def test_test_data_have_no_influence(small_digits: fc.data.Clients) -> None:
    expected = search_lr(run_of(small_digits))
    other = replace(
        small_digits,
        x_test=torch.rand_like(small_digits.x_test.float()),  # type: ignore[union-attr]
        y_test=small_digits.y_test.flip(0),
    )
    assert search_lr(run_of(other)) == expected


def test_held_out_samples_are_training_samples(small_digits: fc.data.Clients) -> None:
    parted = held_out(small_digits, 3)
    for client in range(len(small_digits)):
        train, test = parted.train[client].tolist(), parted.test[client].tolist()
        assert not set(train) & set(test)
        assert sorted(train + test) == sorted(small_digits.train[client].tolist())
        assert len(test) == round(0.2 * len(small_digits.train[client]))


def test_the_run_is_that_with_the_chosen_value_and_keeps_the_choice(
    small_digits: fc.data.Clients, tmp_path: Path
) -> None:
    result = run_of(small_digits).run(tmp_path / "auto")
    chosen = result.summary["chosen_lr"]
    plain = run_of(small_digits, chosen).run(tmp_path / "plain")
    assert "chosen_lr" not in plain.summary
    assert result.summary["accuracy"] == plain.summary["accuracy"]
    models = "models/models.safetensors"
    assert (tmp_path / "auto" / models).read_bytes() == (tmp_path / "plain" / models).read_bytes()
    saved = RunDirectory(tmp_path / "auto")
    assert saved.tables()["local"]["lr"] == chosen
    search = saved.lr_search()
    assert search is not None
    assert search["lr"] == chosen
    assert fc.load(tmp_path / "auto").summary["chosen_lr"] == chosen


def test_a_resumed_run_takes_the_saved_choice(
    small_digits: fc.data.Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_of(small_digits).run(tmp_path / "whole")
    run_of(small_digits, rounds=11).run(tmp_path / "parts")

    def never(run: TrainingRun) -> None:
        raise AssertionError("searched again")

    monkeypatch.setattr("fedclade.training.runner.search_lr", never)
    parts = run_of(small_digits).run(tmp_path / "parts", resume=True)
    models = "models/models.safetensors"
    assert (tmp_path / "parts" / models).read_bytes() == (tmp_path / "whole" / models).read_bytes()
    assert parts.summary["chosen_lr"] == whole.summary["chosen_lr"]
    # The saved choice belongs to this method.
    with pytest.raises(DifferentExperimentError, match=r"method\.name"):
        run_of(small_digits, method=fc.Local()).run(tmp_path / "parts", resume=True)
    (tmp_path / "parts" / "lr_search.json").write_text('{"lr": -1, "rounds": 1, "candidates": []}')
    with pytest.raises(fc.InvalidInputError, match=r"lr_search\.json"):
        run_of(small_digits, rounds=20).run(tmp_path / "parts", resume=True)


def test_the_loss_decides_where_there_is_no_accuracy() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(6, 30, 4, generator=draw)
    y = x.sum(2, keepdim=True)
    clients = fc.data.from_arrays(list(zip(x, y, x, y, strict=True)))
    run = replace(run_of(clients, rounds=3), local=LocalConfig("auto", loss="mse"))
    search = search_lr(run)
    losses = {each["lr"]: each["loss"] for each in search["candidates"] if each["loss"] is not None}
    assert all(each["accuracy"] is None for each in search["candidates"])
    assert losses[search["lr"]] == min(losses.values())
    assert search["rounds"] == 3


def test_values_that_diverge_are_not_chosen(
    small_digits: fc.data.Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lr_search, "SGD", (0.1, 1e30))
    search = search_lr(run_of(small_digits))
    assert search["lr"] == 0.1
    assert search["candidates"][1] == {"lr": 1e30, "accuracy": None, "loss": None}
    monkeypatch.setattr(lr_search, "SGD", (1e30,))
    with pytest.raises(fc.InvalidInputError, match="diverged") as caught:
        search_lr(run_of(small_digits))
    assert caught.value.field == "local.lr"


def test_grids_of_optimizers() -> None:
    assert grid(LocalConfig()) == lr_search.SGD
    assert grid(LocalConfig(momentum=0.9)) == lr_search.SGD_WITH_MOMENTUM
    assert grid(LocalConfig(optimizer="adamw")) == lr_search.ADAM


def test_schedules_and_validation_data_are_for_the_run_only(
    small_digits: fc.data.Clients,
) -> None:
    run = replace(
        run_of(small_digits.with_validation(0.1), rounds=2),
        local=LocalConfig("auto", schedule="cosine", warmup_rounds=1),
        settings=TrainingConfig(2, 0.5, eval_every=1, patience=1, select="best"),
    )
    assert run.run().summary["chosen_lr"] in lr_search.SGD


@pytest.mark.parametrize("value", ["fast", "AUTO", 0, -1.0, float("nan"), True, None])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(fc.InvalidInputError, match=r"local\.lr") as caught:
        LocalConfig(value)  # type: ignore[arg-type]
    assert "'auto'" in str(caught.value)


def test_only_the_simulator_can_search(small_digits: fc.data.Clients) -> None:
    simulator = fc.Simulator(small_digits)
    with pytest.raises(fc.InvalidInputError, match="simulator"):
        replace(run_of(small_digits), federation=simulator).run()
    with pytest.raises(fc.InvalidInputError, match="simulator"):
        LocalConfig("auto").lr_in_round(1, 2)


def test_a_private_run_needs_a_number(small_digits: fc.data.Clients) -> None:
    with pytest.raises(fc.InvalidInputError, match=r"privacy\.epsilon") as caught:
        replace(run_of(small_digits), privacy=PrivacyConfig(epsilon=8.0)).run()
    assert caught.value.field == "local.lr"


def test_fc_run_diagnose_and_a_dry_run_take_it(
    small_digits: fc.data.Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = fc.run(fc.FedAvg(), small_digits, fc.models.MLP(8), rounds=1, lr="auto")
    assert result.summary["chosen_lr"] in lr_search.SGD
    given = []
    monkeypatch.setattr(
        api, "run_pilots", lambda methods, clients, run, *_: given.append(run) or api.Pilots()
    )
    fc.diagnose(small_digits, fc.models.MLP(8), lr="auto", probe_rounds=2)
    assert given[0].local.lr in lr_search.SGD
    with_search, without = (
        estimate_cost(run_of(small_digits, lr, rounds=30)) for lr in ("auto", 0.1)
    )
    assert with_search.bytes_up == without.bytes_up


def test_the_file_of_the_choice_is_json(small_digits: fc.data.Clients, tmp_path: Path) -> None:
    run_of(small_digits, rounds=1).run(tmp_path / "run")
    content = json.loads((tmp_path / "run" / "lr_search.json").read_text())
    assert set(content) == {"lr", "rounds", "candidates"}
