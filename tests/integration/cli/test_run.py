"""`fedclade run` on a terminal, into a log file, and from a script."""

from __future__ import annotations

import csv
import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import fedclade as fc
from fedclade.registry import REGISTRY

KEYS = [
    *(
        "method",
        "dataset",
        "partition",
        "model",
        "engine",
        "device",
        "seed",
        "rounds",
        "clients",
        "clusters",
    ),
    *(
        "accuracy",
        "accuracy_stderr",
        "accuracy_variance",
        "accuracy_worst10",
        "ari",
        "bytes_up",
        "bytes_down",
        "seconds",
    ),
]
THREE = ["run", "quickstart", "--set", "run.rounds=3"]
Call = Callable[..., tuple[int, str, str]]


def environment() -> dict[str, str]:
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")
    }
    return {**plain, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}


def start(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedclade", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(),
    )


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, str, str]]:
    """The same run in two processes, the second with engine.chunk=1: folder, exit code, stdout,
    stderr.
    """
    folder = tmp_path_factory.mktemp("a folder with a space")
    more = {"first": [], "chunk": ["--set", "engine.chunk=1", "--quiet"]}
    running = {
        name: start(*THREE, *words, "--out", str(folder / name), folder=folder)
        for name, words in more.items()
    }
    done = {}
    for name, process in running.items():
        out, err = process.communicate(timeout=120)
        done[name] = (folder / name, process.returncode, out, err)
    return done


@pytest.fixture
def call(command: Call) -> Call:
    """The command in an empty folder: exit code, stdout, stderr."""
    return command


def models(folder: Path) -> bytes:
    return (folder / "models" / "models.safetensors").read_bytes()


Processes = dict[str, tuple[Path, int, str, str]]


def test_every_process_succeeds_without_warnings(processes: Processes) -> None:
    for name, (_, code, _, err) in processes.items():
        assert (code, err) == (0, ""), name


def test_the_summary_has_every_key(processes: Processes) -> None:
    summary = json.loads((processes["first"][0] / "summary.json").read_text())
    assert [key for key in KEYS if key not in summary] == []
    assert (summary["method"], summary["dataset"], summary["partition"], summary["model"]) == (
        "fedavg",
        "digits",
        "label_clusters",
        "mlp",
    )
    assert (
        summary["engine"],
        summary["seed"],
        summary["rounds"],
        summary["clients"],
        summary["clusters"],
    ) == ("simulator", 0, 3, 40, 1)
    assert 0 < summary["accuracy"] < 100
    assert summary["ari"] == 0
    # 20 of 40 clients, 64-64-10 with biases, four bytes, three rounds
    assert (
        summary["bytes_up"] == summary["bytes_down"] == 20 * (64 * 64 + 64 + 64 * 10 + 10) * 4 * 3
    )
    assert summary["seconds"] > 0


