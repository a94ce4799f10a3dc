"""Downloads of published files. A broken download is resumed, and a file is used only if its
SHA-256 is right.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import TypeAlias
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from fedclade.data.dataset_catalog import File, Published
from fedclade.errors import FedcladeError, InvalidInputError
from fedclade.io import safe_read

Progress: TypeAlias = Callable[[File, int], None]
"""Called with a file and the number of its bytes that are on the disk."""

TIMEOUT = 30.0  # seconds without a byte
_BLOCK = 1 << 16


class DownloadError(FedcladeError):
    """A file could not be downloaded, or its content is wrong. The field is the file's URL."""


def get(published: Published, place: Path, progress: Progress) -> Path:
    """Download the missing files of a data set.

    Args:
        published: the data set.
        place: the folder of data sets.
        progress: called after each block.

    Returns:
        The folder of this data set.
    """
    if not published.files:
        raise InvalidInputError(
            f"data set '{published.name}' cannot be downloaded. {published.by_hand(place)}",
            published.name,
        )
    folder = place / published.folder
    folder.mkdir(parents=True, exist_ok=True)
    for number, file in enumerate(published.files):
        try:
            fetch(file, folder, progress)
        except DownloadError as error:
            missing = [
                later for later in published.files[number:] if not (folder / later.name).exists()
            ]
            raise DownloadError(
                f"{error} Or install the files by hand. {published.by_hand(place, missing)}",
                error.field,
            ) from error
    return folder


def fetch(file: File, folder: Path, progress: Progress) -> None:
    """Download a file into FILE.part, then rename it. A file that exists is only verified."""
    target, part = folder / file.name, folder / f"{file.name}.part"
    if target.exists():
        if problem := wrong(target, file):
            raise InvalidInputError(
                f"{problem}. Move it away and get the data set again.", str(target)
            )
        progress(file, file.size)
        return
    _transfer(file, part, progress)
    if problem := wrong(part, file):
        part.unlink()
        raise DownloadError(
            f"{problem}. It was downloaded from {file.url} and is removed. Try again.", file.url
        )
    part.replace(target)


def wrong(path: Path, file: File) -> str:
    """The difference between the SHA-256 of `path` and that of `file`; "" if they are equal."""
    safe_read.size(path)
    with path.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    if sha256 == file.sha256:
        return ""
    return f"{path}: expected SHA-256 {file.sha256}, found {sha256}"


def _transfer(file: File, part: Path, progress: Progress) -> None:
    have = safe_read.size(part) if part.exists() else 0
    if have >= file.size:  # complete, or wrong: the checksum shows which
        return
    with _opened(file, have) as response:
        if response.status != 206:  # the server sends the whole file
            have = 0
        announced = response.length
        if announced is not None and have + announced != file.size:
            raise DownloadError(
                f"{file.url} has {have + announced} bytes instead of {file.size}: it is not the"
                " published file.",
                file.url,
            )
        with part.open("ab" if have else "wb") as out:
            while block := _next(response, file, have):
                out.write(block)
                have += len(block)
                progress(file, have)
                if have > file.size:  # a server that announces no length may never end
                    break
    if have < file.size:
        raise _broken_off(file, have, "the server closed the connection")


def _opened(file: File, have: int) -> HTTPResponse:
    # Some servers refuse Python's default user agent.
    headers = {"User-Agent": "fedclade"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response: HTTPResponse = urlopen(Request(file.url, headers=headers), timeout=TIMEOUT)
    except (OSError, HTTPException) as error:
        raise DownloadError(
            f"{file.url} cannot be reached ({_reason(error)}). Try again.", file.url
        ) from error
    return response


def _next(response: HTTPResponse, file: File, have: int) -> bytes:
    try:
        return response.read(_BLOCK)
    except (OSError, HTTPException) as error:
        raise _broken_off(file, have, _reason(error)) from error


def _broken_off(file: File, have: int, reason: str) -> DownloadError:
    return DownloadError(
        f"{file.url} broke off after {have} of {file.size} bytes ({reason}). Run the same command"
        " to continue from there.",
        file.url,
    )


def _reason(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}"
    return str(getattr(error, "reason", error)) or type(error).__name__
