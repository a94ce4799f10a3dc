"""The rounds of a run for TensorBoard: event files in the run directory, written during the run.

They are in the directory itself, because TensorBoard names a run by the folder of its event files.
"""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fedclade.errors import InvalidInputError
from fedclade.io.atomic import translate_os_errors
from fedclade.io.run_dir import RunDirectory
from fedclade.io.schemas import RoundRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_MEASURES = ("accuracy", "loss", "perplexity")
_DATA = ("train", "validation")
_GROUPS = {
    "bytes_up": "traffic",
    "bytes_down": "traffic",
    "seconds": "time",
    "clients": "groups",
    "clusters": "groups",
    "ari": "groups",
}


def check_installed() -> None:
    """Raise `InvalidInputError` if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise InvalidInputError(
            "--track tensorboard: TensorBoard is not installed. Install it with: pip install"
            " 'fedclade[track]'",
            "--track",
        )


class Tracker:
    """A context manager around a run; `after_round` is called with each round's row after the run
    has written it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: SummaryWriter | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.writer is not None:
            # If the run has failed, its error is more important.
            with suppress(OSError) if error is not None else translate_os_errors(self.folder):
                self.writer.close()

    def after_round(self, row: RoundRecord) -> None:
        with translate_os_errors(self.folder):
            if self.writer is not None:
                _write(self.writer, row)
            else:
                self.writer = self._start()

    def _start(self) -> SummaryWriter:
        # The import takes a second.
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run may go back to its last checkpoint, and may not have been tracked before. So
        # all rounds are written again, and `purge_step` makes TensorBoard discard the earlier ones.
        writer = SummaryWriter(str(self.folder), purge_step=0)
        for earlier in RunDirectory(self.folder).history():
            _write(writer, earlier)
        return writer


def _write(writer: SummaryWriter, row: RoundRecord) -> None:
    """Write every number of the row except the number of its round, and the value of each group."""
    for name, value in row.items():
        if name != "round" and isinstance(value, int | float):
            writer.add_scalar(tag(name), value, row["round"])
    for group, _, value in row.get("by_cluster", ()):
        if value is not None:
            measure = row.get("by_cluster_of", "accuracy")
            writer.add_scalar(f"{measure} by group/group {group}", value, row["round"])


def tag(name: str) -> str:
    """The tag of a number of rounds.jsonl: TensorBoard groups tags by the part before the slash."""
    data, _, measured = name.partition("_")
    part = f"{data}_" if data in _DATA else ""
    for measure in _MEASURES:
        if (measured if part else name) == measure:
            return f"{measure}/{data if part else 'test'}"
        if (measured if part else name).startswith(f"{measure}_"):
            return f"{measure}/{part}{name.removeprefix(part).removeprefix(f'{measure}_')}"
    return f"{_GROUPS.get(name, 'metrics')}/{name}"
