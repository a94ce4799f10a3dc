"""A disk that fills up in the middle of a run: one clear line, what was written stays whole, and
with room again the run goes on.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

import fedclade as fc
from fedclade.analysis import report
from fedclade.analysis.report.live_server import View
from fedclade.cli import main
from fedclade.data import Clients
from fedclade.errors import WriteError
from fedclade.io import atomic, checkpoint
from fedclade.io.run_dir import RunDirectory

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def written(folder: Path) -> dict[str, Any]:
    """What a run left behind, less the times."""
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "models": (folder / "models" / "models.safetensors").read_bytes(),
        "clients": (folder / "clients.csv").read_text(),
        "seen": (folder / "client_features.safetensors").read_bytes(),
        "experiment": (folder / "experiment.toml").read_text(),
        "rounds": [
            {name: value for name, value in row.items() if name != "seconds"} for row in rows
        ],
        "summary": {name: value for name, value in summary.items() if name != "seconds"},
    }


def half_written(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.rglob("*")
        if path.name.endswith(".partial") or path.name.startswith(".tmp")
    ]


# --- a real process on a real disk

PAGE = 4096  # what this disk hands out at a time
# Loaded into the process by --import: right before a write it leaves so little room that the write
# cannot be done.
BALLAST = f"""
import json
import os
from pathlib import Path
from fedclade.io.run_dir import RunDirectory

CASE, DISK = os.environ["CASE"], Path(os.environ["DISK"])

def fill(leave):
    free = os.statvfs(DISK).f_bavail * {PAGE}
    (DISK / "ballast").write_bytes(bytes(free - leave))

def before(name, fills):
    then = getattr(RunDirectory, name)
    def call(self, *given):
        if not (DISK / "ballast").exists():
            fills(self, *given)
        return then(self, *given)
    setattr(RunDirectory, name, call)

def line_ends_on_another_page(store, row):
    if (store.folder / "rounds.jsonl").stat().st_size % {PAGE} + len(json.dumps(row)) > {PAGE}:
        fill(0)

if CASE == "rounds.jsonl":
    before("append_round", line_ends_on_another_page)
elif CASE == "checkpoint":
    before("save_checkpoint", lambda store, point: fill({2 * PAGE}) if point.round == 9 else None)
else:
    before("write_models", lambda store, *given: fill({PAGE}))
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    words = [mount or "", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True) if mount else None
    if done is None or done.returncode:
        why = done.stderr.strip() if done else "there is no mount"
        pytest.skip(
            f"a small disk cannot be mounted here ({why}): be root, or run the tests in `unshare"
            " -rm`"
        )
    try:
        yield folder
    finally:
        # Lazily: where a test fails, its traceback still holds checkpoints that are mapped into
        # memory.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """`fedclade` in this process: exit code and what it complained about."""

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedclade", *words])
        code = 0
        try:
            main.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return code, capsys.readouterr().err

    return call


def words(folder: Path, *more: str) -> list[str]:
    settings = (
        "run.rounds=12",
        "run.checkpoint_every=3",
        "run.eval_every=1",
        "model.hidden=32",
        "local.epochs=1",
    )
    return [
        "run",
        "quickstart",
        *(word for one in settings for word in ("--set", one)),
        "--out",
        str(folder),
        "-q",
        *more,
    ]


