"""A stopped run resumes to the bytes of an undisturbed one, or is an error."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedclade as fc
from fedclade.cli import main
from fedclade.core import Federation, State
from fedclade.data import Clients
from fedclade.errors import DifferentExperimentError, FedcladeWarning
from fedclade.io import checkpoint
from fedclade.registry import REGISTRY

METHODS = pytest.mark.parametrize(
    "method",
    [
        fc.FedAvg(),
        fc.Local(),
        fc.SCAFFOLD(),
        fc.LGFedAvg(),
        fc.PerFedAvg(),
        fc.IFCA(clusters=2, warm_up=1, num_restarts=2, trial_rounds=3),
    ],
    ids=lambda method: method.name,
)
ROUNDS = 7


def do(clients: Clients, method: fc.Method, out: Path, **changed: Any) -> fc.Result:
    settings: dict[str, Any] = {
        "rounds": ROUNDS,
        "clients_per_round": 0.3,
        "lr": 0.2,
        "momentum": 0.5,
        "schedule": "exponential",
        "decay": 0.9,
    }
    settings |= {
        "model": fc.models.MLP(8),
        "eval_every": 3,
        "checkpoint_every": 2,
        "seed": 2,
        "out": out,
    }
    return fc.run(method, clients, **{**settings, **changed})


def written(folder: Path) -> dict[str, Any]:
    """The files of a run, without the times."""
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return {
        "models": (folder / "models" / "models.safetensors").read_bytes(),
        "clients": (folder / "clients.csv").read_text(),
        "experiment": (folder / "experiment.toml").read_text(),
        "summary": {name: value for name, value in summary.items() if name != "seconds"},
        "history": [
            {name: value for name, value in row.items() if name != "seconds"} for row in rows
        ],
    }


def stop_after(number: int, how: type[BaseException] = KeyboardInterrupt) -> Any:
    def on_round(row: dict[str, Any]) -> None:
        if row["round"] == number:
            raise how

    return on_round


@METHODS
@pytest.mark.parametrize("last", [1, 2, 5, ROUNDS])
def test_an_interrupted_run_resumes_to_the_bytes_of_an_undisturbed_one(
    method: fc.Method, last: int, digits: Clients, tmp_path: Path
) -> None:
    do(digits, method, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        do(digits, method, tmp_path / "parts", on_round=stop_after(last))
    assert not (tmp_path / "parts" / "summary.json").exists()
    rows: list[int] = []
    result = do(
        digits,
        method,
        tmp_path / "parts",
        resume=True,
        on_round=lambda row: rows.append(row["round"]),
    )
    assert rows == list(range(last + 1, ROUNDS + 1))  # an interrupt loses no round
    assert written(tmp_path / "parts") == written(tmp_path / "whole")
    assert [row["round"] for row in result.history] == list(range(1, ROUNDS + 1))
    assert not result.already_finished


@METHODS
def test_a_failed_run_resumes_from_its_last_checkpoint(
    method: fc.Method, digits: Clients, tmp_path: Path
) -> None:
    do(digits, method, tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        do(digits, method, tmp_path / "parts", on_round=stop_after(5, ZeroDivisionError))
    assert len((tmp_path / "parts" / "rounds.jsonl").read_text().splitlines()) == 5
    rows: list[int] = []
    do(
        digits,
        method,
        tmp_path / "parts",
        resume=True,
        on_round=lambda row: rows.append(row["round"]),
    )
    assert rows == [5, 6, 7]
    assert written(tmp_path / "parts") == written(tmp_path / "whole")


@METHODS
def test_a_run_may_be_stopped_several_times(
    method: fc.Method, digits: Clients, tmp_path: Path
) -> None:
    do(digits, method, tmp_path / "whole")
    for number in (2, 3, 6):
        with pytest.raises(KeyboardInterrupt):
            do(digits, method, tmp_path / "parts", resume=True, on_round=stop_after(number))
    do(digits, method, tmp_path / "parts", resume=True)
    assert written(tmp_path / "parts") == written(tmp_path / "whole")


@dataclass(frozen=True)
class StopsInside(fc.Local):
    """Local that is interrupted after the clients have trained and before the round is counted."""

    calls: ClassVar[int] = 0
    stop_in: ClassVar[int] = 0

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        state = super().round(fed, state, cohort, key)
        type(self).calls += 1
        if type(self).calls == type(self).stop_in:
            raise KeyboardInterrupt
        return state


def test_an_interrupted_round_is_repeated_from_the_client_state_of_the_round_before(
    digits: Clients, tmp_path: Path
) -> None:
    do(digits, fc.Local(), tmp_path / "whole")
    StopsInside.calls, StopsInside.stop_in = 0, 4
    with pytest.raises(KeyboardInterrupt):
        do(digits, StopsInside(), tmp_path / "parts", checkpoint_every=0)
    rows: list[int] = []
    do(
        digits,
        fc.Local(),
        tmp_path / "parts",
        resume=True,
        checkpoint_every=0,
        on_round=lambda row: rows.append(row["round"]),
    )
    assert rows == [4, 5, 6, 7]
    assert written(tmp_path / "parts")["models"] == written(tmp_path / "whole")["models"]


def test_more_rounds_extend_a_finished_run_to_the_bytes_of_a_long_one(
    digits: Clients, tmp_path: Path
) -> None:
    for method in (fc.FedAvg(), fc.Local()):
        whole, parts = tmp_path / f"{method.name} whole", tmp_path / f"{method.name} parts"
        do(digits, method, whole, rounds=6)
        do(digits, method, parts, rounds=3)
        assert do(digits, method, parts, rounds=6, resume=True).summary["rounds"] == 6
        assert written(parts) == written(whole)


def test_resuming_a_finished_run_trains_nothing_and_returns_its_result(
    digits: Clients, tmp_path: Path
) -> None:
    first = do(digits, fc.Local(), tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = do(digits, fc.Local(), tmp_path, resume=True, on_round=stop_after(0))
    assert again.already_finished
    assert not first.already_finished
    assert again.summary == first.summary
    assert again.history == first.history
    assert again.clusters.tolist() == first.clusters.tolist()
    assert torch.equal(again.model_of(3)(digits.x_test[:4]), first.model_of(3)(digits.x_test[:4]))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_without_a_checkpoint_a_run_restarts(digits: Clients, tmp_path: Path) -> None:
    do(digits, fc.FedAvg(), tmp_path / "whole")
    do(digits, fc.FedAvg(), tmp_path / "new", resume=True)
    assert written(tmp_path / "new") == written(tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        do(
            digits, fc.FedAvg(), tmp_path / "early", on_round=stop_after(1, ZeroDivisionError)
        )  # before the first checkpoint
    assert not (tmp_path / "early" / "checkpoint").exists()
    do(digits, fc.FedAvg(), tmp_path / "early", resume=True)
    assert written(tmp_path / "early") == written(tmp_path / "whole")


def test_without_resume_a_folder_with_a_run_is_an_error_and_stays_unchanged(
    digits: Clients, tmp_path: Path
) -> None:
    do(digits, fc.FedAvg(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        do(digits, fc.FedAvg(), tmp_path / "half", on_round=stop_after(2))
    for folder in (tmp_path / "whole", tmp_path / "half"):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(
            fc.InvalidInputError, match="--resume", check=lambda error: error.field == "out"
        ):
            do(digits, fc.FedAvg(), folder)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


OTHER: list[dict[str, Any]] = [
    {"seed": 3},
    {"lr": 0.3},
    {"model": fc.models.MLP(9)},
    {"clients_per_round": 0.4},
    {"decay": 1.0},
]


@pytest.mark.parametrize("changed", OTHER, ids=lambda changed: next(iter(changed)))
def test_the_checkpoint_of_another_experiment_is_an_error(
    changed: dict[str, Any], digits: Clients, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        do(digits, fc.FedAvg(), tmp_path, on_round=stop_after(2))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(DifferentExperimentError):
        do(digits, fc.FedAvg(), tmp_path, resume=True, **changed)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_checkpoint_of_another_method_or_of_other_clients_is_an_error(
    digits: Clients, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        do(digits, fc.FedAvg(), tmp_path, on_round=stop_after(2))
    with pytest.raises(DifferentExperimentError):
        do(digits, fc.Local(), tmp_path, resume=True)
    others = fc.data.partition(
        fc.data.load("digits"), fc.data.LabelClusters(clusters=5, classes=2), clients=20, seed=1
    )
    with pytest.raises(DifferentExperimentError):
        do(others, fc.FedAvg(), tmp_path, resume=True)


@pytest.mark.parametrize("changed", OTHER, ids=lambda changed: next(iter(changed)))
def test_a_finished_run_of_another_experiment_is_an_error(
    changed: dict[str, Any], digits: Clients, tmp_path: Path
) -> None:
    do(digits, fc.FedAvg(), tmp_path)
    with pytest.raises(DifferentExperimentError):
        do(digits, fc.FedAvg(), tmp_path, resume=True, **changed)


def test_the_checkpoint_of_other_inputs_is_an_error(tmp_path: Path) -> None:
    x, y = torch.randn(2, 10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 2
    first, second = (fc.data.from_arrays([(x[i], y), (x[i] + 1, y)]) for i in range(2))
    with pytest.raises(KeyboardInterrupt):
        do(first, fc.FedAvg(), tmp_path, clients_per_round=2, on_round=stop_after(2))
    with pytest.raises(DifferentExperimentError):
        do(second, fc.FedAvg(), tmp_path, clients_per_round=2, resume=True)


def test_the_checkpoint_of_a_module_of_another_size_is_an_error(
    digits: Clients, tmp_path: Path
) -> None:
    small, large = (
        nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        for width in (4, 8)
    )
    with pytest.raises(KeyboardInterrupt):
        do(digits, fc.FedAvg(), tmp_path, model=small, on_round=stop_after(2))
    with pytest.raises(DifferentExperimentError):
        do(digits, fc.FedAvg(), tmp_path, model=large, resume=True)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_the_run_continues_from_the_checkpoint_before_a_damaged_one_with_a_warning(
    keep: int, digits: Clients, tmp_path: Path
) -> None:
    do(digits, fc.Local(), tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        do(digits, fc.Local(), tmp_path / "parts", on_round=stop_after(4, ZeroDivisionError))
    files = sorted((tmp_path / "parts" / "checkpoint").iterdir())
    assert [file.name for file in files] == ["round-000002.safetensors", "round-000004.safetensors"]
    files[1].write_bytes(files[1].read_bytes()[:keep])
    with pytest.warns(FedcladeWarning, match="round 2") as warned:
        do(digits, fc.Local(), tmp_path / "parts", resume=True)
    assert warns_about(files[1], warned[0].message)
    assert "\n" not in str(warned[0].message)
    assert written(tmp_path / "parts") == written(tmp_path / "whole")


def warns_about(path: Path, warning: Warning | str) -> bool:
    return isinstance(warning, FedcladeWarning) and warning.field == str(path)


def broken_after_four(digits: Clients, folder: Path) -> list[Path]:
    with pytest.raises(ZeroDivisionError):
        do(digits, fc.FedAvg(), folder, on_round=stop_after(4, ZeroDivisionError))
    return sorted((folder / "checkpoint").iterdir())


@pytest.mark.parametrize("where", [0.01, 0.3, 0.6, 0.999])
def test_one_wrong_bit_is_detected(where: float, digits: Clients, tmp_path: Path) -> None:
    before, last = broken_after_four(digits, tmp_path)
    data = bytearray(last.read_bytes())
    data[int(where * len(data))] ^= 1
    last.write_bytes(data)
    with pytest.warns(FedcladeWarning, match="round 2") as warned:
        newest = checkpoint.latest(before.parent)
    assert warns_about(last, warned[0].message)
    assert newest is not None
    assert newest.round == 2


def test_the_checkpoint_of_another_version_is_skipped(
    digits: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, last = broken_after_four(digits, tmp_path)
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", "fedclade-checkpoint-of-another-version")
        checkpoint.save(last.parent, checkpoint.Checkpoint(4, {}, {}, [], ""))
    with pytest.warns(FedcladeWarning, match=rf"{checkpoint.FORMAT}.*round 2") as warned:
        checkpoint.latest(last.parent)
    assert warns_about(last, warned[0].message)


def test_if_all_checkpoints_are_damaged_the_run_does_not_restart(
    digits: Clients, tmp_path: Path
) -> None:
    for file in broken_after_four(digits, tmp_path):
        file.write_bytes(b"not a checkpoint")
    with pytest.raises(fc.InvalidInputError) as caught:
        do(digits, fc.FedAvg(), tmp_path, resume=True)
    assert caught.value.field == str(tmp_path / "checkpoint" / "round-000004.safetensors")


@pytest.mark.parametrize(
    "rows", [[], [{"round": 4}], [{"round": 4, "failures": [{}]}], [4], {"round": 4}]
)
def test_a_checkpoint_with_an_invalid_history_is_damaged(
    rows: Any, digits: Clients, tmp_path: Path
) -> None:
    broken_after_four(digits, tmp_path)
    newest = checkpoint.latest(tmp_path / "checkpoint")
    assert newest is not None
    checkpoint.save(tmp_path / "checkpoint", replace(newest, history=rows))
    with pytest.warns(FedcladeWarning, match="round 2") as warned:
        checkpoint.latest(tmp_path / "checkpoint")
    assert warns_about(tmp_path / "checkpoint" / "round-000004.safetensors", warned[0].message)


@pytest.mark.parametrize("part", ["state", "memory"])
def test_a_checkpoint_without_a_tensor_of_the_method_is_an_error(
    part: str, digits: Clients, tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError):
        do(digits, fc.SCAFFOLD(), tmp_path, on_round=stop_after(4, ZeroDivisionError))
    newest = checkpoint.latest(tmp_path / "checkpoint")
    assert newest is not None
    name = "cluster_ids" if part == "state" else "ids"
    tensors = {key: value for key, value in getattr(newest, part).items() if key != name}
    checkpoint.save(tmp_path / "checkpoint", replace(newest, **{part: tensors}))
    with pytest.raises(
        fc.InvalidInputError,
        match=r"round 4\b.*scaffold",
        check=lambda error: error.field == "checkpoint",
    ):
        do(digits, fc.SCAFFOLD(), tmp_path, resume=True)


def test_only_the_last_two_checkpoints_stay_and_partial_files_are_not_read(
    digits: Clients, tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError):
        do(
            digits,
            fc.FedAvg(),
            tmp_path,
            checkpoint_every=1,
            on_round=stop_after(5, ZeroDivisionError),
        )
    folder = tmp_path / "checkpoint"
    assert [file.name for file in sorted(folder.iterdir())] == [
        "round-000004.safetensors",
        "round-000005.safetensors",
    ]
    (folder / "round-000006.partial").write_bytes(b"half")
    assert (
        do(digits, fc.FedAvg(), tmp_path, checkpoint_every=1, resume=True).summary["rounds"]
        == ROUNDS
    )


@pytest.fixture
def ctrl_c() -> Iterator[Callable[[], None]]:
    """A function that sends Ctrl-C, with Python's default handler, which is not set if the tests
    run in the background.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    # A run restores the handler.
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_ends_the_run_after_the_current_round(
    digits: Clients,
    tmp_path: Path,
    ctrl_c: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    do(digits, fc.FedAvg(), tmp_path / "whole")
    begun: list[int] = []

    @dataclass(frozen=True)
    class Pressed(fc.FedAvg):
        def round(self, *given: Any) -> State:
            begun.append(len(begun) + 1)
            if len(begun) == 3:
                ctrl_c()
            return super().round(*given)

    with pytest.raises(KeyboardInterrupt):
        do(digits, Pressed(), tmp_path / "parts", checkpoint_every=0)
    assert begun == [1, 2, 3]
    assert [file.name for file in (tmp_path / "parts" / "checkpoint").iterdir()] == [
        "round-000003.safetensors"
    ]
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.name == "fedclade"
    assert "Ctrl-C" in record.getMessage()
    assert capsys.readouterr() == ("", "")  # the library does not print
    do(digits, fc.FedAvg(), tmp_path / "parts", resume=True)
    assert written(tmp_path / "parts")["models"] == written(tmp_path / "whole")["models"]


def test_the_second_ctrl_c_ends_the_run_immediately(
    digits: Clients, tmp_path: Path, ctrl_c: Callable[[], None]
) -> None:
    def press_twice(row: dict[str, Any]) -> None:
        ctrl_c()
        ctrl_c()
        raise AssertionError("the run continued")

    with pytest.raises(KeyboardInterrupt):
        do(digits, fc.FedAvg(), tmp_path, on_round=press_twice)
    assert checkpoint.latest(tmp_path / "checkpoint").round == 1  # type: ignore[union-attr]


# --- a real process

SLOW = """
import os, time
from dataclasses import dataclass
import fedclade as fc

def stall(method):
    type(method).rounds_done += 1
    if type(method).rounds_done == int(os.environ.get("STALL_IN_ROUND", "0")):
        time.sleep(300)

@fc.register("method", "slow_fedavg")
@dataclass(frozen=True)
class SlowFedAvg(fc.FedAvg):
    def round(self, *arguments):
        state = super().round(*arguments)
        stall(self)
        return state

@fc.register("method", "slow_local")
@dataclass(frozen=True)
class SlowLocal(fc.Local):
    def round(self, *arguments):
        state = super().round(*arguments)
        stall(self)
        return state

SlowFedAvg.rounds_done = SlowLocal.rounds_done = 0
"""


def _has_rounds(folder: Path, rounds: int) -> bool:
    return (folder / "rounds.jsonl").exists() and (folder / "rounds.jsonl").read_bytes().count(
        b"\n"
    ) == rounds


def test_a_process_that_is_killed_or_interrupted_in_a_round_is_resumed_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    methods = dict(REGISTRY["method"])

    def words(method: str, folder: str, *more: str) -> list[str]:
        sets = ["run.rounds=16", "run.checkpoint_every=5", f"method.name={method}"]
        given = [word for one in sets for word in ("--set", one)]
        return [
            "run",
            "quickstart",
            *given,
            "--import",
            str(tmp_path / "slow.py"),
            "--out",
            str(tmp_path / folder),
            "-q",
            *more,
        ]

    def start(method: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "STALL_IN_ROUND": "13"}
        command = [sys.executable, "-m", "fedclade", *words(method, method)]
        # Where the tests themselves run in the background, SIGINT is ignored, and children would
        # inherit that.
        listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=listen,
        )

    killed, interrupted = start("slow_local"), start("slow_fedavg")
    try:
        end = time.monotonic() + 120
        while not (
            _has_rounds(tmp_path / "slow_local", 12) and _has_rounds(tmp_path / "slow_fedavg", 12)
        ):
            assert time.monotonic() < end
            assert killed.poll() is interrupted.poll() is None
            time.sleep(0.01)
        time.sleep(0.2)  # the thirteenth round has started
        killed.kill()
        interrupted.send_signal(signal.SIGINT)
        time.sleep(0.5)  # the current round would take minutes
        assert interrupted.poll() is None
        interrupted.send_signal(signal.SIGINT)
        killed.communicate(timeout=60)
        out, err = interrupted.communicate(timeout=60)
    finally:
        for process in (killed, interrupted):
            process.kill()
            process.wait()
    assert killed.returncode == -signal.SIGKILL
    assert interrupted.returncode == 130
    assert out == ""
    (line,) = err.splitlines()
    assert line.endswith(f"--out {tmp_path / 'slow_fedavg'} --resume")

    try:
        for method, next_round in (("slow_local", 11), ("slow_fedavg", 13)):
            assert not (tmp_path / method / "summary.json").exists()
            newest = max(file.name for file in (tmp_path / method / "checkpoint").iterdir())
            # killed: the last one due; interrupted: no round is lost
            assert newest == f"round-{next_round - 1:06d}.safetensors"
            for arguments in (words(method, method, "--resume"), words(method, f"{method} whole")):
                monkeypatch.setattr(sys, "argv", ["fedclade", *arguments])
                main.main()
            assert written(tmp_path / method) == written(tmp_path / f"{method} whole")
    finally:
        REGISTRY["method"].clear()
        REGISTRY["method"].update(methods)
        sys.modules.pop("slow", None)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("method", ["fedavg", pytest.param("scaffold", marks=pytest.mark.slow)])