def test_one_line_per_round_and_one_line_per_client(processes: Processes) -> None:
    folder = processes["first"][0]
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    with (folder / "clients.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["client"]) for line in lines] == list(range(40))
    assert {"client", "cluster", "true_group", "examples", "accuracy", "train_accuracy"} <= lines[
        0
    ].keys()


def test_models_depend_on_the_seed_and_not_on_the_chunk(processes: Processes, call: Call) -> None:
    assert call(*THREE, "--out", "local", "--quiet") == (0, "", "")
    assert models(processes["first"][0]) == models(processes["chunk"][0]) == models(Path("local"))
    call(*THREE, "--set", "run.seed=1", "--set", "partition.seed=0", "--out", "seed", "-q")
    assert models(processes["first"][0]) != models(Path("seed"))


def test_the_written_experiment_gives_the_same_bytes(processes: Processes, call: Call) -> None:
    call(*THREE, "--set", "run.seed=1", "--set", "model.hidden=[9, 8]", "--out", "other", "-q")
    for name, folder in (
        ("1", processes["first"][0]),
        ("2", processes["chunk"][0]),
        ("3", Path("other")),
    ):
        assert call("run", str(folder / "experiment.toml"), "--out", name, "-q") == (0, "", "")
        assert models(Path(name)) == models(folder)
        assert (Path(name) / "experiment.toml").read_bytes() == (
            folder / "experiment.toml"
        ).read_bytes()


def test_output_to_a_file_is_plain_lines(processes: Processes) -> None:
    folder, _, out, _ = processes["first"]
    assert "\x1b" not in out
    assert "\r" not in out
    lines = out.splitlines()
    assert re.fullmatch(
        r"fedavg: round 3/3  accuracy \d+\.\d\d %  1 groups?  \d+\.\d\d s/round", lines[0]
    )
    assert lines[-1] == f"Run directory: {folder}"
    shown = {
        line.split("  ")[0]: line.split("  ")[-1].strip() or line.split()[-1]
        for line in lines[1:-1]
    }
    assert {"method", "clients", "groups", "accuracy", "seconds"} <= shown.keys()
    summary = json.loads((folder / "summary.json").read_text())
    assert (
        f"{summary['accuracy']:.2f} ± {summary['accuracy_stderr']:.2f} % (worst tenth"
        f" {summary['accuracy_worst10']:.2f} %)" in out
    )
    assert "1.2 MB / 1.2 MB" in out


def test_quiet_prints_nothing(processes: Processes) -> None:
    assert processes["chunk"][2] == ""


def test_a_terminal_shows_a_bar_with_round_accuracy_groups_and_time(
    tmp_path: Path,
) -> None:
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [
        sys.executable,
        "-m",
        "fedclade",
        *THREE,
        "--set",
        "run.eval_every=1",
        "--out",
        "run",
    ]
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, cwd=tmp_path, env=environment()
    )
    os.close(terminal)
    output = b""
    try:
        while True:
            assert select.select([controller], [], [], 120)[0], "no output for two minutes"
            try:
                piece = os.read(controller, 65536)
            except OSError:  # on Linux: the other side is closed
                break
            if not piece:
                break
            output += piece
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(controller)
    text = output.decode()
    assert "\x1b[" in text
    bar = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).split("Run directory")[0]
    assert re.search(r"fedavg .*━.* 3/3 accuracy \d+\.\d\d % 1 groups? \d+\.\d\d s/round", bar)
    assert "fedavg: round" not in bar  # not both
    assert "method" in bar
    assert "Run directory: run" in text


def test_without_out_every_run_has_a_new_folder_in_runs(call: Call) -> None:
    for number in ("", "-2", "-3"):
        code, out, _ = call(
            "run", "quickstart", "--set", "run.rounds=1", "--set", "method.name=local"
        )
        assert code == 0
        assert out.splitlines()[-1] == f"Run directory: runs/quickstart-local{number}"
    assert (Path("runs") / "quickstart-local-3" / "summary.json").exists()


def test_the_folder_has_the_name_of_the_experiment_file(call: Call) -> None:
    Path("my study.toml").write_text(
        '[data]\nname = "digits"\n[partition]\nname = "iid"\nclients = 4\n[model]\nname ='
        ' "logistic"\n[method]\nname = "fedavg"\n[run]\nrounds = 1\n'
    )
    code, out, _ = call("run", "my study.toml")
    assert code == 0
    assert "Run directory: runs/my study-fedavg" in out


TUNED = ("--set", "personal.layer=finetune", "--set", "personal.epochs=2")


def test_fine_tuning_is_shown_and_does_not_change_the_training(call: Call) -> None:
    call(*THREE, "--out", "plain", "-q")
    code, out, _ = call(*THREE, *TUNED, "--out", "tuned")
    assert code == 0
    plain, tuned = (
        json.loads((Path(name) / "summary.json").read_text()) for name in ("plain", "tuned")
    )
    assert "accuracy_shared" not in plain
    assert plain["accuracy"] == pytest.approx(tuned["accuracy_shared"])
    assert f"{tuned['accuracy_shared']:.2f} %" in next(
        line for line in out.splitlines() if line.startswith("without the personal layer")
    )


@pytest.mark.parametrize("every", [0, 1, 10])
def test_the_evaluation_interval_does_not_change_the_models(
    every: int, call: Call, processes: Processes
) -> None:
    code, out, _ = call(*THREE, "--set", f"run.eval_every={every}", "--out", "run")
    assert code == 0
    assert models(Path("run")) == models(processes["first"][0])
    assert out.count("fedavg: round") == (3 if every == 1 else 1)


def save(path: Path, **changed: object) -> None:
    draw = np.random.default_rng(0)
    arrays = {
        "x_train": draw.random((60, 4)),
        "y_train": np.arange(60) % 3,
        "x_test": draw.random((30, 4)),
        "y_test": np.arange(30) % 3,
    }
    np.savez(path, **{**arrays, **changed})  # type: ignore[arg-type]


NPZ = ["--set", "partition.name=iid", "--set", "partition.clients=5", "--set", "run.rounds=1", "-q"]


