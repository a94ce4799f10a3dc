"""The axis of clients in a vmap rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def with_client_axis(
    info: Any, in_dims: Sequence[int | None], values: Sequence[Tensor]
) -> list[Tensor]:
    """The tensors of a vmap rule with the axis of clients first; a tensor that all clients share is
    expanded.

    Args:
        info: what torch passes to a rule; it has the number of clients.
        in_dims: the axis of clients of each tensor; None for a shared one.
        values: the tensors.
    """
    return [
        value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
        for value, dim in zip(values, in_dims, strict=True)
    ]
