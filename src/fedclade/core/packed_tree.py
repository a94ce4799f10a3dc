"""Stacks of trees that share one tensor in memory: one row per tree, with its values in sequence.

One kernel then works on all names at once; on a GPU the cost of small kernels is their launch. To
other code such a tree is an ordinary tree: its values are views.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ALIGNED = 4  # 16-byte alignment for coalesced GPU loads


def column_offsets(tree: dict[str, Tensor]) -> list[int]:
    """The offset of each value in a row, and the length of the row. There may be padding between
    values.
    """
    places = [0]
    for value in tree.values():
        places.append(places[-1] + -(-math.prod(value.shape[1:]) // _ALIGNED) * _ALIGNED)
    return places


def packed(tree: dict[str, Tensor]) -> Tensor | None:
    """The tensor (rows, …) of which the tree's values are views, or None if there is none."""
    values = list(tree.values())
    if (
        len(values) < 2
        or values[0].ndim < 2
        or values[0].stride(0) == math.prod(values[0].shape[1:])
    ):
        return None
    *places, length = column_offsets(tree)
    begin, dtype, size = values[0].data_ptr(), values[0].dtype, values[0].element_size()
    for value, place in zip(values, places, strict=True):
        if (
            value.dtype != dtype
            or value.data_ptr() != begin + place * size
            or value.stride() != _strides(value.shape, length)
        ):
            return None
    return values[0].as_strided((len(values[0]), length), (length, 1))


def unpacked(whole: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    """The values of a packed tensor, with the names and shapes of `like`."""
    result = {}
    for (name, value), place in zip(like.items(), column_offsets(like), strict=False):
        shape = (len(whole), *value.shape[1:])
        result[name] = whole.as_strided(
            shape, _strides(shape, whole.shape[1]), whole.storage_offset() + place
        )
    return result


def _strides(shape: tuple[int, ...], length: int) -> tuple[int, ...]:
    """The strides of a value in rows of this length."""
    strides = [1]
    for side in reversed(shape[2:]):
        strides.append(strides[-1] * side)
    return (length, *reversed(strides))


def packed_like(tree: dict[str, Tensor], zeros: bool = True) -> dict[str, Tensor]:
    """An empty tree of the same shapes, packed if all values have one dtype. The padding between
    values must be 0.
    """
    values = list(tree.values())
    if len(values) > 1 and all(
        value.dtype == values[0].dtype and value.ndim > 1 for value in values
    ):
        make = values[0].new_zeros if zeros else values[0].new_empty
        return unpacked(make((len(values[0]), column_offsets(tree)[-1])), tree)
    return {
        name: torch.empty_like(value, memory_format=torch.contiguous_format)
        for name, value in tree.items()
    }
