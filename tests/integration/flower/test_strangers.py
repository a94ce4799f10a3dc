"""Real processes: a node that refuses the server's code, one whose error has data in its text, and
what stays on the server's disk.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from tests.integration.flower.conftest import Start

from fedclade.integrations.flower.app_template import new_app

pytestmark = pytest.mark.slow
PATIENT = "Jane Doe, born 1970-01-01"


def files_with(folder: Path, content: bytes) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and content in file.read_bytes()]


def test_code_texts_and_weights_stay_where_they_belong(
    start_federation: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    app, other = tmp_path / "clinics", tmp_path / "other" / "clinics"
    for folder in (app, other):
        folder.parent.mkdir(exist_ok=True)
        new_app(folder)
    task = app / "clinics" / "task.py"
    leak = f'    if node.get("leak"):\n        raise ValueError("{PATIENT}")\n'
    text = task.read_text()
    line = '    number, nodes = int(node["partition-id"])'
    assert line in text
    task.write_text(text.replace(line, leak + line))
    configs = ["", "leak=true", f'any-app=false app="{other}"', f'any-app=false app="{app}"']
    federation: Any = start_federation(4, secure=False, node_config=configs)
    out = tmp_path / "out"
    settings = {
        "method.name": "fedavg",
        "run.rounds": 2,
        "federation.nodes": 2,
        "federation.out": str(out),
    }
    assert federation.run(app, settings) == 0
    shown = capfd.readouterr().out
    run = out / "run-1"
    # node-0 runs any app, node-3 runs this app from its own folder.
    assert json.loads((run / "summary.json").read_text())["clients"] == 4
    sites = {
        client["site"] for client in json.loads((run / "federation.json").read_text())["clients"]
    }
    assert sites == {"node-0", "node-3"}
    lines = [line for line in shown.splitlines() if "not used" in line]
    assert [line for line in lines if "node-2: " in line and "policy.apps" in line]
    reason = "ValueError (its text is in the log of the node)"
    assert [line for line in lines if "node-1 (node " in line and reason in line]
    assert PATIENT not in shown
    logs = federation.plan.folder / "logs"
    with_patient = files_with(federation.plan.folder, PATIENT.encode())
    assert logs / "node-1.log" in with_patient
    # Besides, the text is in the app itself, which the server has.
    assert not [
        file
        for file in (logs / "superlink.log", *out.rglob("*"))
        if file.is_file() and PATIENT.encode() in file.read_bytes()
    ]
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    assert stat.S_IMODE(federation.plan.folder.stat().st_mode) == 0o700
    weights = load_file(run / "models" / "models.safetensors")
    database = federation.plan.folder / "superlink.db"
    rows = [value.numpy().tobytes()[:64] for value in weights.values() if value.numel() > 100]
    assert rows
    federation.down()
    assert database.is_file()
    for row in rows:
        assert not files_with(database.parent, row) or all(
            "models" in file.parts or "client_state" in file.parts
            for file in files_with(database.parent, row)
        )
