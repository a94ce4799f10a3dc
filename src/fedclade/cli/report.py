"""`fedclade report`: folders of runs as one page, and as figures for papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedclade.cli.options import out_console
from fedclade.errors import InvalidInputError


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR…", help="Folders of runs, comparisons or diagnoses."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FILE", help="The page (default: report.html in the first folder)."
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option("--figures", metavar="DIR", help="Write the figures as PNG, SVG and PDF too."),
    ] = None,
) -> None:
    """Make one HTML page of runs that needs no network and no server; several runs are compared."""
    from fedclade.analysis import report as making

    page = out or folders[0] / "report.html"
    if page.is_dir():
        raise InvalidInputError(
            f"--out {page}: it is a folder; give a file, for example {page / 'report.html'}."
        )
    if figures is not None and figures.exists() and not figures.is_dir():
        raise InvalidInputError(f"--figures {figures}: it is a file; give a folder.")
    making.write_report(folders, page)
    out_console.print(f"Report: {page}", markup=False, soft_wrap=True)
    if figures is not None:
        made = making.write_figures(folders, figures)
        out_console.print(f"Figures: {len(made)} files in {figures}", markup=False, soft_wrap=True)
