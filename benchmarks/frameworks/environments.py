"""Environments of the frameworks in .bench/. Each is created from the requirements in this folder,
and recreated when they change.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / ".bench"


class BuildError(Exception):
    """An environment cannot be created; the message is one line with the reason."""


def python_of(framework: str) -> Path:
    """The interpreter of a framework's environment."""
    home, requirements = FOLDER / framework, HERE / f"{framework}.txt"
    python, ready = home / "bin" / "python", home / "ready.txt"
    wanted = [line for line in requirements.read_text().splitlines() if not line.startswith("#")]
    if not ready.exists() or ready.read_text().splitlines() != wanted:
        print(f"setting up {home.relative_to(FOLDER.parent)} (once, a few minutes)", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(home))
        # torch first and alone, so that nothing else pulls another build of it.
        for line in wanted:
            if line.startswith("torch=="):
                _install(python, line)
        _install(python, "-r", str(requirements))
        ready.write_text("\n".join(wanted))
    return python


def _install(python: Path, *what: str) -> None:
    _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = (
            done.stderr.strip().splitlines()
            or done.stdout.strip().splitlines()
            or [f"exit status {done.returncode}"]
        )
        raise BuildError(
            next(
                (
                    line.removeprefix("ERROR: ")
                    for line in reversed(lines)
                    if line.startswith("ERROR: ")
                ),
                lines[-1],
            )
        )
