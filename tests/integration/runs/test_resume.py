"""A run that was stopped goes on as if nothing had happened, or says why it cannot."""

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
        "lr_decay": 0.9,
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
    """All that a run left behind, less the times."""
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
def test_an_interrupted_run_goes_on_to_the_bytes_of_an_undisturbed_one(
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
def test_a_run_that_broke_goes_on_from_its_last_checkpoint(
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
def test_a_run_may_be_stopped_as_often_as_one_likes(
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
    """Local that is interrupted when the clients have trained and the round is not yet counted."""

    calls: ClassVar[int] = 0
    stop_in: ClassVar[int] = 0

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        state = super().round(fed, state, cohort, key)
        type(self).calls += 1
        if type(self).calls == type(self).stop_in:
            raise KeyboardInterrupt
        return state


def test_a_round_that_was_half_done_is_done_again_from_the_memory_of_the_round_before(
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


def test_resuming_a_finished_run_trains_nothing_and_gives_its_result(
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


def test_a_folder_without_a_checkpoint_starts_anew(digits: Clients, tmp_path: Path) -> None:
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


def test_without_resume_a_folder_that_holds_a_run_is_refused_and_left_alone(
    digits: Clients, tmp_path: Path
) -> None:
    do(digits, fc.FedAvg(), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        do(digits, fc.FedAvg(), tmp_path / "half", on_round=stop_after(2))
    for folder in (tmp_path / "whole", tmp_path / "half"):
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        with pytest.raises(
            fc.InvalidInputError, match=r"already holds a run.*another folder.*--resume"
        ):
            do(digits, fc.FedAvg(), folder)
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


OTHER: list[dict[str, Any]] = [
    {"seed": 3},
    {"lr": 0.3},
    {"model": fc.models.MLP(9)},
    {"clients_per_round": 0.4},
    {"lr_decay": 1.0},
]


@pytest.mark.parametrize("changed", OTHER, ids=lambda changed: next(iter(changed)))
def test_the_checkpoint_of_another_experiment_is_refused(
    changed: dict[str, Any], digits: Clients, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        do(digits, fc.FedAvg(), tmp_path, on_round=stop_after(2))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(fc.InvalidInputError, match="another experiment"):
        do(digits, fc.FedAvg(), tmp_path, resume=True, **changed)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_checkpoint_of_another_method_or_of_other_clients_is_refused(
    digits: Clients, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        do(digits, fc.FedAvg(), tmp_path, on_round=stop_after(2))
    with pytest.raises(fc.InvalidInputError, match="another experiment"):
        do(digits, fc.Local(), tmp_path, resume=True)
    others = fc.data.partition(
        fc.data.load("digits"), fc.data.LabelClusters(clusters=5, classes=2), clients=20, seed=1
    )
    with pytest.raises(fc.InvalidInputError, match="another experiment"):
        do(others, fc.FedAvg(), tmp_path, resume=True)


@pytest.mark.parametrize("changed", OTHER, ids=lambda changed: next(iter(changed)))
def test_a_finished_run_of_another_experiment_is_not_given_out_as_this_one(
    changed: dict[str, Any], digits: Clients, tmp_path: Path
) -> None:
    do(digits, fc.FedAvg(), tmp_path)
    with pytest.raises(fc.InvalidInputError, match="another experiment"):
        do(digits, fc.FedAvg(), tmp_path, resume=True, **changed)


def test_the_checkpoint_of_other_inputs_is_refused(tmp_path: Path) -> None:
    x, y = torch.randn(2, 10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 2
    first, second = (fc.data.from_arrays([(x[i], y), (x[i] + 1, y)]) for i in range(2))
    with pytest.raises(KeyboardInterrupt):
        do(first, fc.FedAvg(), tmp_path, clients_per_round=2, on_round=stop_after(2))
    with pytest.raises(fc.InvalidInputError, match="another experiment"):
        do(second, fc.FedAvg(), tmp_path, clients_per_round=2, resume=True)


def test_the_checkpoint_of_a_module_of_another_size_is_refused(
    digits: Clients, tmp_path: Path
) -> None:
    small, large = (
        nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        for width in (4, 8)
    )
    with pytest.raises(KeyboardInterrupt):
        do(digits, fc.FedAvg(), tmp_path, model=small, on_round=stop_after(2))
    with pytest.raises(fc.InvalidInputError, match="another experiment"):
        do(digits, fc.FedAvg(), tmp_path, model=large, resume=True)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_a_damaged_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(
    keep: int, digits: Clients, tmp_path: Path
) -> None:
    do(digits, fc.Local(), tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        do(digits, fc.Local(), tmp_path / "parts", on_round=stop_after(4, ZeroDivisionError))
    files = sorted((tmp_path / "parts" / "checkpoint").iterdir())
    assert [file.name for file in files] == ["round-000002.safetensors", "round-000004.safetensors"]
    files[1].write_bytes(files[1].read_bytes()[:keep])
    with pytest.warns(
        UserWarning,
        match=r"round-000004\.safetensors: damaged checkpoint .* The run goes on from round 2",
    ) as told:
        do(digits, fc.Local(), tmp_path / "parts", resume=True)
    assert "\n" not in str(told[0].message)
    assert written(tmp_path / "parts") == written(tmp_path / "whole")


def broken_after_four(digits: Clients, folder: Path) -> list[Path]:
    with pytest.raises(ZeroDivisionError):
        do(digits, fc.FedAvg(), folder, on_round=stop_after(4, ZeroDivisionError))
    return sorted((folder / "checkpoint").iterdir())


@pytest.mark.parametrize("where", [0.01, 0.3, 0.6, 0.999])
def test_one_wrong_bit_is_noticed(where: float, digits: Clients, tmp_path: Path) -> None:
    before, last = broken_after_four(digits, tmp_path)
    data = bytearray(last.read_bytes())
    data[int(where * len(data))] ^= 1
    last.write_bytes(data)
    with pytest.warns(UserWarning, match=rf"{last.name}: .* The run goes on from round 2"):
        found = checkpoint.latest(before.parent)
    assert found is not None
    assert found.round == 2


def test_the_checkpoint_of_another_version_is_passed_over(
    digits: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, last = broken_after_four(digits, tmp_path)
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", "fedclade-checkpoint-of-another-version")
        now = checkpoint.Checkpoint(4, {}, {}, [], "")
        checkpoint.save(last.parent, now)
    with pytest.warns(
        UserWarning, match=r"not a checkpoint of this version of fedclade .* goes on from round 2"
    ):
        checkpoint.latest(last.parent)


def test_where_no_checkpoint_is_whole_the_run_is_not_begun_anew_in_silence(
    digits: Clients, tmp_path: Path
) -> None:
    for file in broken_after_four(digits, tmp_path):
        file.write_bytes(b"not a checkpoint")
    with pytest.raises(
        fc.InvalidInputError,
        match=r"round-000004\.safetensors: damaged .* no other checkpoint: restart the run",
    ):
        do(digits, fc.FedAvg(), tmp_path, resume=True)


@pytest.mark.parametrize(
    "rows", [[], [{"round": 4}], [{"round": 4, "failures": [{}]}], [4], {"round": 4}]
)
def test_a_history_that_was_made_up_is_damage(rows: Any, digits: Clients, tmp_path: Path) -> None:
    broken_after_four(digits, tmp_path)
    found = checkpoint.latest(tmp_path / "checkpoint")
    assert found is not None
    checkpoint.save(tmp_path / "checkpoint", replace(found, history=rows))
    with pytest.warns(
        UserWarning, match=r"round-000004\.safetensors: damaged checkpoint .* goes on from round 2"
    ):
        checkpoint.latest(tmp_path / "checkpoint")


@pytest.mark.parametrize("part", ["state", "memory"])
def test_a_checkpoint_that_was_made_up_is_refused_in_words(
    part: str, digits: Clients, tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError):
        do(digits, fc.SCAFFOLD(), tmp_path, on_round=stop_after(4, ZeroDivisionError))
    found = checkpoint.latest(tmp_path / "checkpoint")
    assert found is not None
    name = "cluster_ids" if part == "state" else "ids"
    tensors = {key: value for key, value in getattr(found, part).items() if key != name}
    checkpoint.save(tmp_path / "checkpoint", replace(found, **{part: tensors}))
    with pytest.raises(
        fc.InvalidInputError, match="the checkpoint of round 4 does not hold what scaffold needs"
    ):
        do(digits, fc.SCAFFOLD(), tmp_path, resume=True)


def test_only_the_last_two_checkpoints_are_kept_and_no_half_written_file_is_taken_for_one(
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
    """Python's own way with Ctrl-C, which is off where the tests run in the background; and a
    Ctrl-C.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    assert (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # a run puts back what it found
    signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_ends_the_run_after_the_round_in_hand(
    digits: Clients, tmp_path: Path, ctrl_c: Callable[[], None], capsys: pytest.CaptureFixture[str]
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
    assert capsys.readouterr().err == "\nending after this round; Ctrl-C again ends at once\n"
    do(digits, fc.FedAvg(), tmp_path / "parts", resume=True)
    assert written(tmp_path / "parts")["models"] == written(tmp_path / "whole")["models"]


def test_the_second_ctrl_c_ends_it_at_once(
    digits: Clients, tmp_path: Path, ctrl_c: Callable[[], None]
) -> None:
    def press_twice(row: dict[str, Any]) -> None:
        ctrl_c()
        ctrl_c()
        raise AssertionError("it went on")

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
        time.sleep(0.2)  # the thirteenth round has begun
        killed.kill()
        interrupted.send_signal(signal.SIGINT)
        time.sleep(0.5)  # the round in hand would go on for minutes
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
    first, second = (
        "\nending after this round; Ctrl-C again ends at once\n",
        "fedclade: interrupted; continue with the same command and",
    )
    assert err == f"{first}{second} --out {tmp_path / 'slow_fedavg'} --resume\n"

    try:
        for method, first in (("slow_local", 11), ("slow_fedavg", 13)):
            assert not (tmp_path / method / "summary.json").exists()
            newest = max(file.name for file in (tmp_path / method / "checkpoint").iterdir())
            assert (
                newest == f"round-{first - 1:06d}.safetensors"
            )  # killed: the last one due; interrupted: no round is lost
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
    """benchmarks/kill_and_resume.py does fifty of each of four methods."""
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
            _, told = process.communicate()
        assert process.returncode == -signal.SIGKILL, told.decode()
    assert not (tmp_path / "parts" / "summary.json").exists()
    for folder in ("parts", "whole"):
        monkeypatch.setattr(
            sys, "argv", ["fedclade", *given, "--out", str(tmp_path / folder), "--resume"]
        )
        main.main()
    assert written(tmp_path / "parts") == written(tmp_path / "whole")
