"""Stacks of trees that lie in memory as one tensor: a row for each tree, its values side by side.

One kernel then does for all names what would be one for each, and on a GPU a small kernel costs no
more than its launch. Such a tree is an ordinary one to everybody else: its values are views.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ALIGNED = 4  # values begin where a GPU likes to read


def _places(tree: dict[str, Tensor]) -> list[int]:
    """Where each value begins in a row, and at the end how long the row is."""
    places = [0]
    for value in tree.values():
        places.append(places[-1] + -(-math.prod(value.shape[1:]) // _ALIGNED) * _ALIGNED)
    return places


def packed(tree: dict[str, Tensor]) -> Tensor | None:
    """The one tensor (rows, …) of which the tree's values are the parts, if they lie so in
    memory.
    """
    values = list(tree.values())
    if (
        len(values) < 2
        or values[0].ndim < 2
        or values[0].stride(0) == math.prod(values[0].shape[1:])
    ):
        return None
    *places, length = _places(tree)
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
    """The parts of a packed tensor, by the names and shapes of a tree that was packed so."""
    result = {}
    for (name, value), place in zip(like.items(), _places(like), strict=False):
        shape = (len(whole), *value.shape[1:])
        result[name] = whole.as_strided(
            shape, _strides(shape, whole.shape[1]), whole.storage_offset() + place
        )
    return result


def _strides(shape: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Of a value in rows of such a length."""
    strides = [1]
    for side in reversed(shape[2:]):
        strides.append(strides[-1] * side)
    return (length, *reversed(strides))


def packed_like(tree: dict[str, Tensor], zeros: bool = True) -> dict[str, Tensor]:
    """Room for a tree of such a shape, packed where all values are of one kind; what is between
    them must be 0.
    """
    values = list(tree.values())
    if len(values) > 1 and all(
        value.dtype == values[0].dtype and value.ndim > 1 for value in values
    ):
        make = values[0].new_zeros if zeros else values[0].new_empty
        return unpacked(make((len(values[0]), _places(tree)[-1])), tree)
    return {
        name: torch.empty_like(value, memory_format=torch.contiguous_format)
        for name, value in tree.items()
    }
