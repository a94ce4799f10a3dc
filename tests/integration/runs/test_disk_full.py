"""A disk that fills up during a run: the error is one line, written files stay complete, and with
free space the run resumes.
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
from fedclade.errors import FedcladeWarning, WriteError
from fedclade.io import atomic, checkpoint
from fedclade.io.run_dir import RunDirectory

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def written(folder: Path) -> dict[str, Any]:
    """The files of a run, without the times."""
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
# Loaded into the process by --import: before a write it fills the disk so that the write fails.
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
        # Lazily: the traceback of a failed test still holds checkpoints mapped into memory.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """`fedclade` in this process: exit code and stderr."""

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


# The file that the process cannot write, the space that it needs and has, and the checkpoints then.
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
def test_the_process_ends_with_one_line_and_resumes_to_the_same_bytes(
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
    paths = sorted((folder / "checkpoint").iterdir())
    numbers = [checkpoint.read_tensors(path)[0]["round"] for path in paths]  # all are complete
    newest = numbers[-1]
    expected = (
        rf"fedclade: {re.escape(str(folder / name))}: .*\({room}\).*round {newest}\b.*"
        rf"--out {re.escape(str(folder))} --resume\.\n"
    )
    assert re.fullmatch(expected, process.stderr), process.stderr
    assert half_written(disk) == []
    assert numbers == (rounds or [newest - 3, newest])
    rows = RunDirectory(folder).history()  # no partial line
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


# --- simulated errors of the file system


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
    """From the `after`th time on, the file of this name cannot be written."""
    sync, times = atomic._sync, iter(range(after))

    def failing(path: Path) -> None:
        if path.name == f"{name}.partial" and next(times, None) is None:
            raise error
        sync(path)

    monkeypatch.setattr(atomic, "_sync", failing)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_failed_write_leaves_the_old_file_and_no_partial_one(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    refuse(monkeypatch, "file", OSError(number, os.strerror(number)))
    with pytest.raises(WriteError) as caught, atomic.atomic_write(path, 5) as temporary:
        temporary.write_text("after")
    assert caught.value.field == str(path)
    reason = {errno.ENOSPC: "disk is full", errno.EDQUOT: "quota"}
    assert reason.get(number, os.strerror(number)) in str(caught.value)
    assert "free)" not in str(caught.value)  # no sizes: there is space for five bytes
    assert isinstance(caught.value, fc.FedcladeError)
    assert isinstance(caught.value, OSError)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "before"


def test_the_error_has_the_needed_and_the_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200_000))
    path = tmp_path / "not there" / "a"
    with (
        pytest.raises(WriteError, match=r"4\.2 MB.*200\.0 kB") as caught,
        atomic.translate_os_errors(path, 4_200_000),
    ):
        raise FULL
    assert caught.value.field == str(path)


def test_only_file_system_errors_of_safetensors_are_write_errors(tmp_path: Path) -> None:
    message = (  # version 0.8.0
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )
    with (
        pytest.raises(WriteError) as caught,
        atomic.translate_os_errors(tmp_path / "a"),
    ):
        raise SafetensorError(message)
    assert caught.value.field == str(tmp_path / "a")
    with (
        pytest.raises(SafetensorError, match="InvalidHeader"),
        atomic.translate_os_errors(tmp_path / "a"),
    ):
        raise SafetensorError("InvalidHeader")


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()])
def test_a_partial_line_is_removed(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(io.FileIO):
        """Accepts only ten bytes, like a disk whose last page is nearly full."""

        space = 10

        def write(self, data: Any) -> int:
            if not self.space:
                raise error
            written = super().write(data[: self.space])
            self.space -= written
            return written

    path = tmp_path / "rounds.jsonl"
    atomic.append(path, '{"round": 1}')
    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda path, mode, buffering: Small(path, mode))
        with pytest.raises(WriteError if error is FULL else KeyboardInterrupt):
            atomic.append(path, '{"round": 2}')
    assert path.read_text() == '{"round": 1}\n'
    atomic.append(path, '{"round": 2}')
    assert path.read_text() == '{"round": 1}\n{"round": 2}\n'


# The number of writes of a file before the one that fails, and the last checkpoint then.
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
def test_the_error_in_python_has_the_last_checkpoint(
    name: str,
    digits: Clients,
    undisturbed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    after, newest = FILES[name]
    with monkeypatch.context() as full:
        refuse(full, name, after=after)
        with pytest.raises(WriteError) as caught:
            do(digits, tmp_path / "parts")
    path = Path(caught.value.field)
    assert path.is_relative_to(tmp_path / "parts")
    assert path.name == name
    numbers = re.findall(r"round (\d+)", str(caught.value))
    assert numbers == ([] if newest is None else [str(newest)])
    assert half_written(tmp_path) == []
    do(digits, tmp_path / "parts", resume=True)
    assert written(tmp_path / "parts") == undisturbed


def test_a_damaged_checkpoint_is_not_the_resume_point(
    digits: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ZeroDivisionError):
        do(digits, tmp_path, on_round=lambda row: 1 / (4 - row["round"]))
    (tmp_path / "checkpoint" / "round-000004.safetensors").write_bytes(b"damaged")
    refuse(monkeypatch, "rounds.jsonl")
    with (
        pytest.warns(FedcladeWarning, match="round-000004") as warned,
        pytest.raises(WriteError, match="round 2"),
    ):
        do(digits, tmp_path, resume=True)
    assert len(warned) == 1  # at the start, and not again at the end
    (tmp_path / "checkpoint" / "round-000002.safetensors").write_bytes(b"damaged")
    with pytest.raises(fc.InvalidInputError) as caught:
        do(digits, tmp_path, resume=True)
    assert caught.value.field == str(tmp_path / "checkpoint" / "round-000004.safetensors")


def test_an_interrupt_whose_checkpoint_cannot_be_written_is_a_write_error(
    digits: Clients, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    refuse(monkeypatch, "round-000003.safetensors")
    with pytest.raises(WriteError, match="round 2") as caught:
        do(digits, tmp_path, on_round=interrupt)
    assert caught.value.field == str(tmp_path / "checkpoint" / "round-000003.safetensors")


def test_partial_files_of_a_killed_process_are_removed(digits: Clients, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        do(digits, tmp_path, on_round=lambda row: 1 / (3 - row["round"]))
    users = {
        tmp_path / name for name in (".tmpnotes", ".tmpjZMOIW", "film.partial")
    }  # the user may have other files in this folder
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


def test_safetensors_names_its_partial_file_as_expected(tmp_path: Path) -> None:
    """`remove_partials` removes the file of a process that is killed while safetensors writes."""
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
    for name, checkpoints in (("fedavg-seed0/summary.json", ["2"]), ("comparison.json", [])):
        with monkeypatch.context() as full:
            refuse(full, Path(name).name)
            code, err = command(*given, "--resume")
        assert err.startswith(f"fedclade: {tmp_path / name}: ")
        assert err.endswith(f"--out {tmp_path} --resume.\n")
        assert re.findall(r"round (\d+)", err) == checkpoints
        assert code == 2
    assert command(*given, "--resume") == (0, "")


def test_a_report_that_cannot_be_written_does_not_affect_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str]]
) -> None:
    page = tmp_path / "run" / "report.html"
    refuse(monkeypatch, "report.html")
    code, err = command(*words(tmp_path / "run"))
    assert re.fullmatch(rf"fedclade: .*{re.escape(str(page))}: .*disk is full.*\n", err), err
    assert code == 0
    assert not page.exists()
    assert (tmp_path / "run" / "summary.json").exists()
    code, err = command("report", str(tmp_path / "run"))
    assert re.fullmatch(rf"fedclade: {re.escape(str(page))}: .*disk is full.*\n", err), err
    assert code == 2
