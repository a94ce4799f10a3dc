"""Runs in MLflow, read back through its client: a file store, and a server if there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedclade as fc
from fedclade.cli import main
from fedclade.errors import FedcladeWarning, InvalidInputError
from fedclade.integrations.mlflow import RUN_ID_FILE, MlflowTracker, track
from fedclade.io.run_dir import RunDirectory

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed (extra: mlflow)"
)
RUN = ["run", "quickstart", "--set", "run.eval_every=2", "--set", "method.name=clade"]


@pytest.fixture(autouse=True)
def file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's data in a folder."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)


def call(*arguments: str) -> None:
    done = CliRunner().invoke(main.app, list(arguments))
    if done.exception is not None:
        raise done.exception


def train(out: Path, rounds: int, *arguments: str) -> None:
    settings = ["--set", f"run.rounds={rounds}", "--no-report", "-q", "--device", "cpu"]
    call(*RUN, *settings, "--out", str(out), *arguments)


def runs(experiment: str = "fedclade") -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient()
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id]))


def history(run_id: str, name: str) -> dict[int, float]:
    """Round and value of a metric. A round that MLflow has twice is a failure."""
    from mlflow import MlflowClient

    metrics = MlflowClient().get_metric_history(run_id, name)
    assert len({metric.step for metric in metrics}) == len(metrics), name
    return {metric.step: metric.value for metric in metrics}


def artifacts(run_id: str, folder: str | None = None) -> set[str]:
    from mlflow import MlflowClient

    return {file.path for file in MlflowClient().list_artifacts(run_id, folder)}


def check_all(folder: Path, rounds: int) -> None:
    """The one run of MLflow has everything of the folder."""
    (run,) = runs()
    run_id, rows = run.info.run_id, RunDirectory(folder).history()
    assert run.info.status == "FINISHED"
    assert run.info.run_name == folder.name
    assert [row["round"] for row in rows] == list(range(1, rounds + 1))
    for name in ("clusters", "bytes_up", "seconds"):
        expected = {row["round"]: pytest.approx(row[name]) for row in rows}  # type: ignore[literal-required]
        assert history(run_id, name) == expected
    evaluated = [row for row in rows if "accuracy" in row]
    assert evaluated
    assert history(run_id, "accuracy") == {
        row["round"]: pytest.approx(row["accuracy"]) for row in evaluated
    }
    for group, clients, value in evaluated[-1]["by_cluster"]:
        last = evaluated[-1]["round"]
        assert history(run_id, f"group_{group}/clients")[last] == clients
        assert history(run_id, f"group_{group}/accuracy")[last] == pytest.approx(value)
    summary = json.loads((folder / "summary.json").read_text())
    assert history(run_id, "final/accuracy") == {rounds: pytest.approx(summary["accuracy"])}
    assert run.data.params["local.lr"] == str(RunDirectory(folder).tables()["local"]["lr"])
    assert run.data.params["method.name"] == "clade"
    expected_files = {"experiment.toml", "rounds.jsonl", "clients.csv", "summary.json"}
    assert artifacts(run_id) == expected_files | {"report.html", "models"}
    assert artifacts(run_id, "models") == {"models/models.safetensors"}


def test_a_run_is_tracked_live(tmp_path: Path) -> None:
    train(tmp_path / "run", 3, "--track", "mlflow")
    check_all(tmp_path / "run", 3)


def test_rounds_are_there_before_the_run_ends(tmp_path: Path) -> None:
    train(tmp_path / "run", 2)
    first, second = RunDirectory(tmp_path / "run").history()
    with MlflowTracker(tmp_path / "run") as tracker:
        tracker.after_round(first)
        tracker.after_round(second)
        (run,) = runs()
        assert run.info.status == "RUNNING"
        assert set(history(run.info.run_id, "seconds")) == {1, 2}
    check_all(tmp_path / "run", 2)


def test_a_finished_run_is_tracked_once_however_often(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, 3)
    models = (folder / "models" / "models.safetensors").read_bytes()
    call("track", str(folder), "--to", "mlflow")
    check_all(folder, 3)
    call("track", str(folder))
    check_all(folder, 3)
    assert (folder / "models" / "models.safetensors").read_bytes() == models


def test_a_resumed_run_continues_its_run_of_mlflow(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, 2, "--track", "mlflow")
    (first,) = runs()
    train(folder, 4, "--track", "mlflow", "--resume")
    (second,) = runs()
    assert first.info.run_id == second.info.run_id
    assert set(history(first.info.run_id, "seconds")) == {1, 2, 3, 4}
    assert set(history(first.info.run_id, "final/accuracy")) == {2, 4}


def test_a_run_that_was_deleted_or_is_at_another_server_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    folder = tmp_path / "run"
    train(folder, 2)
    first = track(folder)
    MlflowClient().delete_run(first)
    assert track(folder) != first
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "other").as_uri())
    track(folder)
    check_all(folder, 2)


def test_a_sweep_is_a_run_of_mlflow_for_each_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "sweep")
    train(tmp_path / "sweep", 1, "--set", "local.lr=0.1,0.2")
    call("track", str(tmp_path / "sweep"))
    assert {run.data.params["local.lr"] for run in runs("sweep")} == {"0.1", "0.2"}


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt, "KILLED"), (RuntimeError, "FAILED")]
)
def test_a_run_that_breaks_off_keeps_its_rounds(
    tmp_path: Path, error: type[BaseException], status: str
) -> None:
    train(tmp_path / "run", 2)
    with pytest.raises(error), MlflowTracker(tmp_path / "run"):
        raise error
    (run,) = runs()
    assert run.info.status == status
    assert set(history(run.info.run_id, "seconds")) == {1, 2}


def test_names_of_metrics_and_numbers_that_mlflow_refuses(tmp_path: Path) -> None:
    import torch

    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    clients = fc.data.from_arrays({"north": (x, y, x, y)})
    metrics = {"a(b)": fc.accuracy, "nan": lambda outputs, y: torch.full((len(y),), torch.nan)}
    fc.run(
        fc.FedAvg(),
        clients,
        fc.models.Logistic(),
        rounds=1,
        metrics=metrics,
        out=tmp_path / "run",
        device="cpu",
    )
    run_id = track(tmp_path / "run")
    assert set(history(run_id, "a_b_")) == {1}
    (run,) = runs()
    assert "nan" not in run.data.metrics
    assert "names.json" in artifacts(run_id)


def test_a_server_that_fails_during_the_run_costs_a_warning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def fail(*_: Any, **__: Any) -> None:
        raise MlflowException("gone")

    monkeypatch.setattr(MlflowClient, "log_batch", fail)
    with pytest.warns(FedcladeWarning) as caught:
        train(tmp_path / "run", 2, "--track", "mlflow")
    assert {warning.message.field for warning in caught} == {"--track"}  # type: ignore[union-attr]
    monkeypatch.undo()
    assert RunDirectory(tmp_path / "run").summary() is not None


def test_what_cannot_be_tracked_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        call("track", str(tmp_path / "none"))
    assert caught.value.field == str(tmp_path / "none")
    with pytest.raises(InvalidInputError) as caught:
        call("track", str(tmp_path), "--to", "wandb")
    assert caught.value.field == "--to"
    with pytest.raises(InvalidInputError) as caught:
        track(tmp_path)
    assert caught.value.field == str(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(InvalidInputError) as caught:
        train(tmp_path / "run", 1, "--track", "mlflow")
    assert caught.value.field == "--track"
    assert not (tmp_path / "run").exists()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server of MLflow on this machine. FEDCLADE_MLFLOW names the program `mlflow` of an
    environment with the package mlflow; mlflow-skinny has no server.
    """
    program = os.environ.get("FEDCLADE_MLFLOW", "")
    if shutil.which(program) is None:
        pytest.skip("FEDCLADE_MLFLOW does not name the program mlflow of the package mlflow")
    address = f"127.0.0.1:{free_port()}"
    host, port = address.split(":")
    options = ["--backend-store-uri", f"sqlite:///{tmp_path / 'mlflow.db'}", "--workers", "1"]
    options += ["--artifacts-destination", str(tmp_path / "artifacts")]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = subprocess.Popen(
        [program, "server", "--host", host, "--port", port, *options],
        env=environment,
        start_new_session=True,
    )
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{address}")
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait()


def test_a_server_gets_a_live_run_and_a_finished_one(server: str, tmp_path: Path) -> None:
    train(tmp_path / "run", 2, "--track", "mlflow")
    check_all(tmp_path / "run", 2)
    (tmp_path / "run" / RUN_ID_FILE).unlink()
    track(tmp_path / "run")
    assert {run.info.status for run in runs()} == {"FINISHED"}
    assert len(runs()) == 2
