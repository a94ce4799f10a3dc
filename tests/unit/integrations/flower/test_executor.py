"""When the process of a ClientApp is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from fedclade.integrations.flower import executor
from fedclade.integrations.flower.executor import Executor


@pytest.fixture
def process(tmp_path: Path) -> Executor:
    """A process that may answer three messages and grow by 100 bytes."""
    return Executor(str(tmp_path / "api"), b"secret", restart_after=3, max_growth=100)


def test_it_ends_after_its_last_message(process: Executor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_memory", lambda: 1000)
    process.first_memory = 1000
    spent = []
    for answered in range(5):
        process.answered = answered
        spent.append(process.is_spent)
    assert spent == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("answered", "memory", "spent"),
    [(0, 5000, False), (1, 1100, False), (1, 1101, True)],
    ids=["before its first message", "at the limit", "above the limit"],
)
def test_it_ends_if_its_memory_has_grown_since_its_first_message(
    process: Executor,
    answered: int,
    memory: int,
    spent: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "_memory", lambda: memory)
    process.answered, process.first_memory = answered, 1000
    assert process.is_spent is spent


def test_it_ends_before_it_imports_another_app(process: Executor) -> None:
    assert not process.must_restart_for("one")
    process.app_hash = "one"
    assert not process.must_restart_for("one")
    assert process.must_restart_for("two")
