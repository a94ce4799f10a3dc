"""Callbacks after each round, and their order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

import fedclade as fc
from fedclade.data import Clients
from fedclade.integrations.tensorboard import Tracker
from fedclade.io.schemas import RoundRecord
from fedclade.training.callbacks import Callback, CallFunction
from fedclade.training.graceful_interrupt import Interrupt
from fedclade.training.loop import Progress
from fedclade.training.progress_display import display


def test_files_are_written_before_the_users_function_is_called(
    digits: Clients, tmp_path: Path
) -> None:
    observed: list[tuple[int, int, int]] = []

    def look(row: RoundRecord) -> None:
        lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
        checkpoints = list((tmp_path / "checkpoint").glob("round-*.safetensors"))
        assert json.loads(lines[-1]) == row
        observed.append((row["round"], len(lines), len(checkpoints)))

    fc.run(
        fc.FedAvg(),
        digits,
        fc.models.MLP(8),
        rounds=4,
        checkpoint_every=2,
        device="cpu",
        out=tmp_path,
        on_round=look,
    )
    assert observed == [(1, 1, 0), (2, 2, 1), (3, 3, 1), (4, 4, 2)]


def test_an_interrupt_takes_effect_after_the_current_round() -> None:
    interrupt = Interrupt()
    row: Any = {"round": 1}
    interrupt.after_round(row)
    interrupt.requested = True
    with pytest.raises(KeyboardInterrupt):
        interrupt.after_round(row)


def test_progress_tensorboard_and_functions_are_callbacks(tmp_path: Path) -> None:
    from rich.console import Console

    callbacks: list[Callback] = [
        CallFunction(lambda row: None, cast(Progress, None)),
        Interrupt(),
        Tracker(tmp_path),
        display("fedavg", 3, Console(), quiet=True),
    ]
    assert all(callable(callback.after_round) for callback in callbacks)
