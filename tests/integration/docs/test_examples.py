"""The examples run as a user would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.docs.markdown import ROOT, blocks

EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "extend.md"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("quickstart", "client 7 predicts"),
        ("own_data", "mean absolute error"),
        ("own_things", "--import"),
        ("ditto", "Ditto: "),
        ("lora_groups", "clade: next word right 9"),
    ],
)
def test_example_runs(name: str, says: str, tmp_path: Path) -> None:
    if name == "lora_groups":
        pytest.importorskip("peft", reason="pip install 'fedclade[transformers]'")
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


def test_the_page_on_methods_shows_the_example() -> None:
    text = (EXAMPLES / "ditto.py").read_text()
    *shown, check = [block.text for block in blocks(PAGE) if block.language == "python"]
    assert len(shown) == 3
    assert "fc.check_method(Ditto(" in check
    for block in shown:
        assert block.strip() in text


def test_the_example_method_runs_on_the_command_line(tmp_path: Path) -> None:
    words = [
        "run",
        "quickstart",
        "--import",
        EXAMPLES / "ditto.py",
        "--set",
        "method.name=my_ditto",
    ]
    command = [sys.executable, "-m", "fedclade", *words, "--set", "run.rounds=2", "--out", "run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert "my_ditto: round 2/2" in done.stdout
