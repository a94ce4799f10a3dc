"""Which replies of clients an engine accepts: one policy for all methods and engines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from fedclade.core.federation import FIXED_POINT
from fedclade.core.packed_tree import packed
from fedclade.core.pytree import Tree

EXAMPLES = "examples"
"""A reply of this name holds the number of examples that it was computed from."""
LARGEST = 1e12
"""No weight, gradient or loss of a healthy training run is larger than this. The squares of smaller
numbers are finite.
"""
UNSUMMABLE = "it has a number that is too large for a secure sum"
Spec: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor of one client's reply."""


def rejection_reason(reply: Tree, expected: Spec, size: int) -> str | None:
    """The reason why a client's reply is rejected, or None.

    Args:
        reply: the reply.
        expected: the shape and dtype of each tensor.
        size: the client's number of training examples.
    """
    if reply.keys() != expected.keys():
        return f"names: expected {sorted(expected)}, got {sorted(reply)}"
    for name, (shape, dtype) in expected.items():
        value = reply[name]
        if tuple(value.shape) != shape:
            return f"shape of '{name}': expected {shape}, got {tuple(value.shape)}"
        if value.dtype != dtype:
            return f"dtype of '{name}': expected {dtype}, got {value.dtype}"
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return f"'{name}' is not finite"
        if value.is_floating_point() and value.numel() and float(value.abs().max()) > LARGEST:
            return (
                f"'{name}' has a number of size {float(value.abs().max()):.1g}, more than"
                f" {LARGEST:.0e}"
            )
    if EXAMPLES in reply and not 0 <= float(reply[EXAMPLES]) <= size:
        return f"claims {float(reply[EXAMPLES]):g} examples, holds {size}"
    return None


def spec_of(reply: Tree) -> Spec:
    return {name: (tuple(value.shape), value.dtype) for name, value in reply.items()}


def rows_out_of_range(replies: Tree) -> list[int]:
    """The rows of stacked replies with numbers that are not finite or above LARGEST."""
    matrix = packed(replies)
    floats = (
        [matrix]
        if matrix is not None
        else [as_rows(value) for value in replies.values() if value.is_floating_point()]
    )
    if not floats:
        return []
    # No number of a row is larger than the row's norm, and a norm is fast to compute. Only rows
    # with a large norm are checked number by number.
    norms = (
        torch.stack([torch.linalg.vector_norm(value, dim=1) for value in floats]).amax(0).tolist()
    )
    suspects = [row for row, norm in enumerate(norms) if not norm <= LARGEST]
    return [
        row
        for row in suspects
        if not all(bool((value[row].abs() <= LARGEST).all()) for value in floats)
    ]


def too_large_to_add(reply: Tree, weights: Tensor, clients: int) -> list[int]:
    """The rows whose terms could make a sum in fixed point wrap around.

    Args:
        reply: the outputs that are summed.
        weights: (rows,) the largest weight of each row.
        clients: the number of clients of the sum.
    """
    limit = 2.0**63 * FIXED_POINT / clients
    floats = [as_rows(value).abs().amax(1).cpu().double() for value in reply.values()]
    if not floats:
        return []
    largest = torch.stack(floats).amax(0) * weights.abs()
    return (~(largest < limit * (1 - 2.0**-40))).nonzero().flatten().tolist()


def out_of_range_segment(segment: int, num_segments: int) -> str | None:
    """The reason why the segment that a client chose is rejected, or None."""
    if 0 <= segment < num_segments:
        return None
    return f"chose segment {segment} of {num_segments}"


def as_rows(value: Tensor) -> Tensor:
    """A stacked value as a matrix with one row for each client."""
    return value.reshape(len(value), math.prod(value.shape[1:]))


def majority_spec(replies: list[Tree], sent: Spec) -> Spec:
    """The most common spec of the replies. If several are equally common, it is the one most
    similar to the model that was sent. Replies with a different spec are rejected.

    Args:
        replies: the replies of the clients.
        sent: the spec of the model that was sent.
    """
    if not replies:
        return {}
    counts = Counter(tuple(sorted(spec_of(reply).items())) for reply in replies)
    similarity = {
        spec: sum(1 if sent.get(name) == tensor_spec else -1 for name, tensor_spec in spec)
        for spec in counts
    }
    return dict(max(counts.items(), key=lambda item: (item[1], similarity[item[0]]))[0])
