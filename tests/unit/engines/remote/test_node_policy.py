"""What a node counts, if several of its processes count at once."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from fedclade.engines.remote.node_policy import NO_LIMITS, LookCounter


def test_looks_of_two_processes_at_once_both_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads with counters of their own are to the lock what processes are."""
    read = LookCounter._read

    def slow_read(self: LookCounter) -> dict[str, int]:
        counts = read(self)
        time.sleep(0.05)  # the other one reads the same counts, unless it waits
        return counts

    monkeypatch.setattr(LookCounter, "_read", slow_read)
    file = tmp_path / "west" / "looks.json"
    threads = [
        threading.Thread(target=LookCounter(file).add, args=(NO_LIMITS, 1, number))
        for number in (0, 1, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads(file.read_text()) == {"looks": 3, "signatures": 2}
