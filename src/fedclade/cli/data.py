"""`fedclade data`: which published data sets are known, getting them, checking what is here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from fedclade.cli.options import DataRootOption, out_console
from fedclade.data import download
from fedclade.data.catalog import CATALOGUE, File, Published
from fedclade.data.datasets import CACHE, Dataset, load, places
from fedclade.errors import FedcladeError, InvalidInputError, nearest

data_app = typer.Typer(
    help="Published data sets: which are known, getting them, checking what is here."
)

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A data set of 'fedclade data list'.")
]


@data_app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@data_app.command("list")
def list_(data_root: DataRootOption = None) -> None:
    """The data sets that are known, their size and licence, and whether they are here."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("name", "samples", "classes", "MB", "licence", "here"):
        right = heading in ("classes", "MB")
        table.add_column(
            heading,
            justify="right" if right else "left",
            no_wrap=heading != "here",
            overflow="fold",
        )
    for published in CATALOGUE.values():
        samples = " + ".join(f"{count:,}" for count in published.samples) + (
            " texts" if published.texts else ""
        )
        megabytes = "–" if published.megabytes is None else f"{published.megabytes:.0f}"
        here = [str(path) for path in _found(published, data_root)]
        row = (
            published.name,
            samples,
            str(published.classes),
            megabytes,
            published.licence,
            "\n".join(here) or "no",
        )
        table.add_row(*map(escape, row))
    out_console.print(table)


@data_app.command()
def get(
    name: NameArgument,
    data_root: Annotated[
        str | None,
        typer.Option("--data-root", metavar="DIR", help=f"Where to: $FEDCLADE_DATA, else {CACHE}."),
    ] = None,
) -> None:
    """Download a data set, going on where an earlier attempt broke off, and check its SHA-256
    sums.
    """
    published = _known(name)
    place = Path(data_root or os.environ.get("FEDCLADE_DATA") or CACHE).expanduser()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out_console, disable=not out_console.is_terminal) as bars:
        tasks = {file: bars.add_task(file.name, total=file.size) for file in published.files}

        def progress(file: File, done: int) -> None:
            bars.update(tasks[file], completed=done)

        folder = download.get(published, place, progress)
    _say(f"{name} is in {folder}, SHA-256 as expected. Licence: {published.licence}.")


@data_app.command()
def check(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A data set (default: all that are here)."),
    ] = None,
    data_root: DataRootOption = None,
) -> None:
    """Compare SHA-256 sums and read the data sets that are here."""
    wanted = list(CATALOGUE.values()) if name is None else [_known(name)]
    found = [(published, path) for published in wanted for path in _found(published, data_root)]
    if not found:
        looked = places(data_root)
        lacking = "".join(published.missing_files(looked) for published in wanted)
        raise InvalidInputError(
            f"data check: {f'{name} is not' if name else 'no known data set is'} in"
            f" {', '.join(map(str, looked))}.{lacking} 'fedclade data get {name or 'NAME'}'"
            " downloads it, or says what to put where."
        )
    wrong = []
    for published, path in found:
        problems, remark = _verdict(published, path)
        wrong += [str(path)] if problems else []
        _say(f"{published.name}: {path}: " + ("; ".join(problems) if problems else f"OK, {remark}"))
    if wrong:
        raise InvalidInputError(
            f"data check: {len(wrong)} of {len(found)} wrong: {', '.join(wrong)}."
        )


def _known(name: str) -> Published:
    if name not in CATALOGUE:
        raise InvalidInputError(
            f"data set '{name}': there is no published data set of that"
            f" name.{nearest(name, CATALOGUE)}"
        )
    return CATALOGUE[name]


def _found(published: Published, data_root: str | None) -> list[Path]:
    """NAME.npz files, and folders with all published files."""
    looked = places(data_root)
    files = [path for place in looked if (path := place / f"{published.name}.npz").is_file()]
    return files + [place / published.folder for place in looked if published.find_files([place])]


def _verdict(published: Published, path: Path) -> tuple[list[str], str]:
    """What is wrong, and what there is to say where nothing is."""
    files = [path] if path.is_file() else published.find_files([path.parent]) or []
    sums = {path / file.name: file for file in published.files}
    problems = [
        problem for file in files if file in sums and (problem := download.wrong(file, sums[file]))
    ]
    try:
        data = load(path) if path.is_file() else published.read(files)
    except FedcladeError as error:
        return [*problems, str(error)], ""
    known = (
        "SHA-256 as expected" if set(files) <= set(sums) else "no SHA-256 is known of such files"
    )
    differences = _differences(published, data)
    if not path.is_file():
        return problems + differences, f"{_shown(data)}; {known}"
    # Whoever made an .npz may have meant it to be a part.
    return problems, f"{_shown(data)}; {known}" + (
        f"; unlike the published data: {', '.join(differences)}" if differences else ""
    )


def _differences(published: Published, data: Dataset) -> list[str]:
    """How the data differ from what was published, as far as that is fixed: LEAF's split is drawn,
    texts are cut into windows.
    """
    if published.texts or len(published.samples) < 2:
        return []
    expected = (*published.samples, published.shape, published.classes)
    got = (len(data.y_train), len(data.y_test), tuple(data.x_train.shape[1:]), data.classes)
    named = zip(
        ("training samples", "test samples", "shape", "classes"), expected, got, strict=True
    )
    return [f"{what}: expected {want}, found {have}" for what, want, have in named if want != have]


def _shown(data: Dataset) -> str:
    shape = " × ".join(map(str, data.x_train.shape[1:]))
    return (
        f"{len(data.y_train):,} + {len(data.y_test):,} samples of {shape}, {data.classes} classes"
    )


def _say(message: str) -> None:
    out_console.print(message, markup=False, soft_wrap=True)
