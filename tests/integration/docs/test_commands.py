"""Run every command of the README and the docs as a reader would run it.

Each command is a new process. The commands of a page run in order in one folder, which contains
only the examples. A Python or TOML block whose first line is a comment with a file name is that
file.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from tests.integration.docs.markdown import ROOT, blocks, name_of, pages

from fedclade.cli.main import app

# Commands that cannot run in a test: (page or *, start of the command) -> reason.
NOT_RUN = {
    (
        "*",
        "make",
    ): (
        "sets up its own environment; CI runs make lint and make test, and a test below runs the"
        " command of the demo"
    ),
    (
        "*",
        "source .venv/bin/activate",
    ): "there is no .venv in the folder; the test runs in an environment that has fedclade",
    (
        "*",
        "fedclade data get",
    ): "needs the network; tests/unit/data/test_dataset_catalog.py uses a local server",
    (
        "docs/datasets.md",
        "fedclade data check",
    ): "has a placeholder; tests/integration/cli/test_data.py",
    (
        "*",
        "fedclade reproduce flt_1",
    ): "needs MNIST; tests/unit/reproduce/test_quick.py runs every table with --quick",
    (
        "docs/real_federations.md",
        "fedclade reproduce flamby_heart",
    ): "takes minutes; tests/unit/reproduce/test_quick.py runs every table with --quick",
    (
        "docs/real_federations.md",
        "fedclade reproduce leaf_shakespeare",
    ): "needs shakespeare.csv; tests/unit/reproduce/test_quick.py runs every table with --quick",
    (
        "docs/real_federations.md",
        "fedclade report runs/shakespeare",
    ): "needs the runs of the command above; tests/integration/runs/test_roles.py reports roles",
    (
        "*",
        "fedclade reproduce all",
    ): "takes minutes; tests/unit/reproduce/test_quick.py runs every table with --quick",
    (
        "*",
        "tensorboard",
    ): (
        "a server that runs until it is stopped; tests/unit/integrations/test_tensorboard.py reads"
        " its data"
    ),
    **{
        ("docs/after.md", start): "needs a server; tests/unit/integrations/test_mlflow.py runs one"
        for start in (
            "export MLFLOW",
            "fedclade run quickstart --track mlflow",
            "fedclade track",
        )
    },
    (
        "docs/diagnosis.md",
        "fedclade diagnose EXPERIMENT",
    ): "has placeholders; README.md and docs/start.md run it",
    (
        "docs/clusters.md",
        "ray start",
    ): "needs several machines; tests/integration/sharded starts Ray on this one",
    ("docs/clusters.md", "export"): "needs Slurm",
    ("README.md", "fedclade flower"): "the same commands are run from docs/flower.md",
}
# Pages whose commands take more than about 20 seconds in total.
SLOW = {
    "README.md",
    "docs/start.md",
    "docs/own.md",
    "docs/flower.md",
    "docs/after.md",
    "docs/report.md",
    "docs/speed.md",
}
# Commands that a page needs before its own commands, because another page precedes it.
BEFORE = {"docs/report.md": ["fedclade run quickstart --set method.name=clade"]}
LIMIT = 900  # seconds for one command: a broken one must not hang the tests

COMMANDS = {
    name_of(page): [command for block in blocks(page) for command in block.commands]
    for page in pages()
}
INLINE = re.compile(r"`(fedclade [a-z][^`\n]*)`")


def why_not(page: str, command: str) -> tuple[str, str] | None:
    """The entry of NOT_RUN for a command, or None."""
    return next(
        (key for key in NOT_RUN if key[0] in ("*", page) and command.startswith(key[1])), None
    )


def marked(page: str) -> object:
    return pytest.param(page, marks=pytest.mark.slow) if page in SLOW else page


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The reader's environment, with an empty home folder. A running federation is stopped
    afterwards.
    """
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    binaries = Path(sys.executable).parent
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "140",
    }
    environment.pop("FEDCLADE_DATA", None)
    yield environment
    if (tmp_path / ".fedclade-federation").exists():
        subprocess.run(
            [sys.executable, "-m", "fedclade", "flower", "down"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            check=False,
        )


@pytest.mark.parametrize(
    "page",
    [
        marked(page)
        for page, commands in COMMANDS.items()
        if any(why_not(page, command) is None for command in commands)
    ],
)
def test_the_commands_of_a_page_run(page: str, reader: dict[str, str], tmp_path: Path) -> None:
    for block in blocks(ROOT / page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    for command in [*BEFORE.get(page, []), *COMMANDS[page]]:
        if why_not(page, command) is None:
            ran(command, reader, tmp_path)


@pytest.mark.slow
def test_the_demo_runs(reader: dict[str, str], tmp_path: Path) -> None:
    recipe = re.search(
        r"^demo:.*\n\t@\$\(BIN\)/python -m fedclade (.*)$",
        (ROOT / "Makefile").read_text(),
        re.MULTILINE,
    )
    assert recipe is not None
    assert "clade" in ran(f"fedclade {recipe[1]}", reader, tmp_path)


def ran(command: str, environment: dict[str, str], folder: Path) -> str:
    program, *rest = shlex.split(command)
    words = (
        [sys.executable, "-m", "fedclade", *rest]
        if program == "fedclade"
        else [sys.executable if program == "python" else program, *rest]
    )
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_each_reason_not_to_run_a_command_is_needed() -> None:
    used = {why_not(page, command) for page, commands in COMMANDS.items() for command in commands}
    assert used - {None} == NOT_RUN.keys(), "NOT_RUN has an entry that no page needs"
    assert BEFORE.keys() | SLOW <= COMMANDS.keys(), "a page does not exist"


@pytest.mark.parametrize(
    "page", [name_of(page) for page in pages() if INLINE.search(page.read_text())]
)
def test_commands_inside_sentences_and_their_options_exist(page: str) -> None:
    for match in INLINE.finditer((ROOT / page).read_text()):
        words = re.split(r"[\s=]+", match[1])[1:]
        command: click.Command = typer.main.get_command(app)
        while isinstance(command, click.Group) and words and words[0] in command.commands:
            command = command.commands[words.pop(0)]
        assert command.name != "root", f"{page}: {match[1]}"
        assert not (
            isinstance(command, click.Group) and words and words[0].isalpha() and words[0].islower()
        ), f"{page}: {match[1]}"
        options = {
            option
            for parameter in command.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words if word.startswith("--")} <= options | {"--help"}, (
            f"{page}: {match[1]}"
        )
