"""Where the commands print, and the folders that they create by default."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_terminal = Console(highlight=False)
# A log file has no width: wide enough for every table.
out_console = _terminal if _terminal.is_terminal else Console(highlight=False, width=120)
error_console = Console(stderr=True, highlight=False)


def print_out(message: str) -> None:
    """Print a message on stdout, without markup and without adding line breaks."""
    out_console.print(message, markup=False, soft_wrap=True)


def print_json(document: Mapping[str, Any]) -> None:
    """Print a JSON document on stdout; with --json nothing else goes there."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def print_err(message: str) -> None:
    """Print one line for the user on stderr."""
    error_console.print(f"fedclade: {message}", markup=False, soft_wrap=True)


class LogLines(logging.Handler):
    """Shows the library's warnings as lines of the command. After the first Ctrl-C it calls a
    function instead: the line that says how to continue follows when the run has stopped.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.on_stop: Callable[[], None] | None = None

    @contextmanager
    def calling(self, on_stop: Callable[[], None]) -> Iterator[None]:
        """A context in which the first Ctrl-C calls this function."""
        self.on_stop = on_stop
        try:
            yield
        finally:
            self.on_stop = None

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record."""
        # Here, because the help of a command does not need it.
        from fedclade.training.graceful_interrupt import STOPPING

        if record.msg != STOPPING:
            print_err(record.getMessage())
        elif self.on_stop is not None:
            self.on_stop()


log_lines = LogLines()


def print_name_table(descriptions: Mapping[str, str]) -> None:
    """Print names, each with its one-line description."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, description in descriptions.items():
        table.add_row(f"[bold]{escape(name)}[/bold]", escape(description))
    out_console.print(table)


def new_folder(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, -3, … that does not exist."""
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder
