"""Atomic writes: a file is complete or absent. Errors of the file system become `WriteError`."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.filesize import decimal
from safetensors import SafetensorError

from fedclade.errors import WriteError

_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "disk quota exceeded"}


@contextmanager
def atomic_write(path: Path, size: int | None = None) -> Iterator[Path]:
    """A context that gives a temporary path to write to, and renames it to `path` at its end.

    The rename follows after the data are on the disk, so that `path` is complete or absent even
    after a power cut.

    Args:
        path: the file to write.
        size: its size in bytes, for the error message; None if it is not known.
    """
    temporary = path.with_name(f"{path.name}.partial")
    with translate_os_errors(path, size):
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):  # the first error matters
                temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def write_text(path: Path, text: str, mode: int | None = None) -> None:
    """Write a text file atomically.

    Args:
        path: the file.
        text: its text.
        mode: its permissions, which it has before it has any content; None for the usual ones.
    """
    data = text.encode()
    with atomic_write(path, len(data)) as temporary:
        if mode is not None:
            temporary.unlink(missing_ok=True)
            temporary.touch(mode, exist_ok=False)
        temporary.write_bytes(data)


def append(path: Path, line: str) -> None:
    """Add a line to a file. If it cannot be written whole, the file is cut back to its old end."""
    remaining = f"{line}\n".encode()
    with translate_os_errors(path, len(remaining)), path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            while remaining:
                remaining = remaining[file.write(remaining) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(end)
            raise


@contextmanager
def translate_os_errors(path: Path, size: int | None = None) -> Iterator[None]:
    """A context in which errors of the file system become a `WriteError` about `path`.

    Args:
        path: the file or folder that is written.
        size: its size in bytes, for the error message; None if it is not known.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _errno(error)
        if number is None:
            raise
        raise WriteError(
            f"{path}: cannot be written: {_reason(number, path, size)}.", str(path)
        ) from error


def remove_partials(folder: Path) -> None:
    """Remove the temporary files that a killed process left: ours and those of safetensors."""
    for pattern in ("*.partial", ".tmp??????"):
        for path in folder.glob(pattern):
            if path.is_file():
                path.unlink(missing_ok=True)


def _errno(error: OSError | SafetensorError) -> int | None:
    """The errno of an error; None for a `WriteError` and for an error without one."""
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))  # safetensors passes on only the message
    return int(match[1]) if match else None


def _reason(number: int, path: Path, size: int | None) -> str:
    if number not in _FULL:
        return os.strerror(number)
    free = shutil.disk_usage(
        next(folder for folder in path.absolute().parents if folder.exists())
    ).free
    # A disk may have free bytes but no free inode. The free space of a quota is not known.
    numbers = (
        f" ({decimal(size)} needed, {decimal(free)} free)"
        if size is not None and number == errno.ENOSPC and free < size
        else ""
    )
    return f"{_FULL[number]}{numbers}. Free some disk space"


def _sync(path: Path) -> None:
    """Wait until this file, or the renames in this folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
