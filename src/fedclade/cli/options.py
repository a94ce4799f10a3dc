"""What all commands share: where they print, and the options they have in common."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

_terminal = Console(highlight=False)
# A log file has no width: wide enough for every table.
out_console = _terminal if _terminal.is_terminal else Console(highlight=False, width=120)
error_console = Console(stderr=True, highlight=False)

DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder for the results (default: a new one under runs/).")
]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on where the run in --out stopped.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
DataRootOption = Annotated[
    str | None, typer.Option("--data-root", help="Folder in which data sets are looked for first.")
]


def print_err(message: str) -> None:
    """One line for a person, on stderr."""
    error_console.print(f"fedclade: {message}", markup=False, soft_wrap=True)


def print_name_table(known: Mapping[str, str]) -> None:
    """Names, with a line on each."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, about in known.items():
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(about))
    out_console.print(table)


def new_folder(name: str) -> Path:
    """runs/NAME, or the first runs/NAME-2, -3, … that is free: a default name never stands in a
    newcomer's way.
    """
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def comma_separated(text: str | None) -> tuple[str, ...]:
    """Names with commas between."""
    return tuple(name.strip() for name in (text or "").split(",") if name.strip())
