"""Files of strangers: looked at before they are read, and never unpacked beyond what was allowed.

A packed file of some kilobytes can unpack to all the memory there is, and opening a pipe waits for
ever: both are refused in words.
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
"""Bytes of one published file, packed or not, or one text file of a run. The largest published one
has 562 MB.
"""
MOST_TOML = 1 << 20
"""An experiment file has about a thousand bytes."""
_DEEPEST = 50  # JSON and TOML inside each other; ours goes to six
_DOTS = 200  # in a line of TOML: tomllib takes minutes for a key of some ten thousand parts


def memory() -> int:
    """Bytes of memory that this machine has; where that is not told, as many as can be numbered."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize


def allow(where: object, size: int, most: int = MOST) -> None:
    """Refuse what has, or unpacks to, more bytes than `most`."""
    if size > most:
        raise InvalidInputError(
            f"{where}: {size:,} bytes, at most {most:,} are allowed: damaged, or another file than"
            " is meant; get it again."
        )


def fit(where: object, size: int) -> None:
    """Refuse what is larger than the machine's memory: the bound where an honest file may have any
    size.
    """
    if size > (most := memory()):
        raise InvalidInputError(
            f"{where}: {size:,} bytes, this machine's memory has {most:,}: take a smaller file or a"
            " larger machine."
        )


def instead(path: Path) -> str:
    """What is where a file should be; nothing where there is one, or nothing at all."""
    if path.is_dir():
        return "it is a folder"
    return "it is a pipe, a socket or a device" if path.exists() and not path.is_file() else ""


def size(path: Path) -> int:
    """How many bytes a file has. What is no ordinary file is refused unopened: to open a pipe waits
    until somebody writes to it.
    """
    try:
        has = path.stat().st_size
    except OSError as error:
        raise InvalidInputError(f"{path}: it cannot be read ({error.strerror}).") from error
    if other := instead(path):
        raise InvalidInputError(f"{path}: {other}; put a file there.")
    return has


def read(path: Path, most: int = MOST) -> bytes:
    """All of a file that has no more bytes than `most`."""
    allow(path, has := size(path), most)
    try:
        with path.open("rb") as file:
            return file.read(has)  # what is written meanwhile is left out
    except OSError as error:
        raise InvalidInputError(f"{path}: it cannot be read ({error.strerror}).") from error


def gunzip(data: bytes, most: int) -> bytes:
    """The first bytes of what gzip packed, `most` at most. Its checksum is compared where this is
    all.
    """
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
        return file.read(most)


def member(path: Path, archive: zipfile.ZipFile, name: str) -> zipfile.ZipExtFile:
    """A member of an archive, of which no read unpacks more than was asked for: zipfile has that
    for these two ways of packing alone.
    """
    if archive.getinfo(name).compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise InvalidInputError(
            f"{path}: {name} is packed in another way than deflate: pack the archive again."
        )
    return cast(zipfile.ZipExtFile, archive.open(name))


class _Stream(Protocol):
    def read(self, count: int, /) -> bytes: ...


class Limited:
    """A stream that is refused once it has given more than `most` bytes."""

    def __init__(self, stream: _Stream, where: object, most: int = MOST) -> None:
        self._stream, self._where, self._most, self._given = stream, where, most, 0

    def read(self, count: int) -> bytes:
        data = self._stream.read(min(count, self._most + 1 - self._given))
        self._given += len(data)
        allow(self._where, self._given, self._most)
        return data


def parse_json(text: str) -> Any:
    """JSON that can be walked through and written again: a ValueError also for what is nested
    deeply or holds half a sign.
    """
    try:
        found = _shallow(json.loads(text))
        if "\\u" in text:  # nothing else makes half a sign
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """TOML, likewise."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _DOTS and not line.lstrip().startswith("#"):
            raise ValueError(f"more than {_DOTS} dots in line {number}")
    try:
        found: dict[str, Any] = _shallow(tomllib.loads(text))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return found


def _shallow(found: Any) -> Any:
    level = [found]
    for _ in range(_DEEPEST):
        inner = (
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        )
        level = [one for several in inner for one in several]
    if level:
        raise ValueError(f"nested more than {_DEEPEST} deep")
    return found
