"""The run directories of a server, and how its errors are logged."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from fedclade.errors import InvalidInputError
from fedclade.integrations.flower import run_folders
from fedclade.integrations.flower.apps import one_line_errors


def test_two_runs_at_once_get_different_folders(tmp_path: Path) -> None:
    with run_folders.new_folder(tmp_path) as one:
        with run_folders.new_folder(tmp_path) as other:
            assert (one.name, other.name) == ("run-1", "run-2")
        with run_folders.locked(one) as is_ours:
            assert not is_ours
    with run_folders.locked(one) as is_ours:
        assert is_ours
    assert stat.S_IMODE(one.stat().st_mode) == 0o700


def test_unfinished_runs_are_listed_with_the_newest_first(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        (tmp_path / f"run-{number}").mkdir()
    (tmp_path / "run-old").mkdir()
    (tmp_path / "run-2" / "summary.json").write_text("{}")
    assert [folder.name for folder in run_folders.unfinished(tmp_path)] == ["run-10", "run-1"]


def test_an_error_of_the_user_is_logged_without_its_traceback() -> None:
    shown = []
    for error in (
        InvalidInputError("run.rounds = -1: too few.", "run.rounds"),
        ZeroDivisionError(),
    ):
        about = (type(error), error, None)
        record = logging.LogRecord("flwr", logging.ERROR, "", 1, "%s failed", ("it",), about)
        assert one_line_errors(record)
        shown.append((record.getMessage(), record.exc_info))
    assert shown[0] == ("fedclade: run.rounds = -1: too few.", None)
    assert shown[1][1] is not None
