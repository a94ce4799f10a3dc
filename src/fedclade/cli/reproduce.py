"""`fedclade reproduce`: run the experiments of a paper's table."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedclade.cli.console import new_folder, out_console, print_err, print_name_table, print_out
from fedclade.cli.index import read_index
from fedclade.cli.options import (
    DataRootOption,
    DeviceOption,
    OutOption,
    QuietOption,
    ResumeOption,
    comma_separated,
)
from fedclade.cli.progress import training
from fedclade.cli.result_tables import show_hurt
from fedclade.cli.run_monitoring import resumable_errors
from fedclade.errors import InvalidInputError, WriteError

if TYPE_CHECKING:
    from fedclade.reproduce.compare_to_paper import Outcome
    from fedclade.reproduce.execute import Options, TableEntry
    from fedclade.reproduce.spec import Table as TableSpec
    from fedclade.training.callbacks import OnRound

ALL = "all"


class DataNotHereError(InvalidInputError):
    """None of a table's data sets is on this machine."""


def reproduce(
    table: Annotated[
        str | None,
        typer.Argument(
            metavar="[TABLE]",
            help="A table of 'fedclade list tables', or all (default: list them).",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Run a small, short version with one seed, to check that it works."
        ),
    ] = False,
    methods: Annotated[
        str | None, typer.Option(help="Only these methods or rows, comma-separated.")
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option("--column", help="Only this column; may be repeated.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Number of seeds per cell (default: that of the table)."),
    ] = None,
    device: DeviceOption = "auto",
    out: OutOption = None,
    resume: ResumeOption = False,
    done_only: Annotated[
        bool, typer.Option("--so-far", help="Run nothing; show the finished runs in --out.")
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            min=1, help="Number of runs at the same time, each in its own process, on one device."
        ),
    ] = 1,
    quiet: QuietOption = False,
    data_root: DataRootOption = None,
) -> None:
    """Run a paper's table and compare the results with the paper.

    "all" runs every table into one folder, and ends with a list of them.
    """
    if table is None:
        print_name_table(read_index()["tables"])
        return
    from fedclade.reproduce.execute import Options
    from fedclade.reproduce.spec import find

    options = Options(
        seeds, quick, comma_separated(methods), tuple(columns or ()), device, data_root
    )
    chosen = None if table == ALL else find(table)
    if chosen is None and (methods or columns):
        option = "--methods" if methods else "--column"
        raise InvalidInputError(f"{option}: works with one table only, not with {ALL}.", option)
    if (resume or done_only) and out is None:
        option = "--so-far" if done_only else "--resume"
        raise InvalidInputError(f"{option}: give the folder with --out DIR.", option)
    folder = out or new_folder(f"reproduce-{table}{'-quick' * quick}")
    if folder.exists() and any(folder.iterdir()) and not (resume or done_only):
        raise InvalidInputError(
            f"--out {folder}: the folder is not empty. Choose another folder, or continue with"
            " --resume.",
            "--out",
        )
    with resumable_errors(folder):
        if chosen is None:
            _all_tables(options, folder, done_only, jobs, quiet)
            return
        result = _outcome(chosen, options, folder, done_only, jobs, quiet)
    files = _write(result, folder, "table")
    _show(result)
    print_out(f"Runs, {', '.join(files[:-1])} and {files[-1]}: {folder}")


def _outcome(
    table: TableSpec, options: Options, folder: Path, done_only: bool, jobs: int, quiet: bool
) -> Outcome:
    """Execute the missing runs of a table in this folder, or none of them with --so-far."""
    from fedclade.engines.device import pick_device
    from fedclade.reproduce.compare_to_paper import outcome
    from fedclade.reproduce.execute import execute, plan, so_far

    planned = plan(table, options)
    if not planned.entries:
        missing = ", ".join(sorted({name for column in table.columns for name in column.data}))
        raise DataNotHereError(
            f"TABLE = {table.name}: none of its data sets is on this machine ({missing}). See"
            " 'fedclade data list'.",
            "TABLE",
        )
    if done_only:
        planned = so_far(planned, folder)
        if not planned.entries:
            raise InvalidInputError(
                f"--so-far: {folder} contains no finished run of {table.name}.", "--so-far"
            )

    def print_label(entry: TableEntry, number: int, total: int) -> None:
        if not quiet:
            out_console.print(_label(entry, number, total), markup=False)

    if jobs > 1 and not done_only:
        from fedclade.reproduce.parallel import execute_in_processes

        execute_in_processes(planned, folder, jobs, print_label)
    with ExitStack() as progress:

        def on_entry(entry: TableEntry, number: int, total: int) -> OnRound | None:
            progress.close()
            if entry.study:
                print_label(entry, number, total)
                return None
            label = _label(entry, number, total)
            rounds = entry.experiment(None).run.rounds
            return progress.enter_context(training(label, rounds, out_console, quiet))

        results = execute(planned, folder, on_entry)
    return outcome(planned, results, pick_device(options.device).type)


