"""Ctrl-C during a run."""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from fedclade.io.schemas import RoundRecord

STOPPING = "Stopping after this round. Press Ctrl-C again to stop immediately."
# Without a logging configuration, Python writes warnings to stderr.
_log = logging.getLogger("fedclade")


class Interrupt:
    """A context in which the first Ctrl-C interrupts after the current round, and the second one
    immediately.

    It does not change Ctrl-C in other threads than the main thread, or if the program has set
    another handler.
    """

    requested = False

    def after_round(self, row: RoundRecord) -> None:
        """Interrupt the run if Ctrl-C was pressed."""
        if self.requested:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        replaces_handler = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        self._before: Any = signal.signal(signal.SIGINT, self._first) if replaces_handler else None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _first(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, self._before)
        _log.warning(STOPPING)
