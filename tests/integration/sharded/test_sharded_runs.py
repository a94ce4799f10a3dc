"""`fedclade run` on Ray actors and under torchrun: the simulator's bytes, and errors for people."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Timer
from typing import Any

import pytest

import fedclade as fc
from fedclade.cli import main
from fedclade.engines.sharded.calls import Call
from fedclade.integrations import sharded_run
from fedclade.io.schemas import RoundRecord
from fedclade.training import experiment_file
from fedclade.training.shard_building import ExperimentSource

METHODS = ["fedavg", "scaffold", "cfl", "clade_groups", "clade"]
Command = Callable[..., tuple[int, str, str]]


def run(
    folder: Path, *options: str, launcher: tuple[str, ...] = (), address: str | None = None
) -> None:
    """Run the quickstart, on a running Ray cluster if its address is given."""
    command = [*(launcher or (sys.executable, "-m")), "fedclade", "run", "quickstart"]
    done = subprocess.run(
        [*command, "--out", str(folder), "--no-report", "--quiet", *options],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"} | ({"RAY_ADDRESS": address} if address else {}),
    )
    assert done.returncode == 0, done.stderr


def torchrun(processes: int) -> tuple[str, ...]:
    torchrun = ("torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m")
    return (sys.executable, "-m", *torchrun)


def are_same(first: Path, second: Path) -> bool:
    """Whether two runs wrote the same models, groups and accuracies."""
    names = ("models/models.safetensors", "clients.csv", "client_features.safetensors")
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def settings(method: str, rounds: int) -> tuple[str, ...]:
    return ("--set", f"method.name={method}", "--set", f"run.rounds={rounds}")


def test_ranks_of_torchrun_give_the_bytes_of_one_simulator(tmp_path: Path) -> None:
    run(tmp_path / "one", *settings("scaffold", 2))
    run(tmp_path / "two", *settings("scaffold", 2), launcher=torchrun(2))
    assert are_same(tmp_path / "one", tmp_path / "two")
    assert fc.load(tmp_path / "two").summary["engine"] == "torchrun"
    assert not (tmp_path / "two" / "client_state").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_ray_and_torchrun_give_the_bytes_of_one_simulator(method: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedclade[ray]'")
    run(tmp_path / "one", *settings(method, 4))
    for shards in (1, 2, 4):
        ray = tmp_path / f"ray-{shards}"
        run(ray, *settings(method, 4), "--engine", "ray", "--shards", str(shards))
        assert are_same(tmp_path / "one", ray)
    for processes in (2, 4):
        ranks = tmp_path / f"ranks-{processes}"
        run(ranks, *settings(method, 4), launcher=torchrun(processes))
        assert are_same(tmp_path / "one", ranks)


@pytest.mark.slow
def test_two_nodes_of_ray_give_the_bytes_of_one_simulator(tmp_path: Path) -> None:
    """Each node has one CPU, so it has one of the two workers."""
    cluster_utils = pytest.importorskip(
        "ray.cluster_utils", reason="Ray is not installed: pip install 'fedclade[ray]'"
    )
    run(tmp_path / "one", *settings("clade", 4))
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        cluster.add_node(num_cpus=1)
        shards = ("--engine", "ray", "--shards", "2", "--set", "engine.threads=1")
        run(tmp_path / "two", *settings("clade", 4), *shards, address=cluster.address)
    finally:
        cluster.shutdown()
    assert are_same(tmp_path / "one", tmp_path / "two")
    assert fc.load(tmp_path / "two").summary["engine"] == "ray"


@pytest.mark.slow
def test_a_run_continues_on_another_engine_with_another_number_of_shards(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedclade[ray]'")
    run(tmp_path / "one", *settings("scaffold", 6))
    folder = tmp_path / "several"
    run(folder, *settings("scaffold", 2), "--engine", "ray", "--shards", "3")
    run(folder, *settings("scaffold", 4), "--resume", launcher=torchrun(2))
    run(folder, *settings("scaffold", 6), "--resume")
    assert are_same(tmp_path / "one", folder)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.1])
def test_a_killed_actor_changes_no_byte(seconds: float, tmp_path: Path, monkeypatch: Any) -> None:
    """The process of worker 1 is killed in the third round: before its call, or in it."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedclade[ray]'")
    from fedclade.integrations.ray_workers import RayWorkers

    steps = "local.epochs=20"  # so that a round takes longer
    sets = ["method.name=scaffold", "run.rounds=5", "engine.shards=2", steps]
    run(tmp_path / "one", *settings("scaffold", 5), "--set", steps)
    tables = experiment_file.apply(experiment_file.read("quickstart"), sets)
    experiment = experiment_file.experiment(tables)
    workers: list[RayWorkers] = []
    start, call = RayWorkers.__init__, RayWorkers.call
    maps = 0

    def kill_in_the_third_round(self: RayWorkers, calls: dict[int, Call]) -> Any:
        nonlocal maps
        maps += any(each.name == "map" for each in calls.values())
        if maps == 3:
            maps += 1
            pid = ray.get(self.actors[1].process_id.remote())
            timer = Timer(seconds, os.kill, (pid, signal.SIGKILL))
            timer.start()
            if not seconds:
                timer.join()
        return call(self, calls)

    def remember(self: RayWorkers, *arguments: Any) -> None:
        workers.append(self)
        start(self, *arguments)

    replaced: list[int] = []
    replace = RayWorkers.replace
    monkeypatch.setattr(RayWorkers, "__init__", remember)
    monkeypatch.setattr(RayWorkers, "call", kill_in_the_third_round)
    monkeypatch.setattr(
        RayWorkers, "replace", lambda self, worker: (replaced.append(worker), replace(self, worker))
    )
    result, times = sharded_run.run_sharded(
        "ray",
        experiment.to_run(experiment.clients(), "cpu"),
        ExperimentSource.of(tables, None, ()),
        tmp_path / "two",
        lambda sharded: sharded.run(tmp_path / "two"),
    )
    assert replaced == [1]
    assert result.summary["engine"] == "ray"
    assert are_same(tmp_path / "one", tmp_path / "two")
    assert len(times.busy) == 2


@pytest.fixture
def command(tmp_path: Path, monkeypatch: Any, capsys: Any) -> Command:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedclade", "run", "quickstart", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        return int(stopped.value.code or 0), capsys.readouterr().err

    return call


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--shards", "2"], ["--shards 2", "--engine ray"]),
        (["--set", "engine.shards=2"], ["engine.shards = 2", "--engine ray"]),
        (["--engine", "ray", "--shards", "41"], ["engine.shards = 41", "40"]),
        (["--engine", "spark"], ["--engine spark", "ray"]),
        (["--engine", "ray", "--set", "engine.shards=0"], ["engine.shards = 0", "1"]),
        (["--set", "engine.client_state=tape"], ["engine.client_state", "disk"]),
        (["--engine", "ray", "--set", "local.lr=0.1,0.2"], ["--engine ray", "one run"]),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: list[str], expected: list[str], command: Command
) -> None:
    code, err = command(*arguments)  # type: ignore[misc]
    assert code == 2
    assert all(part in err for part in expected), err
    assert len(err.strip().splitlines()) <= 2


def test_without_ray_the_error_says_how_to_install_it(command: Command, monkeypatch: Any) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "ray" else find(name)
    )
    code, err = command("--engine", "ray", "--shards", "2")  # type: ignore[misc]
    assert code == 2
    assert "pip install 'fedclade[ray]'" in err


def test_torchrun_starts_the_workers_of_no_other_engine(command: Command, monkeypatch: Any) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "none"), ("WORLD_SIZE", "2"), ("RANK", "0")):
        monkeypatch.setenv(name, value)
    code, err = command("--engine", "ray")  # type: ignore[misc]
    assert code == 2
    assert "torchrun" in err


def test_the_simulator_can_store_client_state_on_disk(tmp_path: Path) -> None:
    sets = ["method.name=scaffold", "run.rounds=3"]
    for name in ("memory", "disk"):
        tables = experiment_file.apply(
            experiment_file.read("quickstart"), [*sets, f"engine.client_state={name}"]
        )
        experiment = experiment_file.experiment(tables)
        seen: list[bool] = []

        def on_round(row: RoundRecord, folder: Path = tmp_path / name) -> None:
            seen.append((folder / "client_state" / "rows").exists())  # noqa: B023

        experiment.to_run(experiment.clients(), "cpu").run(tmp_path / name, on_round=on_round)
        assert seen == [name == "disk"] * 3
    assert are_same(tmp_path / "memory", tmp_path / "disk")
    assert not (tmp_path / "disk" / "client_state").exists()
