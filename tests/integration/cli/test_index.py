"""Names and defaults that the command line repeats, to start without torch, equal the library's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from fedclade.analysis.diagnose.api import PROBE_ROUNDS
from fedclade.analysis.export import FORMATS
from fedclade.cli.index import build_index, read_index
from fedclade.cli.main import app
from fedclade.data.datasets import CACHE
from fedclade.training.encoders import CODE
from fedclade.training.encoders import pretrain as pretrain_encoder


def test_the_index_of_list_equals_the_registry() -> None:
    assert read_index() == build_index(), "run: python tools/docs/cli_index.py"
    assert [list(names) for names in read_index().values()] == [
        list(names) for names in build_index().values()
    ]


def command(*names: str) -> click.Command:
    selected: Any = typer.main.get_command(app)
    for name in names:
        selected = selected.commands[name]
    assert isinstance(selected, click.Command)
    return selected


@pytest.mark.parametrize(
    ("name", "parameter", "default"),
    [
        ("diagnose", "probe_rounds", PROBE_ROUNDS),
        ("export", "formats", ",".join(FORMATS)),
        ("pretrain", "code", CODE),
        ("pretrain", "epochs", inspect.signature(pretrain_encoder).parameters["epochs"].default),
        ("pretrain", "seed", inspect.signature(pretrain_encoder).parameters["seed"].default),
    ],
)
def test_defaults_are_those_of_the_library(name: str, parameter: str, default: object) -> None:
    defaults = {option.name: option.default for option in command(name).params}
    assert defaults[parameter] == default


def test_the_help_of_data_get_has_the_default_folder() -> None:
    (option,) = (entry for entry in command("data", "get").params if entry.name == "data_root")
    assert isinstance(option, click.Option)
    assert f"else {CACHE})" in (option.help or "")
    assert Path(CACHE).name == "fedclade"
