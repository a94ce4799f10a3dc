"""The progress of a run: a bar on a terminal or in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console

    from fedclade.io.schemas import RoundRecord

_SILENCE = 30.0  # seconds without a line
_LONG_START = 5.0


class Display(Protocol):
    """A context manager around a run; `after_round` is called with each round's row, `stopping`
    when the user has pressed Ctrl-C.
    """

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
    def after_round(self, row: RoundRecord) -> None: ...
    def stopping(self) -> None: ...


def display(label: str, rounds: int, console: Console, quiet: bool) -> Display:
    if quiet:
        return _Silent()
    return _Bar(label, rounds, console) if console.is_terminal else _Lines(label, rounds, console)


def user_display(label: str, rounds: int) -> Display:
    """The display of `fc.run(progress=True)`: a bar in a notebook or on a terminal, else lines on
    stderr.

    Args:
        label: what is running.
        rounds: the number of its rounds.
    """
    if _is_notebook():
        return _NotebookBar(label, rounds)
    from rich.console import Console

    return display(label, rounds, Console(stderr=True, highlight=False), quiet=False)


class _Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def after_round(self, row: RoundRecord) -> None:
        return None

    def stopping(self) -> None:
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
        self.label, self.score = label, ""
        self.task = self.progress.add_task(label, total=rounds, score="", clusters="", pace="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.update(self.task, description=self.label)
        self.progress.stop()

    def stopping(self) -> None:
        self.progress.update(
            self.task, description=f"{self.label} stops after this round (Ctrl-C again: now)"
        )

    def after_round(self, row: RoundRecord) -> None:
        if "train_loss" in row:
            self.score = _score(row)
        pace = f"{row['seconds']:.2f} s/round"
        self.progress.update(
            self.task, completed=row["round"], clusters=_groups(row), pace=pace, score=self.score
        )


class _NotebookBar(_Silent):
    """A bar in the output of a notebook's cell, which each round replaces."""

    def __init__(self, label: str, rounds: int) -> None:
        # Here, because it imports torch, which the help of a command does not need.
        from fedclade.core.notebook_html import html_progress

        shown: Any = import_module("IPython.display")  # a notebook has IPython
        self.label, self.rounds, self.score, self.bar = label, rounds, "", html_progress
        self.html = shown.HTML
        self.handle = shown.display(self.html(self.bar(label, 0, rounds, "")), display_id=True)

    def after_round(self, row: RoundRecord) -> None:
        if "train_loss" in row:
            self.score = _score(row)
        note = ", ".join(filter(None, [self.score, _groups(row)]))
        self.handle.update(self.html(self.bar(self.label, row["round"], self.rounds, note)))


def _is_notebook() -> bool:
    """Whether the code runs in a cell of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


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
