"""`fedclade data`: list, download and check the published data sets."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedclade.cli.console import out_console, print_out
from fedclade.cli.options import DataRootOption
from fedclade.errors import FedcladeError, InvalidInputError, nearest

if TYPE_CHECKING:
    from fedclade.data.dataset_catalog import File, Published
    from fedclade.data.datasets import Dataset

data_app = typer.Typer(help="List, download and check the published data sets.")

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="A data set of 'fedclade data list'.")
]


@data_app.callback(invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@data_app.command("list")
def list_(data_root: DataRootOption = None) -> None:
    """List the known data sets: size, license, location."""
    from fedclade.data.dataset_catalog import CATALOGUE

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("name", "samples", "classes", "MB", "license", "local files"):
        right = heading in ("classes", "MB")
        table.add_column(
            heading,
            justify="right" if right else "left",
            no_wrap=heading != "local files",
            overflow="fold",
        )
    for published in CATALOGUE.values():
        samples = " + ".join(f"{count:,}" for count in published.samples) + (
            " texts" if published.texts else ""
        )
        megabytes = "–" if published.megabytes is None else f"{published.megabytes:.0f}"
        paths = [str(path) for path in _local_paths(published, data_root)]
        row = (
            published.name,
            samples,
            str(published.classes),
            megabytes,
            published.licence,
            "\n".join(paths) or "none",
        )
        table.add_row(*map(escape, row))
    table.add_row("heart", "920 rows", "2", "0.04", "CC BY 4.0", 'in fedclade: data.path = "heart"')
    out_console.print(table)


@data_app.command()
def get(
    name: NameArgument,
    data_root: Annotated[
        str | None,
        typer.Option(
            "--data-root",
            metavar="DIR",
            help="Target folder (default: $FEDCLADE_DATA, else ~/.cache/fedclade).",
        ),
    ] = None,
) -> None:
    """Download a data set and check its SHA-256 sums.

    Continues an interrupted download.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from fedclade.data import download
    from fedclade.data.datasets import CACHE

    published = _published(name)
    target = Path(data_root or os.environ.get("FEDCLADE_DATA") or CACHE).expanduser()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=out_console, disable=not out_console.is_terminal) as bars:
        tasks = {file: bars.add_task(file.name, total=file.size) for file in published.files}

        def progress(file: File, bytes_done: int) -> None:
            bars.update(tasks[file], completed=bytes_done)

        folder = download.get(published, target, progress)
    print_out(f"{name} is in {folder}; its SHA-256 is correct. License: {published.licence}.")


@data_app.command()
def check(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A data set (default: all on this machine)."),
    ] = None,
    data_root: DataRootOption = None,
) -> None:
    """Check the data sets on this machine.

    Compares SHA-256 sums and reads the files.
    """
    from fedclade.data.dataset_catalog import CATALOGUE
    from fedclade.data.datasets import places

    data_sets = list(CATALOGUE.values()) if name is None else [_published(name)]
    paths = [
        (published, path) for published in data_sets for path in _local_paths(published, data_root)
    ]
    if not paths:
        folders = places(data_root)
        missing_files = "".join(published.missing_files(folders) for published in data_sets)
        raise InvalidInputError(
            f"data check: {f'{name} is not' if name else 'no known data set is'} in"
            f" {', '.join(map(str, folders))}.{missing_files} 'fedclade data get {name or 'NAME'}'"
            " downloads it, or shows which files to put where.",
            name or "--data-root",
        )
    wrong = []
    for published, path in paths:
        problems, remark = _verdict(published, path)
        wrong += [str(path)] if problems else []
        verdict = "; ".join(problems) if problems else f"OK, {remark}"
        print_out(f"{published.name}: {path}: {verdict}")
    if wrong:
        raise InvalidInputError(
            f"data check: {len(wrong)} of {len(paths)} wrong: {', '.join(wrong)}.",
            wrong[0] if len(wrong) == 1 else "",
        )


def _published(name: str) -> Published:
    from fedclade.data.dataset_catalog import CATALOGUE

    if name not in CATALOGUE:
        raise InvalidInputError(
            f"NAME = '{name}': no published data set has this name.{nearest(name, CATALOGUE)}",
            "NAME",
        )
    return CATALOGUE[name]


def _local_paths(published: Published, data_root: str | None) -> list[Path]:
    """NAME.npz files, and folders with all published files."""
    from fedclade.data.datasets import places

    folders = places(data_root)
    files = [path for folder in folders if (path := folder / f"{published.name}.npz").is_file()]
    return files + [
        folder / published.folder for folder in folders if published.find_files([folder])
    ]


def _verdict(published: Published, path: Path) -> tuple[list[str], str]:
    """The problems of a data set, and a remark that is shown if there are none."""
    from fedclade.data import download
    from fedclade.data.datasets import load

    place = path.parent if published.folder else path
    files = [path] if path.is_file() else published.find_files([place]) or []
    sums = {path / file.name: file for file in published.files}
    problems = [
        problem for file in files if file in sums and (problem := download.wrong(file, sums[file]))
    ]
    try:
        data = load(path) if path.is_file() else published.read(files)
    except FedcladeError as error:
        return [*problems, str(error)], ""
    known = (
        "SHA-256 correct" if set(files) <= set(sums) else "no SHA-256 is published for these files"
    )
    differences = _differences(published, data)
    if not path.is_file():
        return problems + differences, f"{_size_text(data)}; {known}"
    # An .npz file may hold a part of the data on purpose.
    return problems, f"{_size_text(data)}; {known}" + (
        f"; unlike the published data: {', '.join(differences)}" if differences else ""
    )


def _differences(published: Published, data: Dataset) -> list[str]:
    """Differences from the published sizes. Only where these are fixed: LEAF's split is random,
    and texts are cut into windows.
    """
    if published.texts or len(published.samples) < 2:
        return []
    from fedclade.core.inputs import shape_of  # torch, which other commands do not need

    expected = (*published.samples, published.shape, published.classes)
    actual = (len(data.y_train), len(data.y_test), shape_of(data.x_train), data.classes)
    names = ("training samples", "test samples", "shape", "classes")
    return [
        f"{name}: expected {published_size}, found {size}"
        for name, published_size, size in zip(names, expected, actual, strict=True)
        if published_size != size
    ]


def _size_text(data: Dataset) -> str:
    from fedclade.core.inputs import shape_of  # torch, which other commands do not need

    shape = " × ".join(map(str, shape_of(data.x_train) or ()))
    return (
        f"{len(data.y_train):,} + {len(data.y_test):,} samples of {shape}, {data.classes} classes"
    )
