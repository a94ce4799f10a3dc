"""Shakespeare's plays by role: predict the next character. The clients are the roles of a play."""

from __future__ import annotations

import lzma
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedclade.data.datasets import Dataset
from fedclade.data.texts import read_csv_columns, window_starts
from fedclade.errors import FedcladeWarning, InvalidInputError
from fedclade.io import safe_read

LENGTH = 80  # characters of an input
TRAIN_TENTHS = 8  # of a role's lines, in the order of the text
UNKNOWN = 0  # a character that no training line has
COLUMNS = ("play", "role", "line")
_MOST_BYTES = 1 << 28  # unpacked; all plays have 6 MB
_MOST_LZMA_MEMORY = 1 << 28


def read(files: Sequence[Path]) -> Dataset:
    """A CSV file, plain or packed by xz, with the columns play, role and line, one row for each
    line in the order of the text. The key is the role, with the play in parentheses.

    x has 80 characters and y the character after each of them. The first 80 % of a role's lines are
    for training. The lines of a part are joined by line breaks and cut into windows; the last
    window overlaps the one before, so that every character is used. A role whose training lines
    have fewer than 81 characters is left out with a warning, and one whose test lines have fewer
    has no test samples.
    """
    path = files[0]
    columns = read_csv_columns(path, _content(path))
    if missing := [name for name in COLUMNS if name not in columns]:
        raise InvalidInputError(
            f"{path}: it has no column {', '.join(missing)}. It must have {', '.join(COLUMNS)}.",
            str(path),
        )
    lines: dict[str, list[str]] = {}
    for play, role, line in zip(*(columns[name] for name in COLUMNS), strict=True):
        lines.setdefault(f"{role} ({play})", []).append(line)
    cuts = {role: len(spoken) * TRAIN_TENTHS // 10 for role, spoken in lines.items()}
    train = {role: "\n".join(spoken[: cuts[role]]) for role, spoken in lines.items()}
    test = {role: "\n".join(spoken[cuts[role] :]) for role, spoken in lines.items()}
    roles = sorted(role for role, text in train.items() if len(text) > LENGTH)
    if not roles:
        raise InvalidInputError(
            f"{path}: no role has training lines of more than {LENGTH} characters.", str(path)
        )
    if short := len(lines) - len(roles):
        warnings.warn(
            FedcladeWarning(
                f"shakespeare: {short:,} of {len(lines):,} roles are left out, since their training"
                f" lines have at most {LENGTH} characters.",
                "shakespeare",
            ),
            stacklevel=3,
        )
    # Each role sends the set of characters of its training lines.
    characters = sorted(set().union(*(set(train[role]) for role in roles)))
    token = {character: number for number, character in enumerate(characters, start=UNKNOWN + 1)}
    x_train, y_train, train_ids = _windows([train[role] for role in roles], token)
    x_test, y_test, test_ids = _windows([test[role] for role in roles], token)
    # A language model has one embedding per class, and the largest target is the last class.
    last = max(int(y.max()) for y in (y_train, y_test) if len(y))
    for x in (x_train, x_test):
        x[x > last] = UNKNOWN
    return Dataset(
        "shakespeare",
        x_train,
        y_train,
        x_test,
        y_test,
        {"role": (train_ids, test_ids)},
        {"role": tuple(roles)},
    )


def _windows(texts: Sequence[str], token: Mapping[str, int]) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs, the targets and the number of the text of each window."""
    x, y, owner = [], [], []
    for number, text in enumerate(texts):
        tokens = torch.tensor([token.get(character, UNKNOWN) for character in text])
        for start in window_starts(len(text) - 1, LENGTH):
            x.append(tokens[start : start + LENGTH])
            y.append(tokens[start + 1 : start + LENGTH + 1])
            owner.append(number)
    if not x:
        empty = torch.empty(0, LENGTH, dtype=torch.int64)
        return empty, empty.clone(), torch.empty(0, dtype=torch.int64)
    return torch.stack(x), torch.stack(y), torch.tensor(owner)


def _content(path: Path) -> bytes:
    data = safe_read.read(path, _MOST_BYTES)
    if path.suffix != ".xz":
        return data
    unpacker = lzma.LZMADecompressor(memlimit=_MOST_LZMA_MEMORY)
    try:
        content = unpacker.decompress(data, max_length=_MOST_BYTES + 1)
    except lzma.LZMAError as error:
        raise InvalidInputError(
            f"{path}: it cannot be unpacked ({error}). Copy or make it again.", str(path)
        ) from error
    safe_read.allow(path, len(content), _MOST_BYTES, "unpacked")
    if not unpacker.eof:
        raise InvalidInputError(f"{path}: it is cut short. Copy or make it again.", str(path))
    return content