# What the process was about to write, the room it needs and is given, and the checkpoints that are
# there then.
CASES = {
    "rounds.jsonl": ("rounds.jsonl", r"\d+ bytes needed, 0 bytes free", None),
    "checkpoint": (
        "checkpoint/round-000009.safetensors",
        r"1\d\.\d kB needed, 8\.2 kB free",
        [3, 6],
    ),
    "models": ("models/models.safetensors", r"1\d\.\d kB needed, 4\.1 kB free", [9, 12]),
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (case != "checkpoint")) for case in CASES],
)
def test_the_process_ends_with_one_line_and_with_room_again_goes_on_to_the_same_bytes(
    case: str, disk: Path, tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    (tmp_path / "ballast.py").write_text(BALLAST)
    folder = disk / "run"
    process = subprocess.run(
        [
            sys.executable,
            "-m",
            "fedclade",
            *words(folder, "--import", str(tmp_path / "ballast.py")),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CASE": case, "DISK": str(disk)},
        capture_output=True,
        text=True,
    )
    assert (process.returncode, process.stdout) == (2, "")
    name, room, rounds = CASES[case]
    kept = sorted((folder / "checkpoint").iterdir())
    numbers = [checkpoint.read_tensors(path)[0]["round"] for path in kept]  # which are whole
    newest = numbers[-1]
    told = (
        rf"fedclade: {re.escape(str(folder / name))}: it cannot be written, the disk is full"
        rf" \({room}\): make room\. "
        rf"The last checkpoint is of round {newest}; resuming continues from there\. "
        rf"Continue with the same command and --out {re.escape(str(folder))} --resume\.\n"
    )
    assert re.fullmatch(told, process.stderr), process.stderr
    assert half_written(disk) == []
    assert numbers == (rounds or [newest - 3, newest])
    rows = RunDirectory(folder).history()  # no half of a line
    assert (
        newest
        <= len(rows)
        == rows[-1]["round"]
        < (newest + 3 if case == "rounds.jsonl" else newest + 4)
    )
    assert report.collect([folder])
    assert View(folder).data() is not None
    assert not (folder / "summary.json").exists()

    (disk / "ballast").unlink()
    assert command(*words(folder, "--resume")) == (0, "")
    assert command(*words(tmp_path / "whole")) == (0, "")
    assert written(folder) == written(tmp_path / "whole")


# --- what the system says, said by a test


def do(clients: Clients, out: Path, **changed: Any) -> fc.Result:
    settings: dict[str, Any] = {
        "rounds": 5,
        "clients_per_round": 0.3,
        "lr": 0.2,
        "eval_every": 2,
        "checkpoint_every": 2,
        "seed": 2,
    }
    return fc.run(fc.SCAFFOLD(), clients, fc.models.MLP(8), out=out, **{**settings, **changed})


def refuse(
    monkeypatch: pytest.MonkeyPatch, name: str, error: OSError = FULL, after: int = 0
) -> None:
    """From the `after`th time on, nothing that is to be called so comes to the disk."""
    sync, times = atomic._sync, iter(range(after))

    def failing(path: Path) -> None:
        if path.name == f"{name}.partial" and next(times, None) is None:
            raise error
        sync(path)

    monkeypatch.setattr(atomic, "_sync", failing)


SAYS = {
    errno.ENOSPC: "the disk is full: make room",
    errno.EDQUOT: "disk quota exceeded: make room",
    errno.EROFS: "the system says: Read-only file system",
    errno.EIO: "the system says: Input/output error",
}


@pytest.mark.parametrize("number", SAYS)
def test_a_file_that_is_not_taken_is_not_half_there_and_the_one_before_stays(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    refuse(monkeypatch, "file", OSError(number, os.strerror(number)))
    with pytest.raises(WriteError) as caught, atomic.atomic_write(path, 5) as temporary:
        temporary.write_text("after")
    assert (
        str(caught.value) == f"{path}: it cannot be written, {SAYS[number]}."
    )  # there is room for five bytes: no numbers
    assert isinstance(caught.value, fc.FedcladeError)
    assert isinstance(caught.value, OSError)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "before"


def test_it_says_how_much_is_needed_and_how_much_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    message = (
        r"a: it cannot be written, the disk is full \(4\.2 MB needed, 200\.0 kB free\): make"
        r" room\.$"
    )
    with (
        pytest.raises(WriteError, match=message),
        atomic.translate_os_errors(tmp_path / "not there" / "a", 4_200_000),
    ):
        raise FULL


def test_safetensors_own_errors_are_told_apart(tmp_path: Path) -> None:
    said = (  # version 0.8.0
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )
    with (
        pytest.raises(WriteError, match="the disk is full: make room"),
        atomic.translate_os_errors(tmp_path / "a"),
    ):
        raise SafetensorError(said)
    with (
        pytest.raises(SafetensorError, match="InvalidHeader"),
        atomic.translate_os_errors(tmp_path / "a"),
    ):
        raise SafetensorError("InvalidHeader")


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()])
def test_half_a_line_is_taken_back(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(io.FileIO):
        """Takes ten bytes and no more, as a disk does whose last page is nearly full."""

        room = 10

        def write(self, data: Any) -> int:
            if not self.room:
                raise error
            taken = super().write(data[: self.room])
            self.room -= taken
            return taken

    path = tmp_path / "rounds.jsonl"
    atomic.append(path, '{"round": 1}')
    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda path, mode, buffering: Small(path, mode))
        with pytest.raises(WriteError if error is FULL else KeyboardInterrupt):
            atomic.append(path, '{"round": 2}')
    assert path.read_text() == '{"round": 1}\n'
    atomic.append(path, '{"round": 2}')
    assert path.read_text() == '{"round": 1}\n{"round": 2}\n'


# How often a file is written before the time at which it is refused, and the checkpoint that there
# is then.
FILES = {
    "experiment.toml": (0, None),
    "rounds.jsonl": (0, None),
    "round-000002.safetensors": (0, None),
    "round-000004.safetensors": (0, 2),
    "client_features.safetensors": (1, 4),
    "models.safetensors": (0, 5),
    "clients.csv": (0, 5),
    "summary.json": (0, 5),
}


@pytest.fixture(scope="module")
def undisturbed(digits: Clients, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    do(digits, folder)
    return written(folder)


@pytest.mark.parametrize("name", FILES)
def test_from_python_it_is_an_error_that_says_where_to_go_on(
    name: str,
    digits: Clients,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    after, newest = FILES[name]
    left = f"The last checkpoint is of round {newest}; resuming continues from there."
    with monkeypatch.context() as full:
        refuse(full, name, after=after)
        with pytest.raises(WriteError) as caught:
            do(digits, tmp_path / "parts")
    said = str(caught.value)
    assert re.match(
        rf"{re.escape(str(tmp_path / 'parts'))}/(\w+/)?{re.escape(name)}: it cannot be written, the"
        r" disk is full",
        said,
    )
    assert said.endswith(
        left if newest is not None else "No checkpoint yet; resuming will restart the run."
    )
    assert half_written(tmp_path) == []
    do(digits, tmp_path / "parts", resume=True)
    assert written(tmp_path / "parts") == undisturbed


def test_a_damaged_checkpoint_is_not_called_whole(
    digits: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ZeroDivisionError):
        do(digits, tmp_path, on_round=lambda row: 1 / (4 - row["round"]))
    (tmp_path / "checkpoint" / "round-000004.safetensors").write_bytes(b"damaged")
    refuse(monkeypatch, "rounds.jsonl")
    with (
        pytest.warns(UserWarning, match="damaged checkpoint") as told,
        pytest.raises(WriteError, match="checkpoint is of round 2"),
    ):
        do(digits, tmp_path, resume=True)
    assert len(told) == 1  # when it began, and not again at its end
    (tmp_path / "checkpoint" / "round-000002.safetensors").write_bytes(b"damaged")
    with pytest.raises(fc.InvalidInputError, match="no other checkpoint"):
        do(digits, tmp_path, resume=True)


def test_an_interrupt_that_cannot_be_saved_says_so(
    digits: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    refuse(monkeypatch, "round-000003.safetensors")
    with pytest.raises(
        WriteError,
        match=r"round-000003\.safetensors: it cannot .* The last checkpoint is of round 2",
    ):
        do(digits, tmp_path, on_round=interrupt)


def test_what_a_killed_process_left_half_written_is_removed(
    digits: Clients, tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError):
        do(digits, tmp_path, on_round=lambda row: 1 / (3 - row["round"]))
    users = {
        tmp_path / name for name in (".tmpnotes", ".tmpjZMOIW", "film.partial")
    }  # this folder may be the user's own
    for path in users:
        path.write_text("a file of the user's")
    (tmp_path / "checkpoint" / "folder.partial").mkdir()
    for name in (
        "checkpoint/round-000004.safetensors.partial",
        "checkpoint/.tmpjZMOIW",
        "rounds.jsonl.partial",
    ):
        (tmp_path / name).write_bytes(b"half")
    do(digits, tmp_path, resume=True)
    assert set(half_written(tmp_path)) == {*users, tmp_path / "checkpoint" / "folder.partial"}


def test_safetensors_names_its_half_written_file_as_expected(tmp_path: Path) -> None:
    """A process that is killed while safetensors writes: what it leaves is what `clear` removes."""
    script = (
        "import sys, numpy; from safetensors.numpy import save_file\nwhile True: save_file({'a':"
        " numpy.zeros(10**7)}, sys.argv[1])"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "a.partial")])
    try:
        while not half_written(tmp_path):
            assert process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    atomic.remove_partials(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_is_resumed_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str]]
) -> None:
    given = [
        "compare",
        "quickstart",
        "--methods",
        "fedavg,local",
        "--set",
        "run.rounds=2",
        "--out",
        str(tmp_path),
        "-q",
        "--no-report",
    ]
    left = "The last checkpoint is of round 2; resuming continues from there. "
    go_on = f"Continue with the same command and --out {tmp_path} --resume."
    for where, then in (("fedavg-seed0/summary.json", left + go_on), ("comparison.json", go_on)):
        with monkeypatch.context() as full:
            refuse(full, Path(where).name)
            code, told = command(*given, "--resume")
        assert (
            told
            == f"fedclade: {tmp_path / where}: it cannot be written, the disk is full: make room."
            f" {then}\n"
        )
        assert code == 2
    assert command(*given, "--resume") == (0, "")


def test_a_report_that_does_not_fit_is_told_and_the_run_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str]]
) -> None:
    page = tmp_path / "run" / "report.html"
    refuse(monkeypatch, "report.html")
    code, told = command(*words(tmp_path / "run"))
    assert (
        told
        == f"fedclade: the report could not be written ({page}: it cannot be written, the disk is"
        " full: make room.).\n"
    )
    assert code == 0
    assert not page.exists()
    assert (tmp_path / "run" / "summary.json").exists()
    assert command("report", str(tmp_path / "run")) == (
        2,
        f"fedclade: {page}: it cannot be written, the disk is full: make room.\n",
    )
