"""Safe reading of files from any source: kind and size are checked first, and unpacking is limited.

A packed file of some kilobytes can fill all memory when it is unpacked, and opening a pipe can
block for ever. Both raise `InvalidInputError`.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any, Protocol, cast

from fedclade.errors import InvalidInputError

MOST = 1 << 30
"""The largest size in bytes of a published file, packed or unpacked, and of a text file of a run.
The largest published file has 562 MB.
"""
MOST_TOML = 1 << 20
"""The largest size of an experiment file in bytes; typical files have about a thousand."""
_MAX_DEPTH = 50  # of nested JSON and TOML; the files of fedclade have six levels
_MAX_DOTS = 200  # in a line of TOML: tomllib takes minutes for a key of some ten thousand parts


def memory() -> int:
    """The machine's memory in bytes; `sys.maxsize` if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


def allow(where: object, size: int, most: int = MOST, note: str = "") -> None:
    """Raise `InvalidInputError` if `size` is above `most`.

    Args:
        where: the file, or the member of an archive.
        size: its size in bytes, packed or unpacked.
        most: the largest allowed size.
        note: what `size` is, such as "unpacked"; "" for the size of the file.
    """
    if size > most:
        raise InvalidInputError(
            f"{where}: {size:,} bytes{note and f' {note}'}, above the limit of {most:,}. The file"
            " may be damaged or the wrong file: download it again.",
            str(where),
        )


def fit(where: object, size: int, note: str = "") -> None:
    """Raise `InvalidInputError` if `size` is above the machine's memory: the limit for files that
    may have any size. The arguments are those of `allow`.
    """
    if size > (most := memory()):
        raise InvalidInputError(
            f"{where}: {size:,} bytes{note and f' {note}'}, above this machine's memory of"
            f" {most:,}. Use a smaller file or a larger machine.",
            str(where),
        )


def not_a_file(path: Path) -> str:
    """What `path` is, if it exists and is not a regular file; otherwise ""."""
    if path.is_dir():
        return "it is a folder"
    return "it is a pipe, a socket or a device" if path.exists() and not path.is_file() else ""


def size(path: Path) -> int:
    """The size of a regular file in bytes. Anything else raises `InvalidInputError` and is not
    opened: opening a pipe blocks until another process writes to it.
    """
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if kind := not_a_file(path):
        raise InvalidInputError(f"{path}: {kind}, not a file. Put a file there.", str(path))
    return num_bytes


def read(path: Path, most: int = MOST) -> bytes:
    """The content of a file of at most `most` bytes."""
    allow(path, num_bytes := size(path), most)
    try:
        with path.open("rb") as file:
            return file.read(num_bytes)  # not what another process appends meanwhile
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> InvalidInputError:
    missing = isinstance(error, FileNotFoundError)
    problem = "there is no such file" if missing else f"cannot be read ({error.strerror})"
    return InvalidInputError(f"{path}: {problem}.", str(path))


def gunzip(data: bytes, most: int) -> bytes:
    """The first `most` bytes of gzip data, unpacked. The checksum is verified if that is all."""
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        return file.read(most)


def member(path: Path, archive: zipfile.ZipFile, name: str) -> zipfile.ZipExtFile:
    """Open a member of an archive such that a read unpacks no more bytes than it returns. zipfile
    guarantees this only for the two allowed kinds of packing.
    """
    if archive.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidInputError(
            f"{path}: {name} is not packed by deflate. Pack the archive again with deflate.",
            str(path),
        )
    return cast(zipfile.ZipExtFile, archive.open(name))


class _Stream(Protocol):
    def read(self, count: int, /) -> bytes: ...


class Limited:
    """A stream that raises `InvalidInputError` after more than `most` unpacked bytes."""

    def __init__(self, stream: _Stream, where: object, most: int = MOST) -> None:
        self._stream, self._where, self._most, self._total = stream, where, most, 0

    def read(self, count: int) -> bytes:
        data = self._stream.read(min(count, self._most + 1 - self._total))
        self._total += len(data)
        allow(self._where, self._total, self._most, "unpacked")
        return data


def parse_json(text: str, max_depth: int = _MAX_DEPTH) -> Any:
    """Parse JSON that can be traversed and written again. Nesting deeper than `max_depth` and
    unpaired surrogates are a `ValueError` too.
    """
    try:
        content = _check_depth(json.loads(text), max_depth)
        if "\\u" in text:  # the only source of unpaired surrogates
            json.dumps(content, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Deep nesting is a `ValueError` too."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MAX_DOTS and not line.lstrip().startswith("#"):
            raise ValueError(f"more than {_MAX_DOTS} dots in line {number}")
    try:
        content: dict[str, Any] = _check_depth(tomllib.loads(text))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return content


def _check_depth(content: Any, max_depth: int = _MAX_DEPTH) -> Any:
    level = [content]
    for _ in range(max_depth):
        containers = (
            value.values() if isinstance(value, dict) else value
            for value in level
            if isinstance(value, dict | list)
        )
        level = [value for values in containers for value in values]
    if level:
        raise ValueError(f"nested more than {max_depth} deep")
    return content
