"""`fedclade report`: run folders as one HTML page, and as figures for papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli.console import print_json, print_out
from fedclade.cli.options import JsonOption
from fedclade.errors import InvalidInputError


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR…", help="Folders of runs, comparisons or diagnoses."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="File for the page (default: report.html in the first folder).",
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            "--figures", metavar="DIR", help="Also write the figures as PNG, SVG and PDF."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML page about one or more runs.

    The page needs no network and no server. It compares the runs if there are several.
    """
    from fedclade.analysis.report import write_figures, write_report

    page = out or folders[0] / "report.html"
    if page.is_dir():
        raise InvalidInputError(
            f"--out {page}: this is a folder. Give a file, for example {page / 'report.html'}.",
            "--out",
        )
    if figures is not None and figures.exists() and not figures.is_dir():
        raise InvalidInputError(f"--figures {figures}: this is a file. Give a folder.", "--figures")
    write_report(folders, page)
    print_out(f"Report: {page}")
    paths = [] if figures is None else write_figures(folders, figures)
    if figures is not None:
        print_out(f"Figures: {len(paths)} files in {figures}")
    if as_json:
        print_json({"report": str(page), "figures": [str(path) for path in paths]})
