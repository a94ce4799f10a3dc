"""A run keeps a line of history for each round, and nothing else: memory does not grow with
rounds.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fedclade as fc
from fedclade.data import Clients
from fedclade.engines import fx_tracing

FROM, TO = 25, 45  # one-time allocations are before these rounds (Clade compares in round 20)


def containers(value: Any) -> int:
    """How many objects a row of the history is: itself, and the lists in it."""
    inside = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return isinstance(value, dict | list | tuple) + sum(map(containers, inside))


def grown(method: fc.Method, clients: Clients, out: Path) -> tuple[float, int]:
    """What a run keeps per round in addition to its row: objects, and bytes of tensors."""
    rows, objects, held = 0, [], []

    def on_round(row: dict[str, Any]) -> None:
        nonlocal rows
        rows += containers(row)
        if row["round"] in (FROM, TO):
            gc.collect()
            alive = gc.get_objects()
            objects.append(len(alive) - rows)
            held.append(sum(each.nbytes for each in alive if issubclass(type(each), Tensor)))

    settings: dict[str, Any] = {
        "lr": 0.1,
        "eval_every": 5,
        "checkpoint_every": 5,
        "threads": 1,
        "device": "cpu",
        "on_round": on_round,
    }
    gc.freeze()  # what others have left behind is not counted, nor when it goes
    try:
        fc.run(
            method,
            clients,
            fc.models.MLP(8),
            rounds=TO + 5,
            clients_per_round=0.3,
            out=out,
            **settings,
        )
    finally:
        gc.unfreeze()
    return (objects[1] - objects[0]) / (TO - FROM), (held[1] - held[0]) // (TO - FROM)


@pytest.fixture(autouse=True)
def _no_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """No traces: the time of a trace depends on the history of this process. Their number is
    bounded (tests/unit/engines/test_compile_cache.py).
    """
    monkeypatch.setattr(fx_tracing, "TRACE_AFTER", 10**9)


# Without CFL, which keeps data of every group and makes new groups in each round.
METHODS = [
    fc.FedAvg(),
    fc.Local(),
    fc.SCAFFOLD(),
    fc.IFCA(clusters=2),
    fc.Clade(),
    fc.FLISHC(),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_run_keeps_only_the_row_of_each_round(
    method: fc.Method, digits: Clients, tmp_path: Path
) -> None:
    objects, held = grown(method, digits, tmp_path)
    assert objects < 0.5
    assert held == 0


@dataclass(frozen=True)
class Hoarder(fc.FedAvg):
    """FedAvg that keeps an object for each round, or one that grows."""

    kept: ClassVar[list[Tensor]] = []
    together: ClassVar[bool] = False

    def round(self, *given: Any) -> fc.core.State:
        if self.together:
            self.kept[:] = [torch.cat([*self.kept, torch.zeros(10)])]
        else:
            self.kept.append(torch.zeros(10))
        return super().round(*given)


@pytest.mark.parametrize("together", [False, True])
def test_a_leak_is_detected(together: bool, digits: Clients, tmp_path: Path) -> None:
    Hoarder.kept.clear()
    Hoarder.together = together
    objects, held = grown(Hoarder(), digits, tmp_path)
    assert held == 40
    assert (objects >= 0.5) is not together
