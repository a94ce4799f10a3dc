"""Out of memory: what the command line prints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.integration.cli.conftest import Call

from fedclade.engines import simulator
from fedclade.engines.chunk_execution import ClientBatch

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …")
SHORT = ["run", "quickstart", "--set", "run.rounds=2", "-q", "--no-report", "--out", "x"]


@pytest.mark.filterwarnings("always:Out of memory")
def test_a_smaller_chunk_is_reported_in_one_line(
    command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_program = simulator.run_program

    def cramped(program: Any, clients: ClientBatch, *others: Any) -> Any:
        if len(clients.client_ids) > 3:
            raise FULL
        return run_program(program, clients, *others)

    monkeypatch.setattr(simulator, "run_program", cramped)
    code, out, err = command(*SHORT, "--set", "engine.chunk=4")
    assert (code, out) == (0, "")
    (line,) = err.splitlines()
    assert line.startswith("fedclade: ")
    assert "engine.chunk=2" in line


def test_out_of_memory_without_a_remedy_is_one_line_too(
    command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise FULL

    monkeypatch.setattr(simulator, "ordered_results", full)
    code, out, err = command(*SHORT)
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("fedclade: memory: ")
    assert "(CUDA out of memory)" in line
    assert "engine.chunk" in line
    assert "--resume" in line
