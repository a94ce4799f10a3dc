"""`fedclade init`: look at a table and write an experiment file for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedclade.cli.console import print_out
from fedclade.errors import InvalidInputError

if TYPE_CHECKING:
    from fedclade.data.table_inspection import Inspection

_ALL = 20  # up to this number of clients, all take part in every round
_COLUMN = 30  # of the comments in the experiment file


def init(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A CSV or Parquet file.")],
    client: Annotated[str, typer.Option(help="Column with the name of each row's client.")],
    target: Annotated[str, typer.Option(help="Column that the models predict.")],
    out: Annotated[
        Path | None,
        typer.Option(help="File to write (default: the name of FILE with .toml)."),
    ] = None,
) -> None:
    """Look at a table and write an experiment file for it.

    An existing file is never overwritten.
    """
    from fedclade.data.table_inspection import inspect_table

    path = out or Path(f"{Path(file).stem}.toml")
    if path.exists():
        raise InvalidInputError(
            f"--out {path}: the file already exists. Choose another name with --out.", "--out"
        )
    found = inspect_table(file, client, target)
    try:
        with path.open("x", encoding="utf-8") as stream:  # not a file that appeared meanwhile
            stream.write(_experiment(found))
    except FileExistsError as error:
        raise InvalidInputError(f"--out {path}: the file already exists.", "--out") from error
    print_out(found.in_words())
    print_out(str(found.clients.describe()))
    print_out(f"Experiment: {path}. Edit it, then run: fedclade diagnose {path}")


def _experiment(found: Inspection) -> str:
    settings, is_classes = found.settings, found.task == "classification"
    part = (
        "this column says train or test"
        if isinstance(settings.test, str)
        else "share of each client's rows, the same for every class"
    )
    loss = "cross_entropy" if is_classes else "mse"
    lines: list[tuple[str, str]] = [
        ("[data]", ""),
        (f"path = {_toml(found.path)}", ""),
        (f"client = {_toml(settings.client)}", ""),
        (f"target = {_toml(settings.target)}", ""),
        (f"task = {_toml(found.task)}", 'or "regression"' if is_classes else 'or "classification"'),
        (f"test = {_toml(settings.test)}", part),
        ("validation = 0.0", "share of the training rows, for run.patience and run.select"),
        ("drop = [", "columns that are no inputs"),
        *((f"  {_toml(name)},", why) for name, why in found.dropped.items()),
        ("]", ""),
        ("categorical = []", "columns of numbers that are codes, not quantities"),
        ('missing = "mean"', 'or "drop", which leaves out rows with a missing value'),
        ('standardize = "federated"', 'or "client", "none"'),
        ("", ""),
        ("[model]", ""),
        ('name = "mlp"', "`fedclade list models`"),
        ("hidden = 16", ""),
        ("", ""),
        ("[local]", ""),
        ("lr = 0.05", ""),
        ("batch_size = 10", ""),
        ("epochs = 2", ""),
        (f'loss = "{loss}"', "" if is_classes else 'or "mae", "huber"'),
        ("", ""),
        ("[method]", ""),
        ('name = "clade"', "`fedclade diagnose` says which method fits"),
        ("", ""),
        ("[run]", ""),
        ("rounds = 30", ""),
        (
            f"clients_per_round = {1.0 if len(found.clients) <= _ALL else 0.2}",
            "a float is a fraction, an integer a number of clients",
        ),
        ("eval_every = 5", ""),
        ("seed = 0", ""),
    ]
    text = [
        f"{setting:<{_COLUMN}}# {comment}" if comment else setting for setting, comment in lines
    ]
    head = f"# {Path(found.path).name}: {found.in_words()}"
    return "\n".join([head, "# `fedclade init` chose these settings. Check them.", "", *text, ""])


def _toml(value: str | float) -> str:
    """Text or a number as TOML writes it."""
    return json.dumps(value, ensure_ascii=False)
