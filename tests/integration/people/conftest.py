"""A fresh clone, and commands that a person types next to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
Call = Callable[..., str]


@pytest.fixture(scope="session")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a clone would have: no data, no caches, nothing that git ignores."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip(f"not a git repository: {ROOT}")
    folder = tmp_path_factory.mktemp("clone")
    for name in filter(None, listed.stdout.split("\0")):
        if name.startswith(("src/", "examples/")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


@pytest.fixture
def person(clone: Path, tmp_path: Path) -> Call:
    """Runs a command of a new user, in an empty folder and with an empty home; gives stdout."""
    home = tmp_path / "home"
    home.mkdir()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("FEDCLADE_")
    } | {
        "HOME": str(home),
        "PYTHONPATH": str(clone / "src"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }

    def run(*words: str, code: int = 0) -> str:
        program = {"fedclade": ["-m", "fedclade"], "python": []}[words[0]]
        done = subprocess.run(
            [sys.executable, *program, *words[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == code, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
        return done.stdout

    return run
