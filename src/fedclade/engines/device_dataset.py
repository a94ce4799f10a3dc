"""The samples of all clients for the device, and the samples that a call reads in each step."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedclade.core.augmentation import augmented
from fedclade.core.batching import Batches, make_plan
from fedclade.core.functional_model import ClientStackedBatch, share_of
from fedclade.core.inputs import Inputs, as_inputs, map_inputs, tensors_of
from fedclade.core.rng import client_keys
from fedclade.data.federated_dataset import Clients, RaggedIndex
from fedclade.engines.profiler import Profiler

# On CUDA the samples stay on the host if they need more than this share of the free memory.
_CUDA_DATA_SHARE = 0.5
_log = logging.getLogger("fedclade")


class Steps(NamedTuple):
    """The plan of a call: for each step and client the rows of the dataset, their weights, and the
    step's key.
    """

    # (steps, clients, group, size), where the samples are stored; without the group axis if a group
    # is one batch
    rows: Tensor
    weight: Tensor  # same shape: 1 or the weight of the class, 0 for padding
    key: Tensor  # (steps, clients)
    share: Tensor  # same shape as rows: the weight divided by its batch's total


class DeviceDataset:
    """Samples in their original order, and the samples of each part. The samples are on the device,
    or on the host if they do not fit; then each batch is copied to the device.

    Args:
        x: the inputs.
        y: the labels.
        parts: the samples of each part.
        device: the device of the batches.
        clock: counts and times the work.
        storage: the device of the samples; None for `device`.
        longest: the number of samples of the largest part, or of a larger one elsewhere; None to
            count. No batch has more: results then do not depend on which parts are here.
    """

    def __init__(
        self,
        x: Inputs,
        y: Tensor,
        parts: RaggedIndex,
        device: torch.device,
        clock: Profiler,
        storage: torch.device | None = None,
        longest: int | None = None,
    ) -> None:
        self.device, self.clock = device, clock
        self.storage = storage or device
        self.x, self.y = map_inputs(lambda value: value.to(self.storage), x), y.to(self.storage)
        # Sizes are on the CPU and on the device: reading a size must not wait for the device.
        self.sizes = parts.sizes
        largest = int(self.sizes.max()) if len(self.sizes) else 1
        self.longest = max(1, largest if longest is None else longest)
        self._index, self._offsets, self._sizes = (
            value.to(device) for value in (parts.index, parts.offsets, parts.sizes)
        )

    @property
    def on_device(self) -> bool:
        """Whether the samples are on the device of the batches."""
        return self.storage == self.device

    @property
    def sample_bytes(self) -> int:
        """The bytes of the inputs of one sample as a model reads them."""
        return sum(
            math.prod(value.shape[1:]) * max(4, value.element_size())
            for value in tensors_of(self.x)
        )

    def steps(self, batches: Batches, part_ids: Tensor, keys: Tensor, longest: int) -> Steps:
        """The plan of a call.

        Args:
            batches: how the program reads the data.
            part_ids: (K,) the part of each client, on the device.
            keys: (K,) the key of each client, on the device.
            longest: the number of samples of the largest part.
        """
        plan = make_plan(batches, self._sizes[part_ids], keys, longest)
        place = self._offsets[part_ids][:, None, None, None] + plan.position
        rows = self._index[place]
        weight = (torch.arange(rows.shape[-1], device=self.device) < plan.valid[..., None]).to(
            torch.float32
        )
        if batches.class_weight == "balanced":
            weight = weight * self._balanced_weights[place]
        if batches.group == 1:
            rows, weight = rows[:, :, 0], weight[:, :, 0]
        rows, *others = (
            value.transpose(0, 1).contiguous()
            for value in (rows, weight, plan.key, share_of(weight))
        )
        return Steps(rows.to(self.storage), *others)

    @cached_property
    def _balanced_weights(self) -> Tensor:
        """The weight of each sample of each part by its class: n / (C n_c) in a part of n samples
        and C classes, where n_c samples have the class.
        """
        part = torch.arange(len(self._sizes), device=self.device).repeat_interleave(self._sizes)
        labels = self.y[self._index.to(self.storage)].to(self.device)
        pairs = torch.stack([part, labels])
        kinds, kind, counts = torch.unique(pairs, dim=1, return_inverse=True, return_counts=True)
        classes = kinds[0].bincount(minlength=len(self._sizes))
        weights: Tensor = self._sizes[part].double() / (classes[part] * counts[kind])
        return weights.float()

    def batch(self, rows: Tensor, weight: Tensor, key: Tensor, share: Tensor) -> ClientStackedBatch:
        """The batch of one step for each client."""
        x, y = self.samples(rows)
        return ClientStackedBatch(x, y, weight, key, share)

    def samples(self, rows: Tensor) -> tuple[Inputs, Tensor]:
        """The inputs and labels of these rows, with the axes of `rows` in front."""
        flat = rows.flatten()

        def read(values: Tensor) -> Tensor:
            samples = values.index_select(0, flat).view(*rows.shape, *values.shape[1:])
            if self.on_device:
                return samples
            # From pinned memory the copy runs while the device computes.
            return samples.pin_memory().to(self.device, non_blocking=True)

        return as_inputs(map_inputs(read, self.x)), read(self.y)

    def rows_of(self, part_ids: Tensor) -> Tensor:
        """The rows of all samples of these parts, one part after another."""
        parts = part_ids.to(self.device)
        sizes = self._sizes[parts]
        begin = self._offsets[parts] - (sizes.cumsum(0) - sizes)
        place = begin.repeat_interleave(sizes) + torch.arange(int(sizes.sum()), device=self.device)
        return self._index[place].to(self.storage)


@dataclass(frozen=True)
class BatchReader:
    """The samples that the clients of a chunk read.

    Args:
        dataset: the dataset.
        batches: how the program reads the data.
        part_ids: (K,) the part of each client, by descending size, on the CPU.
        client_ids: (K,) the number of each client, on the CPU.
        key: the randomness of the call.
    """

    dataset: DeviceDataset
    batches: Batches
    part_ids: Tensor
    client_ids: Tensor
    key: int

    @property
    def counts(self) -> list[int]:
        """The number of steps of each client."""
        return [self.batches.most(size) for size in self.dataset.sizes[self.part_ids].tolist()]

    @property
    def longest(self) -> int:
        return int(self.dataset.sizes[self.part_ids[0]])

    @property
    def keys(self) -> Tensor:
        """(K,) the key of each client, computed in numpy: fastest for a few numbers."""
        return torch.from_numpy(client_keys(self.key, self.client_ids.numpy()))

    def batch(self, rows: Tensor, weight: Tensor, key: Tensor, share: Tensor) -> ClientStackedBatch:
        """The batch of one step for each client, augmented if the program trains with that."""
        batch = self.dataset.batch(rows, weight, key, share)
        augment = self.batches.augment
        return batch if augment is None else augmented(batch, augment)

    def steps(self) -> Steps:
        device = self.dataset.device
        return self.dataset.steps(
            self.batches, self.part_ids.to(device), self.keys.to(device), self.longest
        )


def active_counts(counts: list[int]) -> Iterator[int]:
    """For each step the number of clients that have steps left. They are a prefix of all clients,
    since `counts`, the steps of each client, is sorted in descending order.
    """
    active = len(counts)
    for step in range(counts[0] if counts else 0):
        while counts[active - 1] <= step:
            active -= 1
        yield active


class Longest(NamedTuple):
    """The number of samples of the largest part of each split in a federation."""

    train: int
    test: int
    validation: int

    @classmethod
    def of(cls, clients: Clients) -> Longest:
        sizes = (clients.train.sizes, clients.test.sizes, clients.validation_sizes)
        return cls(
            *(1 if size is None or not len(size) else max(1, int(size.max())) for size in sizes)
        )


def datasets_of(
    clients: Clients, device: torch.device, clock: Profiler, longest: Longest | None = None
) -> tuple[DeviceDataset, DeviceDataset, DeviceDataset | None]:
    """The training, test and validation data. Pools that are shared are stored once."""
    longest = longest or Longest.of(clients)
    shared = clients.x_test is clients.x
    pools = (clients.x,) if shared else (clients.x, clients.x_test)
    size = sum(value.nbytes for pool in pools for value in tensors_of(pool))
    storage = _storage(size, device)
    later = clients.later
    parts = _joined(clients.train, None if later is None else later.train)
    train = DeviceDataset(clients.x, clients.y, parts, device, clock, storage, longest.train)
    x_test, y_test = (train.x, train.y) if shared else (clients.x_test, clients.y_test)
    test = DeviceDataset(x_test, y_test, clients.test, device, clock, storage, longest.test)
    if clients.validation is None:
        return train, test, None
    parts = _joined(clients.validation, None if later is None else later.validation)
    return (
        train,
        test,
        DeviceDataset(train.x, train.y, parts, device, clock, storage, longest.validation),
    )


def _joined(parts: RaggedIndex, later: RaggedIndex | None) -> RaggedIndex:
    """The parts of all clients, followed by their later ones."""
    if later is None:
        return parts
    offsets = torch.cat([parts.offsets, later.offsets[1:] + len(parts.index)])
    return RaggedIndex(torch.cat([parts.index, later.index]), offsets)


def _storage(size: int, device: torch.device) -> torch.device:
    """Where samples of `size` bytes are stored: on the device, or on the host if they do not fit.
    Results are the same.
    """
    if device.type != "cuda" or size <= _CUDA_DATA_SHARE * torch.cuda.mem_get_info(device)[0]:
        return device
    _log.info("The samples (%s bytes) stay on the host: they do not fit on %s.", size, device)
    return torch.device("cpu")