def test_data_are_found_by_path_data_root_environment_and_data_folder(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("root", "env", "data"):
        Path(folder).mkdir()
        save(Path(folder) / f"in_{folder}.npz")
    monkeypatch.setenv("FEDCLADE_DATA", "env")
    assert (
        call("run", "quickstart", "--set", "data.name=root/in_root.npz", *NPZ, "--out", "1")[0] == 0
    )
    assert (
        call(
            "run",
            "quickstart",
            "--set",
            "data.name=in_root",
            "--data-root",
            "root",
            *NPZ,
            "--out",
            "2",
        )[0]
        == 0
    )
    assert call("run", "quickstart", "--set", "data.name=in_env", *NPZ, "--out", "3")[0] == 0
    assert call("run", "quickstart", "--set", "data.name=in_data", *NPZ, "--out", "4")[0] == 0
    assert models(Path("1")) == models(Path("2")) == models(Path("3")) == models(Path("4"))


def test_the_written_experiment_of_a_data_file_can_be_run(call: Call) -> None:
    Path("sub").mkdir()
    save(Path("sub") / "mine.npz")
    assert call("run", "quickstart", "--set", "data.name=sub/mine.npz", *NPZ, "--out", "1")[0] == 0
    code, _, err = call("run", "1/experiment.toml", "--out", "2", "-q")
    assert (code, err) == (0, "")
    assert models(Path("1")) == models(Path("2"))


OWN = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import nn

import fedclade as fc


def draw(count):
    y = torch.arange(count) % 3
    return y[:, None] + torch.randn(count, 2, generator=torch.Generator().manual_seed(count)), y


@fc.register("dataset", "spots")
def spots():
    '''Three spots.'''
    return fc.data.dataset(*draw(60), *draw(30), name="spots")


@fc.register("dataset", "untested")
def untested():
    '''Three spots without test part.'''
    return fc.data.dataset(*draw(60), name="untested")


@fc.register("partition", "striped")
@dataclass(frozen=True)
class Striped:
    stripes: int = 2

    def split(self, data, clients, rng):
        rows = np.arange(len(data.y_train))
        train = [rows[i::clients] for i in range(clients)]
        return fc.data.Split(train, groups=np.arange(clients) % self.stripes)


@fc.register("model", "line")
@dataclass(frozen=True)
class Line:
    bias: bool = True

    def build(self, shape, classes):
        return nn.Linear(shape[0], classes, bias=self.bias)


@fc.register("method", "mine")
@dataclass(frozen=True)
class Mine(fc.FedAvg):
    title: ClassVar[str] = "Mine"
    k: int = 1
"""


@pytest.fixture
def own(call: Call) -> Iterator[str]:
    Path("own.py").write_text(OWN)
    before = {kind: dict(things) for kind, things in REGISTRY.items()}
    yield "own.py"
    for kind, things in before.items():
        REGISTRY[kind].clear()
        REGISTRY[kind].update(things)
    sys.modules.pop("own", None)


def test_imported_method_data_set_model_and_partition(call: Call, own: str) -> None:
    names = ["data.name=spots", "partition.name=striped", "model.name=line", "method.name=mine"]
    fields = [
        "partition.clients=6",
        "partition.stripes=3",
        "model.bias=false",
        "method.k=4",
        "run.rounds=2",
    ]
    sets = [word for setting in (*names, *fields) for word in ("--set", setting)]
    code, out, err = call("run", "quickstart", "--import", own, *sets, "--out", "run")
    assert (code, err) == (0, "")
    assert out.startswith("mine: round 2/2")
    summary = json.loads(Path("run/summary.json").read_text())
    assert [summary[kind] for kind in ("dataset", "partition", "model", "method")] == [
        "spots",
        "striped",
        "line",
        "mine",
    ]
    # three of six clients, 2 x 3 weights without bias, four bytes, two rounds
    assert summary["bytes_up"] == 3 * 6 * 4 * 2
    assert summary["ari"] is not None
    assert call("run", "run/experiment.toml", "--import", own, "--out", "again", "-q") == (
        0,
        "",
        "",
    )
    assert models(Path("run")) == models(Path("again"))


@pytest.mark.usefixtures("own")
def test_nothing_is_imported_automatically(call: Call) -> None:
    code, _, err = call("run", "quickstart", "--set", "method.name=mine")
    assert code == 2
    assert "method.name" in err
    assert "'mine'" in err


def test_clients_without_test_data_are_counted(call: Call, own: str) -> None:
    code, out, _ = call(
        "run",
        "quickstart",
        "--import",
        own,
        "--set",
        "data.name=untested",
        *NPZ[:-1],
        "--out",
        "run",
    )
    assert code == 0
    assert re.match(r"fedavg: round 1/1  training loss \d+\.\d{4}  ", out)
    assert re.search(r"clients without test data, not evaluated +5\b", out)
    assert not re.search(r"^accuracy", out, re.MULTILINE)


def test_resuming_a_finished_run_changes_nothing(call: Call) -> None:
    call(*THREE, "--out", "run")
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    code, out, err = call(*THREE, "--out", "run", "--resume")
    assert code == 0
    (line,) = err.splitlines()
    assert line.startswith("fedclade: the run in run ")
    assert "fedavg: round" not in out
    assert "accuracy" in out
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before


def test_resume_with_an_empty_or_missing_folder_starts_a_run(
    call: Call, processes: Processes
) -> None:
    Path("empty").mkdir()
    for folder in ("empty", "missing"):
        code, out, err = call(*THREE, "--out", folder, "--resume", "-q")
        assert (code, out) == (0, "")
        (line,) = err.splitlines()
        assert line.startswith(f"fedclade: {folder} ")
        assert models(Path(folder)) == models(processes["first"][0])


def test_more_rounds_extend_a_run(call: Call, processes: Processes) -> None:
    call("run", "quickstart", "--set", "run.rounds=1", "--out", "run", "-q")
    code, out, err = call(*THREE, "--out", "run", "--resume")
    assert (code, err) == (0, "")
    assert out.startswith("fedavg: round 3/3")
    assert models(Path("run")) == models(processes["first"][0])
    assert len((Path("run") / "rounds.jsonl").read_text().splitlines()) == 3


def test_python_reads_a_folder_of_the_command_line(processes: Processes) -> None:
    result = fc.load(processes["first"][0])
    assert result.summary["rounds"] == len(result.history) == 3
    assert result.model_of(7)(fc.data.load("digits").x_test[:2]).shape == (2, 10)


def test_rejected_replies_are_counted(call: Call) -> None:
    _, out, _ = call(
        "run", "quickstart", "--set", "run.rounds=1", "--set", "local.lr=1e38", "--out", "run"
    )
    assert re.search(r"replies missing or rejected +20\b", out)


def test_a_rejected_run_leaves_no_folder(call: Call) -> None:
    assert call("run", "quickstart", "--set", "partition.clients=5000")[0] == 2
    assert call("run", "quickstart", "--set", "run.clients_per_round=41")[0] == 2
    assert list(Path().iterdir()) == []


@pytest.mark.filterwarnings("default")
def test_a_damaged_checkpoint_is_skipped_with_one_line(call: Call) -> None:
    arguments = ["run", "quickstart", "--set", "run.checkpoint_every=1", "--out", "run", "-q"]
    assert call(*arguments, "--set", "run.rounds=2")[0] == 0
    last = Path("run/checkpoint/round-000002.safetensors")
    last.write_bytes(last.read_bytes()[:-10])
    code, _, err = call(*arguments, "--set", "run.rounds=3", "--resume")
    assert code == 0
    (line,) = err.splitlines()
    assert line.startswith("fedclade: run/checkpoint/round-000002.safetensors: ")
    assert "round 1" in line


EARLY = "--set", "run.eval_every=1", "--set", "run.patience=1", "--set", "data.validation=0.2"


def test_validation_data_and_early_stopping(call: Call) -> None:
    # With this learning rate the loss rises.
    settings = (*THREE[:2], "--set", "run.rounds=9", "--set", "local.lr=30.0", *EARLY)
    code, out, _ = call(*settings, "--set", "run.select=best", "--out", "run")
    assert code == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["stopped"] == "patience"
    assert summary["selected_round"] < summary["rounds"] < 9
    assert re.search(rf"stopped after round {summary['rounds']} by +patience\b", out)
    assert re.search(rf"models of round +{summary['selected_round']}\b", out)
    assert re.search(rf"loss on validation data +{summary['validation_loss']:.4f}\b", out)
    experiment = tomllib.loads(Path("run/experiment.toml").read_text())
    assert experiment["data"]["validation"] == 0.2
    assert call("run", "run/experiment.toml", "--out", "again", "-q")[0] == 0
    assert models(Path("run")) == models(Path("again"))


@pytest.mark.parametrize("setting", ["run.patience=2", "run.select=best"])
def test_early_stopping_without_validation_data_is_one_line(call: Call, setting: str) -> None:
    code, _, err = call("run", "quickstart", "--set", setting)
    assert code == 2
    assert err.startswith(f"fedclade: {setting.partition('=')[0]} = ")
    assert len(err.splitlines()) == 1
