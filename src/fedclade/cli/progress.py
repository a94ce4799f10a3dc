"""Progress of reading files, of a run and of a diagnosis."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fedclade.cli.console import log_lines
from fedclade.training.progress_display import display

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from fedclade.training.callbacks import OnRound

_SILENCE = 30.0  # seconds without a line


@contextmanager
def reading(console: Console, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """The progress of reading files: a bar on a terminal, from the first file on.

    Yields:
        The function to call with the number of files that are read and their number in all.
    """
    if quiet or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: list[TaskID] = []

        def update(done: int, total: int) -> None:
            if not tasks:
                tasks.append(progress.add_task("reading images", total=total))
            progress.update(tasks[0], completed=done)

        yield update


@contextmanager
def training(label: str, rounds: int, console: Console, quiet: bool) -> Iterator[OnRound]:
    """The progress of a run. After the first Ctrl-C a bar says that the run stops.

    Yields:
        The function to call with each round's row.
    """
    with display(label, rounds, console, quiet) as shown, log_lines.calling(shown.stopping):
        yield shown.after_round


@contextmanager
def diagnosing(console: Console) -> Iterator[Callable[[str, float, int], None]]:
    """The progress of a diagnosis: a bar on a terminal, elsewhere a line every 30 seconds.

    Yields:
        The function to call with what is done now, the number of finished pilot runs and their
        number in all.
    """
    if not console.is_terminal:
        since = time.perf_counter()

        def line(label: str, done: float, total: int) -> None:
            nonlocal since
            if time.perf_counter() - since >= _SILENCE:
                since = time.perf_counter()
                console.print(f"diagnose: {label}", markup=False)

        yield line
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("[bold]{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("comparing the clients", total=None)

        def update(label: str, done: float, total: int) -> None:
            progress.update(task, description=label, completed=done, total=total)

        yield update
