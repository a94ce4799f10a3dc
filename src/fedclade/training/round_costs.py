"""What a round costs."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from fedclade.engines.base import Engine


class Counters:
    """What a round cost: the difference of the federation's counters since this was made."""

    def __init__(self, fed: Engine, begin: float | None = None) -> None:
        fresh = begin is not None  # the one-off phase before the first round counts from zero
        self.begin = time.perf_counter() if begin is None else begin
        self.up, self.down = (0, 0) if fresh else (fed.traffic.up, fed.traffic.down)

    def row(self, fed: Engine) -> dict[str, Any]:
        return {
            "failures": self.failures(fed),
            "bytes_up": fed.traffic.up - self.up,
            "bytes_down": fed.traffic.down - self.down,
        }

    def failures(self, fed: Engine) -> list[dict[str, Any]]:
        """Who failed since this was last asked."""
        return [asdict(failure) for failure in fed.pop_failures()]

    def seconds(self) -> float:
        return round(time.perf_counter() - self.begin, 4)
