"""`fc.compare`: several methods on the same clients, in Python."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedclade.analysis import significance
from fedclade.analysis.comparison_runs import tabulate
from fedclade.analysis.significance import Differences
from fedclade.core.notebook_html import html_grid
from fedclade.data.federated_dataset import Clients
from fedclade.errors import InvalidInputError, require, require_int
from fedclade.io.file_names import safe_file_name
from fedclade.io.run_dir import RunDirectory
from fedclade.methods.base import Method
from fedclade.models import ModelSpec
from fedclade.registry import as_method
from fedclade.training.config import TrainingConfig
from fedclade.training.progress_display import user_display
from fedclade.training.result import Result
from fedclade.training.runner import run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN = {
    "method": "method",
    "accuracy": "accuracy %",
    "accuracy_worst10": "worst tenth %",
    "loss": "loss",
    "clusters": "groups",
    "bytes_up": "MB up",
    "bytes_down": "MB down",
    "seconds": "seconds",
}


@dataclass(frozen=True)
class Comparison:
    """The outcome of `compare`. Printed, it is a table and the differences in words.

    Attributes:
        rows: One dictionary for each method: its numbers, averaged over the seeds.
        results: The results of each method, one for each seed.
        differences: Which differences between methods are significant.
        folder: The folder of the runs; None if nothing was written.

    Example:
        >>> import fedclade as fc
        >>> clients = fc.data.partition(fc.data.load("digits"), fc.data.Iid(), clients=4)
        >>> comparison = fc.compare(["fedavg", "local"], clients, fc.models.MLP(8), rounds=1)
        >>> list(comparison.results)
        ['fedavg', 'local']
    """

    rows: list[dict[str, Any]]
    results: dict[str, list[Result]] = field(repr=False)
    differences: Differences = field(repr=False)
    folder: Path | None = None

    def __str__(self) -> str:
        cells = [list(row) for row in zip(*self._columns().values(), strict=True)]
        table = [list(self._columns()), *cells]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                [
                    row[0].ljust(widths[0]),
                    *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
                ]
            ).rstrip()
            for row in table
        ]
        return "\n".join([*lines, *self.differences.in_words])

    def _repr_html_(self) -> str:
        columns = self._columns()
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return html_grid("Comparison", rows, self.differences.in_words)

    def _columns(self) -> dict[str, list[str]]:
        """The columns of the table that have a value, as text."""
        return {
            heading: [_text(name, row[name]) for row in self.rows]
            for name, heading in _SHOWN.items()
            if any(row.get(name) is not None for row in self.rows)
        }

    def report(self, out: str | os.PathLike[str]) -> Path:
        """Write all runs as one HTML page that needs no network.

        Args:
            out: The file to write, such as "report.html".

        Returns:
            The path of the file.
        """
        from fedclade.analysis.report import write_report

        return write_report(self._sources(), out)

    def plot(self, figure: str | None = None) -> Figure:
        """Draw a figure of the report with matplotlib; a notebook shows it.

        Args:
            figure: The name of the figure; None for the first. An unknown name is an error that
                lists all.

        Returns:
            The figure, for `savefig` or more drawing.
        """
        from fedclade.analysis.report import draw_figure

        return draw_figure(self._sources(), figure)

    def _sources(self) -> list[Any]:
        if self.folder is not None:
            return [self.folder]
        return [result for results in self.results.values() for result in results]


def compare(
    methods: Sequence[Method | str] | Mapping[str, Method],
    clients: Clients | Callable[[int], Clients],
    model: ModelSpec | nn.Module,
    *,
    seeds: int | Sequence[int] = 1,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool = False,
    **settings: Any,
) -> Comparison:
    """Train several methods on the same clients, and find which differences are significant.

    Args:
        methods: The methods, as objects or names such as "fedavg"; a dictionary gives them titles,
            for example to compare two settings of one method.
        clients: The clients. Or a function of the seed that makes them, so that every seed has
            another partition, too.
        model: One of `fc.models`, or any `nn.Module`.
        seeds: The number of seeds, from 0 on; or the seeds.
        out: A folder for the runs, comparison.json and report.html; None to write nothing.
        resume: Whether to continue the runs in `out`; a finished run is not repeated.
        progress: Whether to show the progress of each run.
        settings: Other arguments of `fc.run`, the same for all methods, such as `rounds=30`.

    Returns:
        The table, the results and the differences.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters()
        >>> clients = fc.data.partition(digits, scheme, clients=20, seed=0)
        >>> comparison = fc.compare(["fedavg", "local"], clients, fc.models.MLP(16), rounds=5)
        >>> len(comparison.rows)
        2
    """
    named = _named(methods)
    for name in ("seed", "on_round", "report", "profile"):
        require(name not in settings, name, settings.get(name), "compare does not take it")
    if isinstance(seeds, int):
        require_int("seeds", seeds, 1)
        seeds = range(seeds)
    require(
        len(set(seeds)) == len(seeds) > 0, "seeds", list(seeds), "give at least one, each only once"
    )
    folder = Path(out) if out is not None else None
    if folder is not None and RunDirectory(folder).holds_run():
        raise InvalidInputError(
            f"out = '{folder}': the folder contains a single run. Choose another folder for"
            " several runs.",
            "out",
        )
    rounds = settings.get("rounds") or (settings.get("training") or TrainingConfig()).rounds
    measured: list[significance.Measured] = []
    results: dict[str, list[Result]] = {title: [] for title in named}
    folders: dict[str, list[str]] = {title: [] for title in named}
    for seed in seeds:
        of_seed = clients if isinstance(clients, Clients) else clients(seed)
        for title, method in named.items():
            label = f"{safe_file_name(title)}-seed{seed}"
            with user_display(label, rounds) if progress else nullcontext() as display:
                result = run(
                    method,
                    of_seed,
                    model,
                    seed=seed,
                    out=None if folder is None else folder / label,
                    resume=resume,
                    on_round=None if display is None else display.after_round,
                    report=False,
                    **settings,
                )
            results[title].append(result)
            folders[title].append(label)
            measured.append(
                significance.Measured(title, seed, None, result.summary, result.clients)
            )
    table = tabulate(measured)
    comparison = Comparison(table.rows, results, table.differences, folder)
    if folder is not None:
        RunDirectory(folder).write_comparison(table.to_json(folders))
        comparison.report(folder / "report.html")
    return comparison


def _named(methods: Sequence[Method | str] | Mapping[str, Method]) -> dict[str, Method]:
    """Each method by its title."""
    if isinstance(methods, str | Method) or not methods:
        raise InvalidInputError(
            f"methods = {methods!r}: give a list, such as [fc.FedAvg(), fc.Clade()].", "methods"
        )
    if isinstance(methods, Mapping):
        return dict(methods)
    named: dict[str, Method] = {}
    for method in methods:
        made = as_method(method, "methods")
        if made.name in named:
            raise InvalidInputError(
                f"methods: {made.name} is there twice. Give titles, {{'title': fc.FedAvg(), …}}.",
                "methods",
            )
        named[made.name] = made
    return named


def _text(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name in ("bytes_up", "bytes_down"):
        return f"{value / 1e6:.1f}"
    if name == "clusters":
        return f"{round(value, 1):g}"
    if isinstance(value, float):
        return f"{value:.4f}" if name == "loss" else f"{value:.2f}"
    return str(value)
