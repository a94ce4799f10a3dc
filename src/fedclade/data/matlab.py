"""Arrays of numbers in MATLAB files (level 5). By hand and not by scipy, whose reader is C and can
be brought down by a damaged file.

A file is 128 bytes, of which the last two tell the byte order, and then elements: kind, length,
content, filled up to eight bytes. A matrix is an element whose content is elements: its class, its
shape, its name, its values by columns. Elements may be packed by zlib.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from fedclade.io import safe_read

_HEAD, _ORDERS = 128, {b"IM": "<", b"MI": ">"}
_INT8, _INT32, _MATRIX, _PACKED = 1, 5, 14, 15
_KINDS = {
    1: "i1",
    2: "u1",
    3: "i2",
    4: "u2",
    5: "i4",
    6: "u4",
    7: "f4",
    9: "f8",
    12: "i8",
    13: "u8",
}  # of an element's values
_CLASSES = {
    6: "f8",
    7: "f4",
    8: "i1",
    9: "u1",
    10: "i2",
    11: "u2",
    12: "i4",
    13: "u4",
    14: "i8",
    15: "u8",
}  # of a matrix
_COMPLEX = 0x800


def arrays(where: object, data: bytes, names: Collection[str]) -> dict[str, NDArray[np.generic]]:
    """Those of the arrays of real numbers with these names that the file has, each as it is first.
    A ValueError tells what is damaged.
    """
    order = _ORDERS.get(data[_HEAD - 2 : _HEAD])
    if order is None:
        raise ValueError("not a MATLAB file of level 5")
    found: dict[str, NDArray[np.generic]] = {}
    for kind, content in _elements(memoryview(data)[_HEAD:], order):
        if kind == _PACKED:
            kind, content = _unpacked(where, content, order)
        if (
            kind == _MATRIX
            and (one := _matrix(where, content, order)) is not None
            and one[0] in names
        ):
            found.setdefault(*one)
    return found


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    at = 0
    while at < len(data):
        (first,) = _numbers(f"{order}I", data, at)
        if first >> 16:  # a short one: kind, length and up to four bytes of content in eight bytes
            kind, length, start = first & 0xFFFF, first >> 16, at + 4
            if length > 4:
                raise ValueError("a short element that is long")
            at += 8
        else:
            kind, length, start = first, _numbers(f"{order}I", data, at + 4)[0], at + 8
            at = start + length + (-length % 8 if kind != _PACKED else 0)
        if start + length > len(data):
            raise ValueError("an element is longer than what holds it")
        yield kind, data[start : start + length]


def _unpacked(where: object, packed: memoryview, order: str) -> tuple[int, memoryview]:
    """The one element that is packed in another, no further than it tells its length."""
    kind, length = _numbers(f"{order}II", zlib.decompressobj().decompress(packed, 8), 0)
    safe_read.allow(f"{where}, unpacked", 8 + length)
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(packed, 8 + length + 1)
    if len(content) != 8 + length or not unpacker.eof:  # it compares its checksum at the end
        raise ValueError("a packed element has another length than it tells")
    return kind, memoryview(content)[8:]


def _matrix(
    where: object, content: memoryview, order: str
) -> tuple[str, NDArray[np.generic]] | None:
    """The name and the values of a matrix; None where these are no real numbers."""
    (_, flags), *rest = _elements(content, order)
    (flag_word,) = _numbers(f"{order}I", flags, 0)
    if flag_word & 0xFF not in _CLASSES or flag_word & _COMPLEX:
        return None
    if (
        [kind for kind, _ in rest[:2]] != [_INT32, _INT8]
        or len(rest) != 3
        or rest[2][0] not in _KINDS
    ):
        raise ValueError("a matrix without its shape, name and values")
    (_, sides), (_, name), (kind, values) = rest
    shape = np.frombuffer(sides, f"{order}i4").tolist()
    flat = np.frombuffer(values, f"{order}{_KINDS[kind]}")
    if min(shape, default=-1) < 0 or math.prod(shape) != len(flat):
        raise ValueError(f"{len(flat)} values for the shape {tuple(shape)}")
    kept = np.dtype(
        _CLASSES[flag_word & 0xFF]
    )  # values are stored in the smallest kind that holds them all
    safe_read.allow(f"{where}, unpacked", kept.itemsize * len(flat))
    return name.tobytes().decode("ascii"), flat.astype(kept, copy=False).reshape(shape, order="F")


def _numbers(form: str, data: bytes | memoryview, at: int) -> tuple[int, ...]:
    try:
        return struct.unpack_from(form, data, at)
    except struct.error as error:
        raise ValueError("cut short") from error
