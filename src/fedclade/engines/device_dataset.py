"""The samples of a federation on the device, and which of them a call reads in which step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedclade.core.batching import Batches, make_plan
from fedclade.core.functional_model import ClientStackedBatch, share_of
from fedclade.core.rng import client_keys
from fedclade.data.federated_dataset import RaggedIndex, as_inputs
from fedclade.engines.profiler import Profiler


class Steps(NamedTuple):
    """The plan of a call: for each step and client the rows of the pool, what each of them counts
    for, and the step's key.
    """

    rows: Tensor  # (S, K, group, size); the group is left out where it is one batch
    weight: Tensor  # the same shape: 1, or 0 where padded
    key: Tensor  # (S, K)
    share: Tensor  # of the shape of rows: the weight as a part of its batch's


class DeviceDataset:
    """Samples on the device as they came, and which of them each part holds."""

    def __init__(
        self, x: Tensor, y: Tensor, parts: RaggedIndex, device: torch.device, clock: Profiler
    ) -> None:
        self.device, self.clock = device, clock
        self.x, self.y = x.to(device), y.to(device)
        self.sizes = (
            parts.sizes
        )  # here and on the device: what is known here need not be asked for there
        self.longest = max(1, int(self.sizes.max())) if len(self.sizes) else 1
        self._index, self._offsets, self._sizes = (
            value.to(device) for value in (parts.index, parts.offsets, parts.sizes)
        )

    def steps(self, batches: Batches, part: Tensor, keys: Tensor, longest: int) -> Steps:
        """What clients with these parts (of at most `longest` samples) and keys read."""
        plan = make_plan(batches, self._sizes[part], keys, longest)
        rows = self._index[self._offsets[part][:, None, None, None] + plan.position]
        weight = (torch.arange(rows.shape[-1], device=self.device) < plan.valid[..., None]).to(
            torch.float32
        )
        if batches.group == 1:
            rows, weight = rows[:, :, 0], weight[:, :, 0]
        return Steps(
            *(
                value.transpose(0, 1).contiguous()
                for value in (rows, weight, plan.key, share_of(weight))
            )
        )

    def batch(self, rows: Tensor, weight: Tensor, key: Tensor, share: Tensor) -> ClientStackedBatch:
        """One step's batch for each client."""
        flat = rows.flatten()
        inputs = as_inputs(self.x.index_select(0, flat).view(*rows.shape, *self.x.shape[1:]))
        return ClientStackedBatch(
            inputs,
            self.y.index_select(0, flat).view(*rows.shape, *self.y.shape[1:]),
            weight,
            key,
            share,
        )


@dataclass(frozen=True)
class BatchReader:
    """What the clients of a chunk read: parts of a pool, by falling size, in batches that are drawn
    with a key.
    """

    pool: DeviceDataset
    batches: Batches
    part: Tensor  # these two on the CPU
    client: Tensor
    key: int

    @property
    def counts(self) -> list[int]:
        """How many steps each makes."""
        return [self.batches.most(size) for size in self.pool.sizes[self.part].tolist()]

    @property
    def longest(self) -> int:
        return int(self.pool.sizes[self.part[0]])

    @property
    def keys(self) -> Tensor:
        """One for each client. Made here and in numpy, where so small a thing costs least."""
        return torch.from_numpy(client_keys(self.key, self.client.numpy()))

    def steps(self) -> Steps:
        device = self.pool.device
        return self.pool.steps(
            self.batches, self.part.to(device), self.keys.to(device), self.longest
        )


def active_counts(counts: list[int]) -> Iterator[int]:
    """For each step how many clients have steps left: a prefix of them, since their numbers of
    steps (`counts`) fall.
    """
    left = len(counts)
    for number in range(counts[0] if counts else 0):
        while counts[left - 1] <= number:
            left -= 1
        yield left
