"""The report: runs as one HTML page, and as figures for papers.

`collect` reads run folders into one dictionary for JSON, and `page` turns it into HTML. A report
never changes a run.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fedclade.analysis.report.html import page
from fedclade.analysis.report.page_data import collect
from fedclade.errors import InvalidInputError, nearest
from fedclade.io.atomic import write_text
from fedclade.io.schemas import Summary
from fedclade.training.result import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["collect", "draw_figure", "page", "write_figures", "write_report"]

ReportSource: TypeAlias = Result | str | os.PathLike[str]
"""A result, or the folder of a run, comparison or diagnosis."""


def write_report(runs: ReportSource | Sequence[ReportSource], out: str | os.PathLike[str]) -> Path:
    """Write one HTML page about one or more runs. It needs no network; several runs are compared.

    The file is complete or does not exist: a failed write leaves no partial page.

    Args:
        runs: a `Result`, with or without a run folder; or the path of a folder of a run, comparison
            or diagnosis; or a sequence of either.
        out: the file to write, such as "report.html".

    Returns:
        The path of the file.

    Example:
        >>> import fedclade as fc
        >>> clients = fc.data.partition(fc.data.load("digits"), fc.data.Iid(), clients=4)
        >>> result = fc.run(fc.FedAvg(), clients, fc.models.MLP(8), rounds=1)
        >>> fc.report(result, "one_run.html").name
        'one_run.html'
    """
    with _folders(runs) as folders:
        text = page(collect(folders))
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


def write_figures(
    runs: ReportSource | Sequence[ReportSource],
    out: str | os.PathLike[str],
    formats: Sequence[str] = ("png", "svg", "pdf"),
) -> list[Path]:
    """Write the figures of one or more runs as files for papers.

    Args:
        runs: as in `write_report`.
        out: the folder for the files.
        formats: any of "png", "svg" and "pdf".

    Returns:
        The paths of the files.
    """
    # matplotlib takes a second to import, and a page does not need it.
    from fedclade.analysis.report.paper_figures import draw

    with _folders(runs) as folders:
        data = collect(folders)
    return draw(data, Path(out), formats)


def draw_figure(runs: ReportSource | Sequence[ReportSource], name: str | None = None) -> Figure:
    """One figure of the report of one or more runs, drawn with matplotlib.

    Args:
        runs: as in `write_report`.
        name: the name of the figure; None for the first.

    Returns:
        The figure.
    """
    from fedclade.analysis.report.paper_figures import figures

    with _folders(runs) as folders:
        drawn = dict(figures(collect(folders)))
    if not drawn:
        raise InvalidInputError("figure: there is nothing to draw yet.", "figure")
    if name is not None and name not in drawn:
        raise InvalidInputError(f"figure = '{name}': unknown.{nearest(name, drawn)}", "figure")
    return drawn[name] if name is not None else next(iter(drawn.values()))


@contextmanager
def _folders(runs: ReportSource | Sequence[ReportSource]) -> Iterator[list[Path]]:
    """The folder of each run. A result without one is written into a temporary folder."""
    sources = [runs] if isinstance(runs, Result | str | os.PathLike) else list(runs)
    for source in sources:
        if not isinstance(source, Result | str | os.PathLike):
            raise InvalidInputError(
                f"runs = {source!r}: must be a Result or the path of a run folder.", "runs"
            )
    unwritten = [source for source in sources if isinstance(source, Result) and not source.folder]
    with tempfile.TemporaryDirectory() if unwritten else nullcontext("") as scratch:
        folders = []
        for source in sources:
            folder = source.folder if isinstance(source, Result) else Path(source)
            if folder is None:
                assert isinstance(source, Result)
                folder = _new_folder(Path(scratch), source.summary, len(unwritten) > 1)
                source.write_for_report(folder)
            folders.append(folder)
        yield folders


def _new_folder(parent: Path, summary: Summary, several: bool) -> Path:
    """A new folder for a run. Its name is the name of the run on the page."""
    name = f"{summary['method']}-seed{summary['seed']}" if several else summary["method"]
    folder, number = parent / name, 1
    while folder.exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder
