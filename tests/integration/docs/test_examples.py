"""The examples run as a user would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("quickstart", "client 7 predicts"),
        ("own_data", "mean absolute error"),
        ("own_things", "--import"),
    ],
)
def test_example_runs(name: str, says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )
    assert says in done.stdout
    assert done.stderr == ""


def test_own_things_can_be_named_on_the_command_line(tmp_path: Path) -> None:
    names = [
        "data.name=moons",
        "partition.name=halves",
        "model.name=tiny",
        "method.name=even",
        "run.rounds=2",
    ]
    sets = [word for name in names for word in ("--set", name)]
    command = [
        sys.executable,
        "-m",
        "fedclade",
        "run",
        "quickstart",
        "--import",
        EXAMPLES / "own_things.py",
        *sets,
        "--out",
        "run",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "even: round 2/2" in done.stdout
    assert (tmp_path / "run" / "summary.json").exists()
