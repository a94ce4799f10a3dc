"""The profile of a run: the time of each phase, only on request."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedclade import Clade, FedAvg, run
from fedclade.cli.main import app
from fedclade.data import Clients
from fedclade.models import MLP


@pytest.mark.parametrize("workers", [1, 2])
def test_the_phases_of_a_run(digits: Clients, workers: int, tmp_path: Path) -> None:
    result = run(
        FedAvg(),
        digits,
        MLP(8),
        rounds=4,
        clients_per_round=1.0,
        eval_every=2,
        device="cpu",
        chunk=5,
        threads=workers,
        profile=True,
        out=tmp_path / "run",
    )
    profile = result.profile
    assert profile is not None
    seconds = {line.phase: line.seconds for line in profile.lines}
    assert list(seconds) == [
        "clients",
        "models",
        "plan",
        "steps",
        "subtotals",
        "replies",
        "sums",
        "server",
        "evaluation",
        "saving",
    ]
    assert all(value > 0 for value in seconds.values())
    assert (
        seconds["models"] + seconds["plan"] + seconds["steps"]
        <= workers * seconds["clients"] + seconds["replies"] + seconds["sums"]
    )
    whole = sum(line.seconds for line in profile.lines if not line.within)
    # The last save comes after the last row of the history.
    assert whole <= sum(row["seconds"] for row in result.history) + 0.5
    assert profile.rounds == 4
    assert profile.padded == 0.0
    assert profile.asked > 0
    assert ("sums over" in str(profile).lower()) == (workers > 1)


def test_work_before_and_after_the_rounds_is_not_taken_from_the_server(digits: Clients) -> None:
    """Clade's clients work before the first round, and the best round is evaluated again."""
    result = run(
        Clade(),
        digits.with_validation(0.2),
        MLP(8),
        rounds=3,
        eval_every=1,
        server_optimizer="fedadam",
        server_lr=1.0,  # far too large, so that the first round is the best
        select="best",
        device="cpu",
        profile=True,
    )
    assert result.summary["selected_round"] < 3
    assert result.profile is not None
    assert all(line.seconds >= 0 for line in result.profile.lines)


def test_without_profile_nothing_is_timed(digits: Clients) -> None:
    assert run(FedAvg(), digits, MLP(8), rounds=1, device="cpu").profile is None


def test_the_command_line_shows_the_profile(tmp_path: Path) -> None:
    command = [
        "run",
        "quickstart",
        "--profile",
        "--set",
        "run.rounds=2",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "run"),
    ]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"phase +seconds +ms/round +share", shown.output)
    assert re.search(r"\n  steps +\d", shown.output)
    assert re.search(r"client steps, plus \d+\.\d% padding", shown.output)
