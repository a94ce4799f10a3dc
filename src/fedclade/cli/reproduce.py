"""`fedclade reproduce`: run the experiments of a paper's table."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from fedclade.cli.console import new_folder, out_console, print_err, print_name_table, print_out
from fedclade.cli.list import read_index
from fedclade.cli.options import (
    DataRootOption,
    DeviceOption,
    OutOption,
    QuietOption,
    ResumeOption,
    comma_separated,
)
from fedclade.cli.progress import display
from fedclade.cli.run_monitoring import resumable_errors
from fedclade.errors import InvalidInputError

if TYPE_CHECKING:
    from fedclade.reproduce.compare_to_paper import Outcome
    from fedclade.reproduce.execute import TableEntry
    from fedclade.training.callbacks import OnRound


def reproduce(
    table: Annotated[
        str | None,
        typer.Argument(
            metavar="[TABLE]", help="A table of 'fedclade list tables' (default: list them)."
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
    quiet: QuietOption = False,
    data_root: DataRootOption = None,
) -> None:
    """Run a paper's table and compare the results with the paper."""
    if table is None:
        print_name_table(read_index()["tables"])
        return
    from fedclade.engines.simulator import pick_device
    from fedclade.io.atomic import write_text
    from fedclade.io.compact_json import write_results
    from fedclade.reproduce.compare_to_paper import outcome
    from fedclade.reproduce.draw import draw
    from fedclade.reproduce.execute import Options, execute, plan, so_far
    from fedclade.reproduce.markdown import page
    from fedclade.reproduce.spec import find

    options = Options(
        seeds, quick, comma_separated(methods), tuple(columns or ()), device, data_root
    )
    chosen = find(table)
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
    planned = plan(chosen, options)
    if not planned.entries:
        missing = ", ".join(sorted({name for column in chosen.columns for name in column.data}))
        raise InvalidInputError(
            f"TABLE = {table}: none of its data sets is on this machine ({missing}). See 'fedclade"
            " data list'.",
            "TABLE",
        )
    if done_only:
        planned = so_far(planned, folder)
        if not planned.entries:
            raise InvalidInputError(
                f"--so-far: {folder} contains no finished run of {table}.", "--so-far"
            )
    with resumable_errors(folder), ExitStack() as progress:

        def on_entry(entry: TableEntry, number: int, total: int) -> OnRound | None:
            progress.close()
            label = f"[{number}/{total}] {entry.column.name}: {entry.row.name}, seed {entry.seed}"
            if entry.study:
                if not quiet:
                    out_console.print(label, markup=False)
                return None
            rounds = entry.experiment(None).run.rounds
            return progress.enter_context(display(label, rounds, out_console, quiet)).after_round

        results = execute(planned, folder, on_entry)
    result = outcome(planned, results, pick_device(device).type)
    write_results(folder / "table.json", result.as_json())
    write_text(folder / "table.md", page(result))
    pictures = [path.name for picture in result.pictures for path in draw(picture, folder)]
    _show(result)
    print_out(f"Runs, {', '.join(['table.json', *pictures])} and table.md: {folder}")


def _show(result: Outcome) -> None:
    from fedclade.reproduce.compare_to_paper import in_words
    from fedclade.reproduce.markdown import number, signed, sizes_in_words, spread

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
        for heading in ("", "paper", "measured", "difference", ""):
            cell_table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for cell in cells:
            cell_table.add_row(
                cell.row, number(cell.paper), spread(cell), signed(cell.difference), in_words(cell)
            )
        out_console.print(cell_table)
    for line in sizes_in_words(result):
        out_console.print(line, markup=False)
    reasons = {
        cell.why: None
        for cell in result.cells
        if cell.why and cell.mark in ("above", "below", "not reached")
    }
    for reason in reasons:
        out_console.print(f"- {reason}", markup=False)
    for claim in result.claims:
        verdict = "holds" if claim.holds else "does not hold"
        out_console.print(f"{claim.place}: {' ≤ '.join(claim.rising)}: {verdict}", markup=False)
