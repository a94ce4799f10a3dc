"""The app that `fedclade flower new` writes, run with `flwr run` in Flower's simulation; for
deployment see test_deployment.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")
pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedclade[flower]'")

from fedclade.integrations.flower.local_deployment.supervisor import environment, free_port

pytestmark = pytest.mark.slow


@pytest.fixture
def simulating(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment in which `flwr run APP sim` reaches a SuperLink that simulates its nodes."""
    port, home = free_port(), tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "sim"\n[superlink.sim]\naddress = "127.0.0.1:{port}"\ninsecure ='
        " true\n"
    )
    env = {**environment(home), "FEDCLADE_HOME": str(tmp_path / "homes")}
    command = [
        "flower-superlink",
        "--insecure",
        "--simulation",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--database",
        str(home / "db"),
    ]
    with (tmp_path / "superlink.log").open("w") as log:
        link = subprocess.Popen(
            command, env=env, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True
        )
    try:
        end = time.monotonic() + 60
        while subprocess.run(["flwr", "list", "sim"], env=env, capture_output=True).returncode:
            assert time.monotonic() < end, (tmp_path / "superlink.log").read_text()
            time.sleep(1)
        yield env
    finally:
        os.killpg(link.pid, signal.SIGTERM)
        link.wait(30)


def test_the_template_runs_in_simulation_without_changes(
    simulating: dict[str, str], tmp_path: Path
) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "fedclade", "flower", "new", str(tmp_path / "clinics")],
        env=simulating,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    assert "task.py" in made.stdout
    config = (
        f'federation.nodes=3 federation.out="{tmp_path / "out"}" run.rounds=2 method.name="fedavg"'
    )
    command = ["flwr", "run", str(tmp_path / "clinics"), "sim", "--stream", "--run-config", config]
    done = subprocess.run(
        [*command, "--federation-config", "num-supernodes=3"],
        env=simulating,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = tmp_path / "out" / "run-1" / "summary.json"
    assert summary.exists(), done.stdout + (tmp_path / "superlink.log").read_text()
    content = json.loads(summary.read_text())
    assert tuple(content[key] for key in ("engine", "clients", "rounds", "failures")) == (
        "flower",
        6,
        2,
        0,
    )
    assert len(list((tmp_path / "homes" / "nodes").glob("*/models/*.safetensors"))) == 6
