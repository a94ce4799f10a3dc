"""The report: what runs leave on disk as one HTML page, and as figures for papers.

`collect` reads folders into one JSON-able dictionary; `page` makes that the page. Nothing here
changes a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedclade.analysis.report.html import page
from fedclade.analysis.report.page_data import collect
from fedclade.io.atomic import write_text

__all__ = ["collect", "page", "write_figures", "write_report"]


def write_report(folders: Sequence[Path], out: Path) -> Path:
    """The page of these folders, in the file `out`. It is whole or not there at all."""
    text = page(collect(folders))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, text)
    return out


def write_figures(
    folders: Sequence[Path], out: Path, formats: Sequence[str] = ("png", "svg", "pdf")
) -> list[Path]:
    """The figures of these folders as files in the folder `out`."""
    from fedclade.analysis.report.paper_figures import (
        draw,
    )  # matplotlib takes a second to import, and a page needs none of it

    data: dict[str, Any] = collect(folders)
    return draw(data, out, formats)