def test_three_kills_at_random_moments_change_nothing(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """benchmarks/kill_and_resume.py kills each of four methods fifty times."""
    draw = random.Random(method)
    sets = ("run.rounds=36", "run.checkpoint_every=1", "run.eval_every=4", f"method.name={method}")
    given = [
        "run",
        "quickstart",
        *(word for one in sets for word in ("--set", one)),
        "-q",
        "--no-report",
    ]
    rounds = tmp_path / "parts" / "rounds.jsonl"

    def done() -> int:
        return rounds.read_bytes().count(b"\n") if rounds.exists() else 0

    for _ in range(3):
        until = done() + draw.randint(1, 8)
        command = [
            sys.executable,
            "-m",
            "fedclade",
            *given,
            "--out",
            str(tmp_path / "parts"),
            "--resume",
        ]
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        try:
            while done() < until and process.poll() is None:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 0.05))  # in a round, a line or a checkpoint
        finally:
            process.kill()
            _, err = process.communicate()
        assert process.returncode == -signal.SIGKILL, err.decode()
    assert not (tmp_path / "parts" / "summary.json").exists()
    for folder in ("parts", "whole"):
        monkeypatch.setattr(
            sys, "argv", ["fedclade", *given, "--out", str(tmp_path / folder), "--resume"]
        )
        main.main()
    assert written(tmp_path / "parts") == written(tmp_path / "whole")
