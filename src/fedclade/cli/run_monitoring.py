"""Progress, live page, event files and report of a run: what `run` and `compare` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedclade.cli.console import new_folder, out_console, print_err, print_out
from fedclade.cli.progress import training
from fedclade.errors import FedcladeError, InvalidInputError, WriteError

if TYPE_CHECKING:
    from fedclade.io.schemas import RoundRecord
    from fedclade.training.callbacks import OnRound


@dataclass(frozen=True)
class RunOutput:
    """What a command shows and writes in addition to the run: --quiet, --live, --port, --track and
    --report.
    """

    quiet: bool
    live: bool
    port: int | None
    track: str | None
    report: bool

    def __post_init__(self) -> None:
        if self.port is not None and not self.live:
            raise InvalidInputError(f"--port {self.port}: needs --live.", "--port")
        if self.track is not None:
            from fedclade.integrations.trackers import check_tracker

            check_tracker(self.track)

    @contextmanager
    def live_page(self, folder: Path) -> Iterator[None]:
        """With --live, serve the report of the folder inside this context."""
        if not self.live:
            yield
            return
        from fedclade.analysis.report.live_server import Live

        with Live(folder, self.port or 0) as page:
            print_err(f"live report, on this machine only, until the command ends: {page.address}")
            yield

    @contextmanager
    def on_round(self, label: str, rounds: int, folder: Path) -> Iterator[OnRound]:
        """The callback for each round's row of one run: progress and event files."""
        with ExitStack() as stack:
            callbacks: list[OnRound] = [
                stack.enter_context(training(label, rounds, out_console, self.quiet))
            ]
            if self.track is not None:
                from fedclade.integrations.trackers import tracker

                tracked = tracker(self.track, folder)
                stack.enter_context(tracked)
                callbacks.append(tracked.after_round)

            def on_round(row: RoundRecord) -> None:
                for callback in callbacks:
                    callback(row)

            yield on_round

    def write_report(self, folder: Path) -> Path | None:
        """Write report.html. If that fails, print a warning: the run itself is complete.

        Returns:
            The path of the page; None if there is none.
        """
        if not self.report:
            return None
        from fedclade.analysis import report

        try:
            path = report.write_report([folder], folder / "report.html")
        except (FedcladeError, OSError) as error:
            print_err(f"the report could not be written ({error}).")
            return None
        if not self.quiet:
            print_out(f"Report: {path}")
        return path


def output_folder(out: Path | None, resume: bool, kind: str, default: str) -> Path:
    """The folder of --out, or a new one under runs/. --resume needs --out."""
    if resume and out is None:
        raise InvalidInputError(
            f"--resume: give the folder of the {kind} with --out DIR.", "--resume"
        )
    return out or new_folder(default)


@contextmanager
def resumable_errors(folder: Path) -> Iterator[None]:
    """On Ctrl-C or a full disk, show how to continue the run in this folder."""
    command = f"the same command and --out {folder} --resume"
    try:
        yield
    except KeyboardInterrupt:
        print_err(f"interrupted; continue with {command}")
        raise SystemExit(130) from None
    except WriteError as error:
        raise WriteError(f"{error} Continue with {command}.", error.field) from error
