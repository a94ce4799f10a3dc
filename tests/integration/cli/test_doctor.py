"""`fedclade doctor`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import fedclade as fc
from fedclade.cli import doctor
from fedclade.cli.doctor import EXTRAS, REQUIRED

Call = Callable[..., tuple[int, str, str]]
PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
FOR_DEVELOPERS = {"docs", "browser", "dev"}


def names(requirements: list[str]) -> tuple[str, ...]:
    return tuple(re.split(r"[\[<>=,;]", requirement)[0] for requirement in requirements)


def test_the_packages_are_those_of_pyproject() -> None:
    assert names(PROJECT["dependencies"]) == REQUIRED
    extras = {
        name: names(packages)
        for name, packages in PROJECT["optional-dependencies"].items()
        if name not in FOR_DEVELOPERS
    }
    assert {name: packages for name, (_, packages) in EXTRAS.items()} == extras


def test_what_is_here_and_what_is_not(command: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "onnx" else version(name))
    (data := Path("mine")).mkdir()
    (data / "mnist.npz").touch()
    code, out, err = command("doctor", "--data-root", "mine")
    assert (code, err) == (0, "")
    assert f"fedclade {fc.__version__}" in re.sub(" +", " ", out)
    assert "Get: pip install 'fedclade[onnx]'" in out
    assert re.search(r"data sets +mnist", out)
    code, out, err = command("doctor", "--data-root", "mine", "--json")
    content = json.loads(out)
    assert code == 0
    assert "Get: pip install 'fedclade[onnx]'" in err
    assert content["versions"]["fedclade"] == fc.__version__
    assert content["extras"]["onnx"]["installed"] is False
    assert content["data"]["found"] == ["mnist"]
    assert content["data"]["folders"][0] == {"path": "mine", "exists": True}
    assert content["disk"]["folder"] == str(Path.cwd())
    assert not any(entry["required"] for entry in content["missing"])


def test_without_torch_it_still_answers(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so not found')")
    # Python looks for modules in the current folder first.
    done = subprocess.run(
        [sys.executable, "-m", "fedclade", "doctor"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "Missing: torch (libcudart.so not found). Get: pip install" in done.stdout
