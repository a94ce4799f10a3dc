"""The run directories of a server: run-1, run-2, … in one folder. Two runs never share one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = "lock"  # a file; the operating system removes the lock when its process ends


def unfinished(base: Path) -> list[Path]:
    """The directories of unfinished runs, the newest first."""
    return [
        folder
        for _, folder in sorted(_numbered(base).items(), reverse=True)
        if not (folder / "summary.json").exists()
    ]


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold a run directory. The value is False if another process holds it.

    Args:
        folder: the run directory.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


@contextmanager
def new_folder(base: Path) -> Iterator[Path]:
    """Create the next run directory, and hold it. Only the owner can read it.

    Args:
        base: the folder of the run directories.
    """
    base.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        folder = base / f"run-{max(_numbered(base), default=0) + 1}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:  # another run has just created it
            continue
        with locked(folder) as is_ours:
            if is_ours:
                yield folder
                return


def _numbered(base: Path) -> dict[int, Path]:
    return {
        int(folder.name[4:]): folder for folder in base.glob("run-*") if folder.name[4:].isdigit()
    }
