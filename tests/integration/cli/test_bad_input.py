"""Bad input: one line on stderr with the field and the value, exit code 2, no traceback, and no
training.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

Call = Callable[..., tuple[int, str, str]]
OWN = """
from dataclasses import dataclass
import torch
from torch import nn
import fedclade as fc

@fc.register("model", "narrow")
@dataclass(frozen=True)
class Narrow:
    outputs: int = 4

    def build(self, shape, classes):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, self.outputs))

class Angry(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x):
        raise ValueError("one line\\nand another")

@fc.register("model", "angry")
@dataclass(frozen=True)
class AngryModel:
    def build(self, shape, classes):
        return Angry()
"""


@pytest.fixture
def call(command: Call) -> Call:
    """The command in a folder with the files of the cases below: exit code, stdout, stderr."""
    _files()
    return command


def _files() -> None:
    """Write the files of the cases below into the current folder."""
    draw = np.random.default_rng(0)
    x, y = draw.random((60, 4)), np.arange(60) % 3
    x_test, y_test = draw.random((30, 4)), np.arange(30) % 3

    def save(name: str, **changed: object) -> None:
        arrays = {"x_train": x, "y_train": y, "x_test": x_test, "y_test": y_test, **changed}
        np.savez(name, **{key: value for key, value in arrays.items() if value is not None})  # type: ignore[arg-type]

    broken, huge = x.copy(), x.copy()
    broken[7, 2], huge[3, 1] = np.nan, np.inf
    save("good.npz")
    save("nan.npz", x_train=broken)
    save("nan_test.npz", x_test=np.full((30, 4), np.nan))
    save("inf.npz", x_train=huge)
    save("short.npz", y_train=y[:-1])
    save("missing.npz", y_test=None)
    save("negative.npz", y_train=y - 1)
    save("text.npz", y_train=np.array(["cat"] * 60))
    save("objects.npz", y_train=np.array([None] * 60, dtype=object))
    save("regression.npz", y_train=y.astype(float), y_test=y_test.astype(float))
    content = Path("good.npz").read_bytes()
    Path("truncated.npz").write_bytes(content[: len(content) // 2])
    Path("cut_head.npz").write_bytes(content[:40])
    Path("empty.npz").write_bytes(b"")
    Path("garbage.npz").write_bytes(b"not an archive at all")
    Path("own.py").write_text(OWN)
    Path("broken.py").write_text("def f(:\n")
    Path("not.toml").write_text("[data\nname = 1")
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    Path("no_data.toml").write_text(
        '[partition]\nname = "iid"\n[model]\nname = "mlp"\n[method]\nname = "fedavg"\n'
    )
    Path("no_table.toml").write_text('data = "digits"\n')
    Path("empty.toml").write_text("")
    Path("a_file").write_text("")
    Path("a_run").mkdir()
    Path("a_run/summary.json").write_text("{}")


def of(*sets: str) -> list[str]:
    return ["quickstart", *(word for setting in sets for word in ("--set", setting))]


IID = "partition.name=iid"
# Arguments, and what the message must contain: fields, values, names and commands.
CASES = {
    # settings
    "unknown key": (of("run.round=3"), ["run.round", "'rounds'"]),
    "unknown key of the partition": (of("partition.client=3"), ["partition.client", "'clients'"]),
    "unknown key of the method": (of("method.k=3"), ["method.k"]),
    "unknown table": (of("runn.rounds=3"), ["[runn]", "'run'"]),
    "wrong type": (of("run.rounds=three"), ["run.rounds", "'three'"]),
    "wrong type, fraction": (of("run.rounds=2.5"), ["run.rounds", "2.5"]),
    "wrong type, truth": (of("local.batch_size=true"), ["local.batch_size"]),
    "wrong type, text": (of("local.lr=fast"), ["local.lr", "'fast'"]),
    "negative number": (of("run.rounds=-1"), ["run.rounds = -1"]),
    "negative clients": (of("partition.clients=-3"), ["partition.clients = -3"]),
    "negative width": (of("model.hidden=-5"), ["model.hidden", "-5"]),
    "negative seed": (of("run.seed=-1"), ["run.seed = -1"]),
    "negative chunk": (of("engine.chunk=-1"), ["engine.chunk", "-1"]),
    "NaN": (of("local.lr=nan"), ["local.lr", "nan"]),
    "infinite": (of("local.weight_decay=inf"), ["local.weight_decay", "inf"]),
    "learning rate 0": (of("local.lr=0"), ["local.lr = 0"]),
    "no rounds": (of("run.rounds=0"), ["run.rounds = 0"]),
    "set without value": (of("run.rounds"), ["--set run.rounds", "TABLE.KEY=VALUE"]),
    "set without table": (of("rounds=3"), ["--set rounds=3", "TABLE.KEY=VALUE"]),
    "unknown method": (of("method.name=fedvag"), ["method.name", "'fedvag'", "'fedavg'"]),
    "unknown model": (of("model.name=lenet"), ["model.name", "'lenet'", "'lenet5'"]),
    "unknown partition": (of("partition.name=dirichlett"), ["partition.name", "'dirichlet'"]),
    "unknown precision": (of("engine.precision=half"), ["engine.precision", "'tf32'"]),
    # experiment files
    "unknown preset": (["quickstar"], ["'quickstar'", "'quickstart'"]),
    "no TOML": (["not.toml"], ["not.toml", "line 1"]),
    "no text": (["binary.toml"], ["binary.toml"]),
    "missing data": (["no_data.toml"], ["data.name", "digits"]),
    "empty file": (["empty.toml"], ["data.name", "digits"]),
    "no table": (["no_table.toml"], ["[data]"]),
    "a folder as experiment": (["a_run"], ["a_run"]),
    "no experiment": ([], ["EXPERIMENT"]),
    # settings that do not fit together
    "too many classes per client": (
        of("partition.name=pathological", "partition.classes_per_client=11"),
        ["partition.classes_per_client = 11", "10"],
    ),
    "too many classes in total": (
        of("partition.classes=3"),
        ["partition.clusters", "15", "10", "3"],
    ),
    "more clients than samples": (
        of("partition.clients=5000"),
        ["partition.clients = 5000", "1438"],
    ),
    "more clients than samples, iid": (
        of(IID, "partition.clients=5000"),
        ["partition.clients = 5000", "1438"],
    ),
    "more clusters than clients": (of("partition.clients=3"), ["partition.clusters = 5", "3"]),
    "too many samples per client": (of("partition.samples=1000"), ["partition.samples = 1000"]),
    "more probe data than samples": (of("partition.probe=99999"), ["partition.probe", "1438"]),
    "more clients per round than clients": (
        of("run.clients_per_round=41"),
        ["run.clients_per_round = 41", "40"],
    ),
    "a key that the data do not have": (
        of("partition.name=natural_id"),
        ["partition.key", "'writer'"],
    ),
    "a model that does not fit the images": (
        of("model.name=lenet5"),
        ["LeNet5", "16x16", "(1, 8, 8)", "MLP"],
    ),
    "labels outside the outputs": (
        [*of("model.name=narrow"), "--import", "own.py"],
        ["model", "4", "9", "10"],
    ),
    "own BatchNorm layers of a model without them": (
        of("local.batch_norm=own"),
        ["local.batch_norm", "'own'"],
    ),
    "unknown optimizer": (of("local.optimizer=adamx"), ["local.optimizer", "'adamx'", "'adamw'"]),
    "unknown optimizer of the server": (
        of("server.optimizer=adam"),
        ["server.optimizer", "'adam'", "'fedadam'"],
    ),
    "early stopping without validation data": (
        of("run.patience=2"),
        ["run.patience", "data.validation"],
    ),
    "a loss for other targets": (of("local.loss=bce"), ["loss", "bce"]),
    # data sets
    "missing data set": (
        of("data.name=nowhere"),
        ["'nowhere'", "--data-root", "FEDCLADE_DATA"],
    ),
    "missing data set, nearest": (of("data.name=digit"), ["'digit'", "'digits'"]),
    "missing data file": (of("data.name=./nowhere.npz"), ["nowhere.npz"]),
    "preset without its data": (["mnist_iid"], ["'mnist'", "mnist.npz"]),
    "truncated npz": (of("data.name=truncated.npz"), ["truncated.npz"]),
    "npz with a truncated header": (of("data.name=cut_head.npz"), ["cut_head.npz"]),
    "empty npz": (of("data.name=empty.npz"), ["empty.npz", ".npz file"]),
    "no npz": (of("data.name=garbage.npz"), ["garbage.npz", ".npz file"]),
    "NaN pixels": (of("data.name=nan.npz", IID), ["nan.npz", "x_train", "1 NaN", "7"]),
    "NaN pixels in the test part": (
        of("data.name=nan_test.npz", IID),
        ["nan_test.npz", "x_test", "120 NaN"],
    ),
    "infinite pixels": (of("data.name=inf.npz", IID), ["inf.npz", "x_train", "infinite", "3"]),
    "lengths differ": (of("data.name=short.npz", IID), ["short.npz", "60", "59"]),
    "array missing": (of("data.name=missing.npz", IID), ["missing.npz", "y_test"]),
    "negative labels": (
        of("data.name=negative.npz", IID),
        ["negative.npz", "y_train", "-1"],
    ),
    "text labels": (of("data.name=text.npz", IID), ["text.npz", "y_train", "np.unique"]),
    "pickled labels": (of("data.name=objects.npz", IID), ["objects.npz", "Python objects"]),
    "float targets": (of("data.name=regression.npz", IID), ["model", "class labels"]),
    "float targets, by label": (
        of("data.name=regression.npz"),
        ["partition.name = 'label_clusters'", "iid"],
    ),
    # output and device
    "a folder with a run": ([*of(), "--out", "a_run"], ["out = 'a_run'", "--resume"]),
    "out is a file": ([*of(), "--out", "a_file"], ["out = 'a_file'"]),
    "out is below a file": ([*of(), "--out", "a_file/run"], ["a_file/run"]),
    "out cannot be created": ([*of(), "--out", "/proc/fedclade/run"], ["/proc/fedclade/run"]),
    "resume without out": ([*of(), "--resume"], ["--resume", "--out DIR"]),
    "unknown device": ([*of(), "--device", "gpu"], ["device = 'gpu'", "'cpu'", "'cuda'"]),
    "import of a missing file": ([*of(), "--import", "nowhere.py"], ["--import nowhere.py"]),
    "import of a broken file": (
        [*of(), "--import", "broken.py"],
        ["--import broken.py", "SyntaxError", "line 1"],
    ),
    "unknown option": ([*of(), "--round", "3"], ["--round"]),
}


def check(outcome: tuple[int, str, str], parts: list[str]) -> None:
    code, out, err = outcome
    assert code == 2, outcome
    assert out == ""
    assert err.startswith("fedclade: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1, err
    assert "Traceback" not in err
    for part in parts:
        assert part in err


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_with_field_and_value(case: str, call: Call) -> None:
    arguments, parts = CASES[case]
    check(call("run", *arguments), parts)
    assert not list(Path().rglob("rounds.jsonl"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_cuda_device(call: Call) -> None:
    check(call("run", "quickstart", "--device", "cuda"), ["device = 'cuda'", "'cpu'", "'auto'"])


def test_checkpoints_of_another_experiment_and_damaged_ones(call: Call) -> None:
    short = ["run", "quickstart", "--set", "run.rounds=1", "--out", "run"]
    longer = ["run", "quickstart", "--set", "run.rounds=2", "--out", "run"]
    assert call(*short, "-q")[0] == 0
    check(call(*longer, "--set", "run.seed=1", "--resume"), ["out = 'run'", "experiment"])
    (file,) = Path("run/checkpoint").iterdir()
    file.write_bytes(file.read_bytes()[:-10])
    check(call(*longer, "--resume"), ["round-000001.safetensors"])


@pytest.mark.usefixtures("call")
def test_a_process_gives_one_line_and_code_2_too() -> None:
    arguments, parts = CASES["truncated npz"]
    command = [sys.executable, "-m", "fedclade", "run", *arguments]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    check((done.returncode, done.stdout, done.stderr), parts)


def test_a_read_only_folder(call: Call) -> None:
    # Not even root can write to this folder.
    check(call("run", "quickstart", "--out", "/proc/self/task"), ["/proc/self/task"])


def test_an_error_with_two_lines_of_a_custom_model(call: Call) -> None:
    check(
        call("run", *of("model.name=angry"), "--import", "own.py"),
        ["model", "one line", "and another"],
    )


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param("run.seed=" + "1" * 5000, id="a number of 5000 digits"),
        pytest.param("run.rounds=" + "[" * 5000, id="unclosed brackets"),
        pytest.param("local.epochs=1180591620717411303424", id="more epochs than fit into 64 bits"),
        pytest.param(
            "model.hidden=100000000000000000000", id="a width that does not fit into 64 bits"
        ),
    ],
)
def test_absurd_values(setting: str, call: Call) -> None:
    check(call("run", *of(setting)), [setting.split("=")[0]])
