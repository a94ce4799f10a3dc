"""The cost of a round: traffic, failures and time."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from fedclade.engines.base import Engine


class Counters:
    """The cost since this object was created: the difference of the engine's counters.

    Args:
        fed: the engine.
        begin: for a new run, the time of its start: the traffic before the first round is then
            included. None for later rounds.
    """

    def __init__(self, fed: Engine, begin: float | None = None) -> None:
        is_new_run = begin is not None
        self.begin = time.perf_counter() if begin is None else begin
        self.up, self.down = (0, 0) if is_new_run else (fed.traffic.up, fed.traffic.down)

    def row(self, fed: Engine) -> dict[str, Any]:
        """The failures and the traffic, as keys of the history."""
        return {
            "failures": failures(fed),
            "bytes_up": fed.traffic.up - self.up,
            "bytes_down": fed.traffic.down - self.down,
        }

    def seconds(self) -> float:
        """The time since the start."""
        return round(time.perf_counter() - self.begin, 4)


def failures(fed: Engine) -> list[dict[str, Any]]:
    """The failures since the last call."""
    return [asdict(failure) for failure in fed.pop_failures()]
