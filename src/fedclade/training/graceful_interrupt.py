"""Ctrl-C during a run."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from fedclade.io.schemas import RoundRecord


class Interrupt:
    """A context in which the first Ctrl-C interrupts after the current round, and the second one at
    once.

    Where another handler is set, or in another thread than the main one, Ctrl-C works as before.
    """

    asked = False

    def after_round(self, row: RoundRecord) -> None:
        if self.asked:
            raise KeyboardInterrupt

    def __enter__(self) -> Self:
        mine = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        self._before: Any = signal.signal(signal.SIGINT, self._first) if mine else None
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
        self.asked = True
        signal.signal(signal.SIGINT, self._before)
        print("\nending after this round; Ctrl-C again ends at once", file=sys.stderr, flush=True)
