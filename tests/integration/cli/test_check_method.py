"""`fedclade check-method`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedclade.conformance import CHECKS

Call = Callable[..., tuple[int, str, str]]
GOOD = '''
from dataclasses import dataclass
from typing import ClassVar
import fedclade as fc

@fc.register("method", "mine")
@dataclass(frozen=True)
class Mine(fc.FedAvg):
    """FedAvg under another name."""
    title: ClassVar[str] = "A method of mine"
    paper: ClassVar[str] = "none"
'''
WRONG = '''
import torch
from dataclasses import replace

@fc.register("method", "noisy")
@dataclass(frozen=True)
class Noisy(fc.FedAvg):
    """FedAvg with noise that no key determines."""
    title: ClassVar[str] = "Noise"

    def round(self, fed, state, cohort, key):
        state = super().round(fed, state, cohort, key)
        noise = {name: value + torch.rand(()) for name, value in state.models.items()}
        return replace(state, models=noise)
'''


def test_a_good_method_passes(command: Call, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(GOOD)
    code, out, err = command("check-method", str(file))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == len(CHECKS) + 1
    for line, check in zip(lines, CHECKS, strict=False):
        assert line.startswith(f"pass  {check.name}: ")


def test_a_wrong_method_fails_with_exit_code_1(command: Call, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(GOOD + WRONG)
    code, out, err = command("check-method", f"{file}:Noisy")
    assert (code, err) == (1, "")
    failed = [line.split()[1] for line in out.splitlines() if line.startswith("FAIL")]
    assert "randomness_comes_from_the_key:" in failed
    assert f"{len(failed)} of {len(CHECKS)}" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "name", "parts"),
    [
        (GOOD + WRONG, "", ("Mine", "Noisy", "mine.py:Mine")),
        (GOOD, ":Other", ("Other", "Mine")),
        ("import fedclade as fc\nfrom fedclade import FedAvg\n", "", ("fc.Method",)),
        ("1 / 0\n", "", ("ZeroDivisionError",)),
        ("def (:\n", "", ("SyntaxError",)),
        ("import no_such_module\n", "", ("ModuleNotFoundError", "no_such_module")),
        (
            "import fedclade as fc\nclass Half(fc.Method):\n    title = 'x'\n",
            ":Half",
            ("Half", "add_clients"),
        ),
        (
            "from dataclasses import dataclass\nimport fedclade as fc\n"
            "@dataclass(frozen=True)\nclass Bad(fc.FedAvg):\n    k: int\n",
            "",
            ("Bad", "k"),
        ),
    ],
    ids=[
        *("several", "unknown class", "no method", "error", "syntax", "import", "abstract"),
        "no default",
    ],
)
def test_a_file_that_cannot_be_used_gets_one_line(
    text: str, name: str, parts: tuple[str, ...], command: Call, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    code, out, err = command("check-method", f"{file}{name}")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "--import" not in err
    for part in parts:
        assert part in err


def test_a_missing_file_is_named(command: Call) -> None:
    code, out, err = command("check-method", "nowhere.py")
    assert (code, out) == (2, "")
    assert err.startswith("fedclade: nowhere.py: ")
