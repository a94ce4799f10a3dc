"""Memory that runs out, as the person at the terminal meets it."""

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
def test_one_line_says_that_fewer_run_at_a_time(
    command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_program = simulator.run_program

    def cramped(program: Any, clients: ClientBatch, *others: Any) -> Any:
        if len(clients.client_ids) > 3:
            raise FULL
        return run_program(program, clients, *others)

    monkeypatch.setattr(simulator, "run_program", cramped)
    code, out, complaint = command(*SHORT, "--set", "engine.chunk=4")
    assert (code, out) == (0, "")
    assert complaint.splitlines() == [
        "fedclade: Out of memory on cpu with 4 clients per chunk; retrying the unfinished clients"
        " with 2. Set engine.chunk=2 to avoid this."
    ]


def test_where_fewer_at_a_time_do_not_help_it_is_one_line_too(
    command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> Any:
        raise FULL

    monkeypatch.setattr(simulator, "ordered_results", full)
    code, out, complaint = command(*SHORT)
    assert (code, out) == (2, "")
    assert complaint.splitlines() == [
        "fedclade: memory: there is none left (CUDA out of memory). Try a smaller engine.chunk,"
        " model or cohort; continue a run with --resume."
    ]