def _label(entry: TableEntry, number: int, total: int) -> str:
    return f"[{number}/{total}] {entry.column.name}: {entry.row.name}, seed {entry.seed}"


def _write(result: Outcome, folder: Path, name: str) -> list[str]:
    """Write the table as JSON and Markdown, and its pictures. Returns the names of the files."""
    from fedclade.io.atomic import write_text
    from fedclade.io.compact_json import write_results
    from fedclade.reproduce.draw import draw
    from fedclade.reproduce.markdown import page

    write_results(folder / f"{name}.json", result.as_json())
    write_text(folder / f"{name}.md", page(result))
    pictures = [path.name for picture in result.pictures for path in draw(picture, folder)]
    return [f"{name}.json", *pictures, f"{name}.md"]


def _all_tables(options: Options, folder: Path, done_only: bool, jobs: int, quiet: bool) -> None:
    """Run all tables, each to its end or its error, and list what became of them. Tables with equal
    settings share runs.
    """
    from fedclade.reproduce.spec import tables

    states: dict[str, str] = {}
    has_failed = False
    for name, table in tables().items():
        start = time.perf_counter()
        if not quiet:
            print_out(f"{name}: {table.title}")
        try:
            result = _outcome(table, options, folder / "runs", done_only, jobs, quiet)
            _write(result, folder, name)
            cells = len(result.cells)
            states[name] = f"{cells} cells in {time.perf_counter() - start:.0f} s: {name}.md"
        except DataNotHereError as error:
            states[name] = f"not run: {error}"
        except WriteError:
            raise  # the next table could not write either
        except Exception as error:
            if done_only and isinstance(error, InvalidInputError):
                states[name] = "no finished run"
                continue
            has_failed = True
            states[name] = f"failed: {type(error).__name__}: {error}"
            print_err(f"{name}: {states[name]}")
    print_name_table(states)
    print_out(f"Runs, and a .json and .md file for each table: {folder}")
    if has_failed:
        raise typer.Exit(1)


def _decimal(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _show(result: Outcome) -> None:
    from fedclade.reproduce.compare_to_paper import in_words
    from fedclade.reproduce.markdown import (
        IMPORTED,
        claim_in_words,
        number,
        signed,
        sizes_in_words,
        spread,
    )

    for column, data in result.data.items():
        cells = [cell for cell in result.cells if cell.column == column]
        if data is None:
            print_err(
                f"{column}: not measured, because {' or '.join(result.wanted[column])} is not on"
                " this machine."
            )
            continue
        if not cells:  # no run of this column
            continue
        substitute = (
            f" ({data} in place of {result.wanted[column][0]})"
            if data != result.wanted[column][0]
            else ""
        )
        title = f"{column}, {cells[0].metric}{substitute}{', quick version' * result.quick}"
        cell_table = Table(
            title=escape(title),
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        spreads = {
            heading: name
            for heading, name in {
                "var.": "accuracy_variance",
                "worst10": "accuracy_worst10",
            }.items()
            if any(name in cell.fairness for cell in cells)
        }
        for heading in ("", "paper", "measured", "difference", "", *spreads):
            cell_table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for cell in cells:
            cell_table.add_row(
                f"{escape(cell.row)}{'*' * cell.imported}",
                number(cell.paper),
                spread(cell),
                signed(cell.difference),
                in_words(cell),
                *(_decimal(cell.fairness.get(name)) for name in spreads.values()),
            )
        out_console.print(cell_table)
        show_hurt({cell.row: cell.fairness for cell in cells})
    for line in sizes_in_words(result):
        out_console.print(line, markup=False)
    if any(cell.imported for cell in result.cells):
        out_console.print(IMPORTED.removeprefix("\\"), markup=False)
    reasons = {
        cell.why: None
        for cell in result.cells
        if cell.why and cell.mark in ("above", "below", "not reached")
    }
    for reason in reasons:
        out_console.print(f"- {reason}", markup=False)
    for text, verdict in map(claim_in_words, result.claims):
        out_console.print(f"{text}: {verdict}", markup=False)
