"""`--engine flower`: the same groups and models as the simulator's, for methods of every kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fedclade as fc
from fedclade.cli import main
from fedclade.io.run_dir import StoredModels

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedclade[flower]'")
pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedclade[flower]'")


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "fedclade",
        "run",
        "quickstart",
        "--out",
        str(folder),
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["clade", "fedavg", "cfl", "flt", "ifca", "scaffold", "flis_hc", "local"]
)
def test_gives_what_the_simulator_gives(method: str, tmp_path: Path) -> None:
    settings = ("--set", f"method.name={method}", "--set", "run.rounds=3")
    for engine, folder in (("simulator", "one"), ("flower", "other")):
        done = run(tmp_path / folder, "--engine", engine, *settings)
        assert done.returncode == 0, done.stderr
    one, other = (fc.load(tmp_path / folder) for folder in ("one", "other"))
    assert other.summary["engine"] == "flower"
    assert torch.equal(one.clusters, other.clusters)
    assert other.summary["accuracy"] == pytest.approx(one.summary["accuracy"], abs=0.5)
    if method == "local":  # personal models are only on the nodes' disks
        files = sorted((tmp_path / "other" / "nodes").glob("*/models/*.safetensors"))
        assert len(files) == len(one.clusters)
        return
    here, there = (StoredModels(tmp_path / folder) for folder in ("one", "other"))
    for row in range(int(one.clusters.max()) + 1):
        expected = here.row(row)
        for name, value in there.row(row).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_goes_on_where_it_stopped(tmp_path: Path) -> None:
    settings = (
        "--engine",
        "flower",
        "--nodes",
        "2",
        "--set",
        "method.name=scaffold",
        "--set",
        "run.checkpoint_every=1",
    )
    assert run(tmp_path / "whole", *settings, "--set", "run.rounds=4").returncode == 0
    assert run(tmp_path / "parts", *settings, "--set", "run.rounds=2").returncode == 0
    assert run(tmp_path / "parts", *settings, "--set", "run.rounds=4", "--resume").returncode == 0
    whole, parts = (StoredModels(tmp_path / folder).row(0) for folder in ("whole", "parts"))
    for name, value in whole.items():
        assert torch.equal(value, parts[name])
    assert len((tmp_path / "parts" / "rounds.jsonl").read_text().splitlines()) == 4
    assert json.loads((tmp_path / "parts" / "summary.json").read_text())["rounds"] == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--engine", "flour"), "--engine flour: must be simulator or flower."),
        (("--nodes", "3"), "--nodes: only --engine flower has any."),
        (
            ("--engine", "flower", "--nodes", "1000"),
            "--nodes = 1000: must be from 1 to the number of clients, 40.",
        ),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["fedclade", "run", "quickstart", "--out", out, *options])
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err.strip() == f"fedclade: {message}"
