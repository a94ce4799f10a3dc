"""A reader of arrays in MATLAB files (level 5). scipy's reader is written in C, and a damaged file
can crash it.

A file has a header of 128 bytes, of which the last two give the byte order, and then elements:
kind, length, content, padded to eight bytes. A matrix is an element whose content is elements: its
class, its shape, its name, its values by columns. Elements may be packed by zlib.
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
    """Read the arrays of real numbers that have one of these names; of several with one name, the
    first. A damaged file is a `ValueError`.

    Args:
        where: the file, for messages.
        data: the content of the file.
        names: the names of the arrays.
    """
    order = _ORDERS.get(data[_HEAD - 2 : _HEAD])
    if order is None:
        raise ValueError("not a MATLAB file of level 5")
    by_name: dict[str, NDArray[np.generic]] = {}
    for kind, content in _elements(memoryview(data)[_HEAD:], order):
        if kind == _PACKED:
            kind, content = _unpacked(where, content, order)
        if (
            kind == _MATRIX
            and (matrix := _matrix(where, content, order)) is not None
            and matrix[0] in names
        ):
            by_name.setdefault(*matrix)
    return by_name


def _elements(data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    at = 0
    while at < len(data):
        (first,) = _numbers(f"{order}I", data, at)
        if first >> 16:  # a short one: kind, length and up to four bytes of content in eight bytes
            kind, length, start = first & 0xFFFF, first >> 16, at + 4
            if length > 4:
                raise ValueError(f"a short element has {length} bytes instead of at most 4")
            at += 8
        else:
            kind, length, start = first, _numbers(f"{order}I", data, at + 4)[0], at + 8
            at = start + length + (-length % 8 if kind != _PACKED else 0)
        if start + length > len(data):
            raise ValueError("an element is longer than the element or file that contains it")
        yield kind, data[start : start + length]


def _unpacked(where: object, packed: memoryview, order: str) -> tuple[int, memoryview]:
    """The element in a packed element. No more bytes are unpacked than its header declares."""
    kind, length = _numbers(f"{order}II", zlib.decompressobj().decompress(packed, 8), 0)
    safe_read.allow(where, 8 + length, note="unpacked")
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(packed, 8 + length + 1)
    if len(content) != 8 + length or not unpacker.eof:  # zlib verifies its checksum at the end
        raise ValueError(f"a packed element does not have the {length} bytes that it declares")
    return kind, memoryview(content)[8:]


def _matrix(
    where: object, content: memoryview, order: str
) -> tuple[str, NDArray[np.generic]] | None:
    """The name and the values of a matrix; None if these are not real numbers."""
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
    # The file stores values in the smallest type that holds them all, not in that of the matrix.
    dtype = np.dtype(_CLASSES[flag_word & 0xFF])
    safe_read.allow(where, dtype.itemsize * len(flat), note="unpacked")
    return name.tobytes().decode("ascii"), flat.astype(dtype, copy=False).reshape(shape, order="F")


def _numbers(form: str, data: bytes | memoryview, at: int) -> tuple[int, ...]:
    try:
        return struct.unpack_from(form, data, at)
    except struct.error as error:
        raise ValueError("cut short") from error
