"""MATLAB files: files that scipy writes are read as by scipy, and a file made by hand as in the
specification.
"""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from scipy.io import loadmat, savemat

from fedclade.data.matlab import arrays

KINDS = ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"]


def file_of(compressed: bool = False, **content: Any) -> bytes:
    file = io.BytesIO()
    savemat(file, content, do_compression=compressed)
    return file.getvalue()


@given(
    x=st.sampled_from(KINDS).flatmap(
        lambda kind: npst.arrays(
            kind, npst.array_shapes(min_dims=2, max_dims=4, min_side=0, max_side=5)
        )
    ),
    compressed=st.booleans(),
)
def test_agrees_with_scipy(x: np.ndarray, compressed: bool) -> None:
    data = file_of(compressed, x=x, other=np.zeros((2, 2)))
    found = arrays("f", data, ("x",))
    assert found.keys() == {"x"}
    expected = loadmat(io.BytesIO(data))["x"]
    assert found["x"].dtype == expected.dtype
    np.testing.assert_array_equal(found["x"], expected)


def element(kind: int, content: bytes) -> bytes:
    return struct.pack(">II", kind, len(content)) + content + bytes(-len(content) % 8)


def test_a_file_of_the_other_byte_order_made_by_hand() -> None:
    # y = [[1, 3], [2, 4]] of class double (6), stored as two-byte numbers by columns; its name as a
    # short element of one byte.
    flags, shape, name = (
        element(6, struct.pack(">II", 6, 0)),
        element(5, struct.pack(">ii", 2, 2)),
        struct.pack(">I", 1 << 16 | 1) + b"y\0\0\0",
    )
    values = element(4, struct.pack(">4H", 1, 2, 3, 4))
    data = bytes(124) + b"\1\0MI" + element(14, flags + shape + name + values)
    found = arrays("f", data, ("y",))["y"]
    assert found.dtype == np.float64
    assert found.tolist() == [[1.0, 3.0], [2.0, 4.0]]


def test_other_things_than_arrays_of_real_numbers_are_left_out() -> None:
    data = file_of(
        a=np.array([[1 + 2j]]),
        b="text",
        c=np.array([["cell"]], object),
        d={"e": 1},
        x=np.array([[7]]),
    )
    assert arrays("f", data, "abcdx").keys() == {"x"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "level 5"),
        (file_of(x=np.ones((3, 3)))[:150], "longer"),
        (file_of(x=np.ones((3, 3))) + b"\1", "cut short"),
        (
            file_of(x=np.arange(6).reshape(2, 3)).replace(
                struct.pack("<ii", 2, 3), struct.pack("<ii", 2, 4)
            ),
            r"6 values for the shape \(2, 4\)",
        ),
        (
            file_of(x=np.arange(6).reshape(2, 3)).replace(
                struct.pack("<ii", 2, 3), struct.pack("<ii", -2, -3)
            ),
            "6 values for the shape",
        ),
    ],
)
def test_the_error_has_the_damage(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        arrays("f", data, ("x",))
