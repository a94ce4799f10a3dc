"""Workers that are Ray actors, with actors that only note their calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fedclade.engines.sharded.calls import Answer, encode

ray_workers = pytest.importorskip(
    "fedclade.integrations.ray_workers",
    reason="Ray is not installed: pip install 'fedclade[ray]'",
    exc_type=ImportError,
)


class NotingActor:
    """An actor whose methods are done in the order of their calls, as Ray's are."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*arguments: object) -> list[str]:
            self.calls.append(name)
            return list(self.calls)

        return SimpleNamespace(remote=remote)


def test_the_limit_of_starting_does_not_count_the_time_of_reading_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is waited for with a limit must not be behind the call that reads the data."""
    limited: list[list[str]] = []

    def get(reference: Any, timeout: float | None = None) -> Any:
        if timeout is not None:
            limited.extend(reference)
        return encode(Answer())

    monkeypatch.setattr(ray_workers.ray, "get", get)
    workers = object.__new__(ray_workers.RayWorkers)
    workers.count, workers._plan, workers.actors = 2, None, {}
    workers._new_actor = NotingActor
    workers._start(range(2))
    assert limited == [["process_id"]] * 2
    assert [actor.calls for actor in workers.actors.values()] == [["process_id", "build"]] * 2
