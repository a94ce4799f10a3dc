"""Slots: a client that must hold a value for each of its samples at once gets that many rows.

The tensors of a program have the same shape for all clients that run together, so the server sends
the number of samples of the largest client, as the shape of a tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

SLOTS = "slots"
"""The name of the slots among the tensors that a client receives."""


def empty_slots(largest: Tensor) -> Tensor:
    """(1, largest) one byte for each sample of the largest client. Only its shape counts."""
    return torch.zeros(1, int(largest), dtype=torch.uint8)


def slot_rows(count: Tensor, weight: Tensor, slots: int) -> Tensor:
    """The rows of a client's next samples among its slots; `slots`, one more than the last row, for
    padding.

    Args:
        count: the number of samples so far.
        weight: the weights of the batch; 0 for padding.
        slots: the number of slots.
    """
    place = count + torch.arange(len(weight), device=weight.device)
    return torch.where(weight > 0, place, slots)


def write_rows(values: Tensor, rows: Tensor, new: Tensor) -> Tensor:
    """`values` with these rows replaced. A row after the last one is left out."""
    longer = torch.cat([values, values[:1]])
    index = rows.view(-1, *[1] * (new.ndim - 1)).expand_as(new)
    return longer.scatter(0, index, new)[:-1]
