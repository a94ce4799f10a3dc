"""Secure sums between real processes: SuperLink and SuperNodes on loopback."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from tests.integration.flower.conftest import Start

from fedclade.integrations.flower.app_template import new_app
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


HOSPITALS = 10
MORTAL = """
import os
import signal

from fedclade.engines.remote.node import Node

from clinics import task

answer = Node.answer


# Two hospitals die in round 2 when their vectors are masked, before these are sent. In round 3
# their new processes have no keys.
def deadly(node, message):
    reply = answer(node, message)
    is_map = message.header["kind"] in ("map", "secure_map")
    if is_map and message.header["round"] == 2 and task.HOSPITAL in (1, 7):
        os.kill(os.getpid(), signal.SIGKILL)
    return reply


Node.answer = deadly
"""


@pytest.fixture(scope="module")
def ten_hospitals(start_federation: Start) -> Federation:
    found: Federation = start_federation(HOSPITALS, secure=False)
    return found


@pytest.fixture(scope="module")
def mortal_app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An app with one client on each node, two of which kill their process in mid-protocol."""
    folder = tmp_path_factory.mktemp("apps") / "clinics"
    new_app(folder)
    task, client = folder / "clinics" / "task.py", folder / "clinics" / "client_app.py"
    text = task.read_text()
    text = text.replace("clients=2 * nodes", "clients=nodes")
    text = text.replace(
        'return {f"ward-{ward}": everyone.arrays(2 * number + ward) for ward in range(2)}',
        "global HOSPITAL\n    HOSPITAL = number\n"
        '    return {f"hospital-{number}": everyone.arrays(number)}',
    )
    assert text.count("HOSPITAL") == 2
    task.write_text(text + "\n\nHOSPITAL = -1\n")
    client.write_text(client.read_text() + MORTAL)
    return folder


@pytest.mark.skipif(
    psutil.virtual_memory().total < 12 << 30, reason="ten nodes need 12 GiB of memory"
)
@pytest.mark.parametrize("method", ["fedavg", "scaffold", "ifca", "clade_groups", "clade"])
def test_with_two_of_ten_clients_killed_it_is_the_plain_run_without_them(
    method: str, ten_hospitals: Federation, mortal_app: Path, tmp_path: Path
) -> None:
    runs = []
    for secure in (False, True):
        settings: dict[str, Any] = {
            "method.name": method,
            "method.settings": "clusters = 2" if method == "ifca" else "",
            "run.rounds": 3,
            "federation.nodes": HOSPITALS,
            "federation.out": str(tmp_path / str(secure)),
            "privacy.secure_sum": secure,
        }
        assert ten_hospitals.run(mortal_app, settings) == 0
        runs.append(tmp_path / str(secure) / "run-1")
    lost = [
        [{failure["client"] for failure in row["failures"]} for row in rounds(run)] for run in runs
    ]
    assert [len(clients) for clients in lost[0]] == [0, 2, 0]
    assert lost[1] == lost[0]
    plain, secured = map(StoredModels, runs)
    assert torch.equal(plain.model_ids, secured.model_ids)
    largest = 0.0
    for model in plain.model_ids.unique().tolist():
        for name, value in plain.row(model).items():
            torch.testing.assert_close(secured.row(model)[name], value, atol=1e-4, rtol=0)
            largest = max(largest, float((secured.row(model)[name] - value).abs().max()))
    print(method, "largest difference", largest, "models", len(plain.model_ids.unique()))
