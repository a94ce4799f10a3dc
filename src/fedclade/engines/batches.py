"""What a call reads, step by step, and the batch that a step is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedclade.client.objective import Batch
from fedclade.data.clients import as_inputs


class Steps(NamedTuple):
    """The plan of a call: for each client and step the rows of the pool, how many of them count, and the step's key."""

    rows: Tensor  # (K, S, group, size)
    valid: Tensor  # (K, S, group)
    key: Tensor  # (K, S)


def batch_of(x: Tensor, y: Tensor, rows: Tensor, valid: Tensor, key: Tensor) -> Batch:
    """One step's batch for each client, from the samples of the pool: rows (K, group, size), valid (K, group), key (K,)."""
    weight = (torch.arange(rows.shape[-1], device=rows.device) < valid[..., None]).to(torch.float32)
    if rows.shape[1] == 1:  # one batch a step: no axis for the group
        rows, weight = rows[:, 0], weight[:, 0]
    flat = rows.flatten()
    inputs = as_inputs(x.index_select(0, flat).view(*rows.shape, *x.shape[1:]))
    return Batch(inputs, y.index_select(0, flat).view(*rows.shape, *y.shape[1:]), weight, key)


def living(counts: list[int]) -> Iterator[int]:
    """For each step how many clients have steps left: a prefix of them, since their numbers of steps (`counts`) fall."""
    left = len(counts)
    for number in range(counts[0] if counts else 0):
        while counts[left - 1] <= number:
            left -= 1
        yield left
