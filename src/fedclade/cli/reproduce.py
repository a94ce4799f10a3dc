"""`fedclade reproduce`: a paper's table, run again."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table as Shown

from fedclade.cli.options import (
    DataRootOption,
    DeviceOption,
    OutOption,
    QuietOption,
    ResumeOption,
    comma_separated,
    new_folder,
    out_console,
    print_err,
    print_name_table,
)
from fedclade.cli.progress import display
from fedclade.engines.simulator import pick_device
from fedclade.errors import InvalidInputError
from fedclade.io.atomic import write_text
from fedclade.io.results_json import write_results
from fedclade.reproduce.compare_to_paper import Outcome, in_words, outcome
from fedclade.reproduce.execute import Job, Options, execute, plan, so_far
from fedclade.reproduce.markdown import number, page, signed, spread
from fedclade.reproduce.spec import find, tables
from fedclade.training.runner import OnRound


def reproduce(
    table: Annotated[
        str | None,
        typer.Argument(
            metavar="[TABLE]", help="fedclade list tables; without one they are listed."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small and short, one seed: to see that it runs.")
    ] = False,
    methods: Annotated[
        str | None, typer.Option(help="Only these, or rows of these names, with commas between.")
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option("--column", help="Only this one; may be repeated.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs of each cell (default: the table's own).")
    ] = None,
    device: DeviceOption = "auto",
    out: OutOption = None,
    resume: ResumeOption = False,
    done_only: Annotated[
        bool, typer.Option("--so-far", help="Run nothing: the table of what --out holds.")
    ] = False,
    quiet: QuietOption = False,
    data_root: DataRootOption = None,
) -> None:
    """Run a paper's table again: the paper's numbers beside those measured."""
    if table is None:
        print_name_table({name: each.title for name, each in tables().items()})
        return
    options = Options(
        seeds, quick, comma_separated(methods), tuple(columns or ()), device, data_root
    )
    chosen = find(table)
    if (resume or done_only) and out is None:
        raise InvalidInputError(
            f"{'--so-far' if done_only else '--resume'}: say which with --out DIR."
        )
    folder = out or new_folder(f"reproduce-{table}{'-quick' * quick}")
    if folder.exists() and any(folder.iterdir()) and not (resume or done_only):
        raise InvalidInputError(
            f"--out {folder}: it is not empty; give another folder, or go on with --resume."
        )
    planned = plan(chosen, options)
    if not planned.jobs:
        missing = ", ".join(sorted({name for column in chosen.columns for name in column.data}))
        raise InvalidInputError(
            f"reproduce {table}: none of its data sets is here ({missing}); see `fedclade data"
            " list`."
        )
    if done_only:
        planned = so_far(planned, folder)
        if not planned.jobs:
            raise InvalidInputError(f"--so-far: {folder} holds no finished run of {table}.")
    try:
        with ExitStack() as shown:

            def on_job(job: Job, number: int, total: int) -> OnRound | None:
                shown.close()
                label = f"[{number}/{total}] {job.column.name}: {job.row.name}, seed {job.seed}"
                if job.study:
                    if not quiet:
                        out_console.print(label, markup=False)
                    return None
                rounds = job.experiment(None).run.rounds
                return shown.enter_context(display(label, rounds, out_console, quiet)).row

            done = execute(planned, folder, on_job)
    except KeyboardInterrupt:
        print_err(f"interrupted; go on with the same command and --out {folder} --resume")
        raise SystemExit(130) from None
    result = outcome(planned, done, pick_device(device).type)
    write_results(folder / "table.json", result.as_json())
    write_text(folder / "table.md", page(result))
    _show(result)
    out_console.print(f"Runs, table.json and table.md: {folder}", markup=False, soft_wrap=True)


def _show(result: Outcome) -> None:
    for column, data in result.data.items():
        cells = [cell for cell in result.cells if cell.column == column]
        if data is None:
            print_err(
                f"{column}: not measured, no data here ({' or '.join(result.wanted[column])})."
            )
            continue
        if not cells:  # nothing of it was run
            continue
        stands_in = (
            f" ({data} stands in for {result.wanted[column][0]})"
            if data != result.wanted[column][0]
            else ""
        )
        title = f"{column}, {cells[0].metric}{stands_in}{', a quick look' * result.quick}"
        shown = Shown(
            title=escape(title),
            title_justify="left",
            box=SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for heading in ("", "paper", "measured", "difference", ""):
            shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for cell in cells:
            shown.add_row(
                cell.row, number(cell.paper), spread(cell), signed(cell.difference), in_words(cell)
            )
        out_console.print(shown)
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
