"""TensorBoard's event files, read back."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedclade.cli import main
from fedclade.errors import InvalidInputError
from fedclade.integrations.tensorboard import tag
from fedclade.integrations.trackers import check_tracker

installed = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None,
    reason="tensorboard is not installed (extra: track)",
)
RUN = ["run", "quickstart", "--set", "run.eval_every=2", "--no-report", "-q"]


def call(*arguments: str) -> None:
    done = CliRunner().invoke(main.app, [*RUN, *arguments])
    if done.exception is not None:
        raise done.exception


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag, step and value, as TensorBoard shows them. A step that it would show twice is a
    failure.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder))
    events.Reload()
    tags = {}
    for name in events.Tags()["scalars"]:
        steps = [(event.step, event.value) for event in events.Scalars(name)]
        tags[name] = dict(steps)
        assert len(tags[name]) == len(steps), name
    return tags


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def check_all(folder: Path, rounds: int) -> None:
    tags, written = scalars(folder), rows(folder)
    assert [row["round"] for row in written] == list(range(1, rounds + 1))
    for name in ("clusters", "bytes_up", "bytes_down", "seconds"):
        assert tags[tag(name)] == {row["round"]: pytest.approx(row[name]) for row in written}
    for name in ("accuracy", "accuracy_worst10", "loss", "train_loss"):
        expected = {row["round"]: pytest.approx(row[name]) for row in written if name in row}
        assert tags[tag(name)] == expected
        assert expected
    assert tags["accuracy by group/group 0"] == tags["accuracy/test"]  # FedAvg has one group
    groups = {"accuracy", "loss", "groups", "traffic", "time", "accuracy by group"}
    assert {name.partition("/")[0] for name in tags} == groups


def test_tags_are_in_groups() -> None:
    names = ("accuracy", "accuracy_worst10", "train_accuracy_variance", "validation_loss")
    assert [tag(name) for name in names] == [
        "accuracy/test",
        "accuracy/worst10",
        "accuracy/train_variance",
        "loss/validation",
    ]
    assert [tag(name) for name in ("bytes_up", "seconds", "clusters", "f1")] == [
        "traffic/bytes_up",
        "time/seconds",
        "groups/clusters",
        "metrics/f1",
    ]


@installed
def test_a_run_has_the_name_of_its_folder(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    call("--set", "run.rounds=1", "--track", "tensorboard", "--out", str(tmp_path / "tracked"))
    shown: Any = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    assert list(shown.Runs()) == ["tracked"]


@installed
def test_every_round_is_written_with_its_number(tmp_path: Path) -> None:
    call("--set", "run.rounds=4", "--track", "tensorboard", "--out", str(tmp_path))
    check_all(tmp_path, 4)


@installed
def test_a_resumed_run_has_each_round_once_including_untracked_ones(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    call("--set", "run.rounds=2", "--track", "tensorboard", "--out", str(first))
    call("--set", "run.rounds=4", "--track", "tensorboard", "--out", str(first), "--resume")
    check_all(first, 4)
    call("--set", "run.rounds=2", "--out", str(second))
    assert not list(second.glob("events.*"))
    call("--set", "run.rounds=4", "--track", "tensorboard", "--out", str(second), "--resume")
    check_all(second, 4)


@installed
def test_tracking_does_not_change_models_and_a_sweep_tracks_each_run(tmp_path: Path) -> None:
    call(
        "--set",
        "run.rounds=2",
        "--set",
        "local.lr=0.1,0.2",
        "--track",
        "tensorboard",
        "--out",
        str(tmp_path / "sweep"),
    )
    call("--set", "run.rounds=2", "--out", str(tmp_path / "plain"))
    tracked = tmp_path / "sweep" / "fedavg-lr=0.1-seed0"
    check_all(tracked, 2)
    check_all(tmp_path / "sweep" / "fedavg-lr=0.2-seed0", 2)
    name = "models/models.safetensors"
    assert (tracked / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_an_unusable_tracker_is_rejected_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInputError, match=r"wandb.*tensorboard or mlflow") as caught:
        call("--track", "wandb", "--out", str(tmp_path / "run"))
    assert caught.value.field == "--track"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidInputError, match=r"pip install 'fedclade\[track\]'") as caught:
        check_tracker("tensorboard")
    assert caught.value.field == "--track"
    with pytest.raises(InvalidInputError, match=r"pip install 'fedclade\[mlflow\]'") as caught:
        check_tracker("mlflow")
    assert caught.value.field == "--track"
    assert not (tmp_path / "run").exists()
