"""Secure sums between real processes: SuperLink and SuperNodes on loopback."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from tests.integration.flower.conftest import Start

from fedclade.integrations.flower.local_deployment.deployment import Federation
from fedclade.integrations.flower.local_deployment.supervisor import processes
from fedclade.io.run_dir import StoredModels

pytestmark = pytest.mark.slow
NODES = 4


@pytest.fixture(scope="module")
def federation(start_federation: Start) -> Federation:
    found: Federation = start_federation(NODES, secure=False)
    return found


@pytest.mark.parametrize("method", ["fedavg", "clade_groups", "scaffold", "ifca"])
def test_models_are_those_of_plain_sums(
    method: str, federation: Federation, app: Path, tmp_path: Path
) -> None:
    runs = []
    for secure in (False, True):
        settings: dict[str, Any] = {
            "method.name": method,
            "method.settings": "clusters = 2" if method == "ifca" else "",
            "run.rounds": 3,
            "federation.nodes": NODES,
            "federation.out": str(tmp_path / str(secure)),
            "privacy.secure_sum": secure,
        }
        assert federation.run(app, settings) == 0
        runs.append(tmp_path / str(secure) / "run-1")
    rows = [json.loads(line) for line in (runs[1] / "rounds.jsonl").read_text().splitlines()]
    assert [row["failures"] for row in rows] == [[], [], []]
    plain, secured = map(StoredModels, runs)
    assert torch.equal(plain.model_ids, secured.model_ids)
    for model in plain.model_ids.unique().tolist():
        for name, value in plain.row(model).items():
            torch.testing.assert_close(secured.row(model)[name], value, atol=1e-4, rtol=0)


def rounds(run: Path) -> list[dict[str, Any]]:
    file = run / "rounds.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_node_that_dies_costs_its_clients_one_round(
    federation: Federation, app: Path, tmp_path: Path
) -> None:
    """Its process is replaced by one without the keys of the run, which then gets new ones."""
    settings: dict[str, Any] = {
        "method.name": "fedavg",
        "run.rounds": 8,
        "federation.nodes": NODES,
        "federation.out": str(tmp_path),
        "privacy.secure_sum": True,
    }
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(federation.run(app, settings)))
    thread.start()
    end = time.monotonic() + 300
    while len(rounds(tmp_path / "run-1")) < 2:
        assert time.monotonic() < end, "no round ended"
        time.sleep(0.1)
    executors = [
        process.pid
        for found in processes(federation.plan.folder).values()
        for process in found
        if "fedclade.integrations.flower.executor" in process.cmdline()
    ]
    os.kill(executors[0], signal.SIGKILL)
    thread.join(600)
    assert codes == [0]
    history = rounds(tmp_path / "run-1")
    assert [row["round"] for row in history] == list(range(1, 9))
    failures = [len(row["failures"]) for row in history]
    assert 0 < sum(failures) <= 4  # two clients, in one round or two
    assert failures[-1] == 0
