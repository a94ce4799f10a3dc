"""Downloads of published files: resumed where they broke off, and not taken over before their
SHA-256 is the right one.
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
"""Told how many bytes of a file are here."""

TIMEOUT = 30.0  # seconds without a byte
_BLOCK = 1 << 16


class DownloadError(FedcladeError):
    """A file did not come, or not the right one."""


def get(published: Published, place: Path, progress: Progress) -> Path:
    """Download the files of a data set that are not here yet into its folder, which is returned."""
    if not published.files:
        raise InvalidInputError(
            f"data set '{published.name}' cannot be downloaded. {published.by_hand(place)}"
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
                f"{error} Or do it by hand. {published.by_hand(place, missing)}"
            ) from error
    return folder


def fetch(file: File, folder: Path, progress: Progress) -> None:
    """Download a file by way of FILE.part. One that is there already is only checked."""
    target, part = folder / file.name, folder / f"{file.name}.part"
    if target.exists():
        if problem := wrong(target, file):
            raise InvalidInputError(f"{problem}: move it away and get the data set again.")
        progress(file, file.size)
        return
    _transfer(file, part, progress)
    if problem := wrong(part, file):
        part.unlink()
        raise DownloadError(f"{problem}; it came from {file.url} and was removed. Try again.")
    part.replace(target)


def wrong(path: Path, file: File) -> str:
    """What is wrong with a file by its SHA-256; empty where nothing is."""
    safe_read.size(path)
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    return "" if found == file.sha256 else f"{path}: expected SHA-256 {file.sha256}, found {found}"


def _transfer(file: File, part: Path, progress: Progress) -> None:
    have = safe_read.size(part) if part.exists() else 0
    if have >= file.size:  # nothing to ask for: its checksum tells
        return
    with _opened(file, have) as response:
        if (
            response.status != 206
        ):  # the whole file, from a server that cannot resume or because nothing was here
            have = 0
        announced = response.length
        if announced is not None and have + announced != file.size:
            raise DownloadError(
                f"{file.url} has {have + announced} bytes instead of {file.size}: it is not the"
                " published file."
            )
        with part.open("ab" if have else "wb") as out:
            while block := _next(response, file, have):
                out.write(block)
                have += len(block)
                progress(file, have)
                if have > file.size:  # a server that does not say how much it sends may never end
                    break
    if have < file.size:
        raise _broken_off(file, have, "the server closed the connection")


def _opened(file: File, have: int) -> HTTPResponse:
    # Some servers refuse Python's own name.
    headers = {"User-Agent": "fedclade"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response: HTTPResponse = urlopen(Request(file.url, headers=headers), timeout=TIMEOUT)
    except (OSError, HTTPException) as error:
        raise DownloadError(
            f"{file.url} cannot be reached ({_reason(error)}). Try again."
        ) from error
    return response


def _next(response: HTTPResponse, file: File, have: int) -> bytes:
    try:
        return response.read(_BLOCK)
    except (OSError, HTTPException) as error:
        raise _broken_off(file, have, _reason(error)) from error


def _broken_off(file: File, have: int, reason: str) -> DownloadError:
    return DownloadError(
        f"{file.url} broke off after {have} of {file.size} bytes ({reason}). The same command goes"
        " on from there."
    )


def _reason(error: Exception) -> str:
    if isinstance(error, HTTPError):
        return f"HTTP {error.code} {error.reason}"
    return str(getattr(error, "reason", error)) or type(error).__name__
