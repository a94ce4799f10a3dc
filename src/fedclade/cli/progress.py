"""Progress of a run: a bar on a terminal, plain lines elsewhere, nothing with --quiet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from fedclade.io.schemas import RoundRecord

_SILENCE = 30.0  # seconds without a line
_LONG_START = 5.0


class Display(Protocol):
    """A context manager around a run; `after_round` is called with each round's row."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def after_round(self, row: RoundRecord) -> None: ...


def display(label: str, rounds: int, console: Console, quiet: bool) -> Display:
    if quiet:
        return _Silent()
    return _Bar(label, rounds, console) if console.is_terminal else _Lines(label, rounds, console)


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


class _Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def after_round(self, row: RoundRecord) -> None:
        return None


class _Lines(_Silent):
    """A line for each evaluated round, and at least one every 30 seconds: for log files and CI."""

    def __init__(self, label: str, rounds: int, console: Console) -> None:
        self.label, self.rounds, self.console = label, rounds, console
        self.since = time.perf_counter()
        self.seconds: list[float] = []

    def after_round(self, row: RoundRecord) -> None:
        if row["round"] == 1 and row["seconds"] > _LONG_START:
            self.console.print(f"{self.label}: set-up and round 1 took {row['seconds']:.1f} s")
        self.seconds.append(row["seconds"])
        evaluated = "train_loss" in row
        if not evaluated and time.perf_counter() - self.since < _SILENCE:
            return
        from statistics import median  # here, because it takes long to import

        # The median, because the first round also contains what a method does once.
        pace = median(self.seconds)
        self.since, self.seconds = time.perf_counter(), []
        score = f"  {_score(row)}" if evaluated else ""
        self.console.print(
            f"{self.label}: round {row['round']}/{self.rounds}{score}  {_groups(row)}  {pace:.2f}"
            " s/round"
        )


class _Bar(_Silent):
    def __init__(self, label: str, rounds: int, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            TextColumn("{task.fields[clusters]}"),
            TextColumn("{task.fields[pace]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self.score = ""
        self.task = self.progress.add_task(label, total=rounds, score="", clusters="", pace="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def after_round(self, row: RoundRecord) -> None:
        if "train_loss" in row:
            self.score = _score(row)
        pace = f"{row['seconds']:.2f} s/round"
        self.progress.update(
            self.task, completed=row["round"], clusters=_groups(row), pace=pace, score=self.score
        )


def _groups(row: RoundRecord) -> str:
    return "1 group" if row["clusters"] == 1 else f"{row['clusters']} groups"


def _score(row: RoundRecord) -> str:
    if row.get("accuracy") is not None:
        return f"accuracy {row['accuracy']:.2f} %"
    if row.get("loss") is not None:
        return f"loss {row['loss']:.4f}"
    return (
        f"training loss {row['train_loss']:.4f}"
        if row["train_loss"] is not None
        else "not evaluated"
    )
