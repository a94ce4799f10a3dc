"""Memory that runs out, as the person at the terminal meets it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.integration.cli.conftest import Call

from fedclade.engines import simulator
from fedclade.engines.client_loop import ClientBatch

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has …")
SHORT = ["run", "quickstart", "--set", "run.rounds=2", "-q", "--no-report", "--out", "x"]


@pytest.mark.filterwarnings("always:memory")
def test_one_line_says_that_fewer_run_at_a_time(
    command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = simulator.run_program

    def cramped(program: Any, lanes: ClientBatch, *others: Any) -> Any:
        if len(lanes.client) > 3:
            raise FULL
        return fold(program, lanes, *others)

    monkeypatch.setattr(simulator, "run_program", cramped)
    code, out, complaint = command(*SHORT, "--set", "engine.chunk=4")
    assert (code, out) == (0, "")
    assert complaint.splitlines() == [
        "fedclade: memory: 4 clients at a time do not fit into that of cpu; those of this step who"
        " were not done run again, 2 at a time (engine.chunk=2 has it so from the start)."
    ]


def test_where_fewer_at_a_time_do_not_help_it_is_one_line_too(
    command: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any) -> Any:
        raise FULL

    monkeypatch.setattr(simulator, "in_order_asked", full)
    code, out, complaint = command(*SHORT)
    assert (code, out) == (2, "")
    assert complaint.splitlines() == [
        "fedclade: memory: there is none left (CUDA out of memory). Try a smaller engine.chunk,"
        " model or cohort; continue a run with --resume."
    ]
