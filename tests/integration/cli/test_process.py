"""The command line as a process: exit codes, and which libraries it imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedclade import __version__
from fedclade.integrations.flower.local_deployment.supervisor import Plan, Service, State

HEAVY = ("torch", "numpy", "scipy", "sklearn", "umap", "matplotlib", "flwr", "pydantic")
# Prints, after the command, which of the heavy libraries it imported.
TRACED = f"""
import sys
from fedclade.cli.main import main
try:
    main()
    code = 0
except SystemExit as stop:
    code = stop.code or 0
print("imported:", *(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)
sys.exit(code)
"""
OWN = '''
from dataclasses import dataclass
from typing import ClassVar
import fedclade as fc

@fc.register("method", "mine")
@dataclass(frozen=True)
class Mine(fc.FedAvg):
    """A method of the user."""
    title: ClassVar[str] = "A method of the user"
'''


def fedclade(
    folder: Path, *arguments: str, launcher: tuple[str, ...] = ("-m", "fedclade")
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, *arguments],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        ([], 0),
        (["list", "methods"], 0),
        (["list", "datasets", "--json"], 0),
        (["list", "methds"], 2),
        (["reproduce"], 0),
        (["lst"], 2),
        (["list", "settings"], 0),
        (["run", "quickstart", "--momentum", "0.9"], 2),
        (["run", "quickstart", "--sett", "a=1"], 2),
        (["run"], 2),
        (["run", "quickstart", "--port", "8000"], 2),
        *(
            ([command, "--help"], 0)
            for command in (
                *("run", "compare", "list", "describe", "diagnose", "report", "export"),
                *("reproduce", "pretrain", "check-method", "data", "flower"),
            )
        ),
        (["data", "get", "--help"], 0),
        (["data", "lst"], 2),
        (["flower", "up", "--help"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_help_names_and_mistakes_need_no_heavy_imports(
    arguments: list[str], code: int, tmp_path: Path
) -> None:
    done = fedclade(tmp_path, *arguments, launcher=("-c", TRACED))
    *_, imported = done.stderr.splitlines()
    assert (done.returncode, imported) == (code, "imported:")
    assert bool(done.stdout) == (code == 0)


# Sends Ctrl-C to this process when it starts to import the module that the first argument names.
INTERRUPTED = """
import os, signal, sys, importlib.abc
module = sys.argv.pop(1)
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == module:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
from fedclade.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("typer", ["run", "quickstart"]),
        ("fedclade.cli.reproduce", ["run", "quickstart"]),
        ("torch", ["run", "quickstart"]),
        ("sklearn.datasets", ["run", "quickstart"]),
        ("fedclade.analysis.diagnose.pilot_runs", ["diagnose", "quickstart"]),
        ("fedclade.data.dataset_catalog", ["data", "list"]),
    ],
)
def test_ctrl_c_at_the_start_leaves_one_line(
    module: str, arguments: list[str], tmp_path: Path
) -> None:
    done = fedclade(tmp_path, module, *arguments, launcher=("-c", INTERRUPTED))
    # Python may end itself by the signal; a shell shows 130 for both.
    assert done.returncode in (130, -signal.SIGINT)
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(("fedclade: stopped.", "fedclade: interrupted; continue with"))


def test_ctrl_c_in_a_run_says_how_to_continue(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = ("--set", "run.rounds=1000000", "--set", "partition.clients=6", "-q")
    process = subprocess.Popen(
        [sys.executable, "-m", "fedclade", "run", "quickstart", *arguments, "--out", str(folder)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    history = folder / "rounds.jsonl"
    while process.poll() is None and not (history.exists() and history.read_text()):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    (line,) = err.splitlines()
    assert line.startswith("fedclade: interrupted; continue with the same command and --out")
    assert list((folder / "checkpoint").iterdir())


def test_version(tmp_path: Path) -> None:
    assert fedclade(tmp_path, "--version").stdout == f"fedclade {__version__}\n"


def test_the_exit_code_for_a_federation_that_is_down(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    folder.mkdir()
    Plan(folder, False, 1, ("",)).save()
    State(services=[Service("superlink"), Service("node-0")]).save(folder)
    done = fedclade(tmp_path, "flower", "status", "--dir", str(folder))
    assert (done.returncode, done.stderr) == (1, "")
    assert "is down" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["describe", "fedavg"], 0),
        (["describe", "fedvag"], 2),
        (["run", "nowhere.toml"], 2),
        (["data", "check", "mnist"], 2),
        (["flower", "status"], 2),
        (["flower", "down"], 0),
        (["list", "methods", "--import", "mine.py"], 0),
        (["list", "methods", "--import", "nowhere.py"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_every_command_has_its_exit_code(arguments: list[str], code: int, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    done = fedclade(tmp_path, *arguments)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == (code != 0)
    assert ("A method of the user" in done.stdout) == ("mine.py" in arguments)


def test_the_help_of_arguments_is_shown(tmp_path: Path) -> None:
    help_text = fedclade(tmp_path, "run", "--help").stdout
    line = next(line for line in help_text.splitlines() if line.startswith("  EXPERIMENT"))
    assert line.split(maxsplit=1)[1] == (
        "A TOML file, or a preset (fedclade list presets).  [required]"
    )
    assert "[default: auto]" in help_text
    assert "\\" not in help_text
