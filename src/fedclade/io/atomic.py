"""Files that are there whole or not at all, and what is said of those that cannot be written."""

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
    """Where to write what is to be at `path`: it comes there when it is written and on the disk,
    or, if the power is cut, not at all.

    size: bytes that it takes, where they are known.
    """
    temporary = path.with_name(f"{path.name}.partial")
    with translate_os_errors(path, size):
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):  # what went wrong before is what matters
                temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """A text file that is there whole or not at all."""
    data = text.encode()
    with atomic_write(path, len(data)) as temporary:
        temporary.write_bytes(data)


def append(path: Path, line: str) -> None:
    """Add a line to a file. One that does not fit is taken back: no half of it stays."""
    left = f"{line}\n".encode()
    with translate_os_errors(path, len(left)), path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            while left:
                left = left[file.write(left) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(end)
            raise


@contextmanager
def translate_os_errors(path: Path, size: int | None = None) -> Iterator[None]:
    """What the disk refuses while `path` is written, in words for a person."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = _number(error)
        if number is None:
            raise
        raise WriteError(f"{path}: it cannot be written, {_why(number, path, size)}.") from error


def remove_partials(folder: Path) -> None:
    """Remove what a process that was killed left half written: a file of ours, or the one that
    safetensors makes first.
    """
    for pattern in ("*.partial", ".tmp??????"):
        for path in folder.glob(pattern):
            if path.is_file():
                path.unlink(missing_ok=True)


def _number(error: OSError | SafetensorError) -> int | None:
    """The system's number of an error; None where it is another kind, or has been put in words
    already.
    """
    if isinstance(error, OSError):
        return error.errno
    match = re.search(r"\(os error (\d+)\)", str(error))  # safetensors passes on the message alone
    return int(match[1]) if match else None


def _why(number: int, path: Path, size: int | None) -> str:
    if number not in _FULL:
        return f"the system says: {os.strerror(number)}"
    free = shutil.disk_usage(
        next(folder for folder in path.absolute().parents if folder.exists())
    ).free
    # A disk may have bytes left and no place for another file; and of a share only the system knows
    # what is left.
    numbers = (
        f" ({decimal(size)} needed, {decimal(free)} free)"
        if size is not None and number == errno.ENOSPC and free < size
        else ""
    )
    return f"{_FULL[number]}{numbers}: make room"


def _sync(path: Path) -> None:
    """What was written to this file, or renamed in this folder, is on the disk when this
    returns.
    """
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
