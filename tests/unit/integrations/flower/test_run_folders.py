"""The run directories of a server."""

from __future__ import annotations

import stat
from pathlib import Path

from fedclade.integrations.flower import run_folders


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
