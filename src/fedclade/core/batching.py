"""The minibatches of a client: which of its samples are in which step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fedclade.core.rng import counter_block, hash_with
from fedclade.errors import require_int

ClassWeight: TypeAlias = Literal["none", "balanced"]

WHOLE_BLOCK = 64


@dataclass(frozen=True)
class Batches:
    """How a program reads a client's data.

    The last batch of an epoch may be smaller than `size`; it is padded with weight 0. If the number
    of batches is not a multiple of `group`, the last group repeats the epoch's first batches, so
    that a client with a single batch makes a step too.

    Args:
        size: examples per batch.
        epochs: passes over the data.
        shuffle: whether each epoch has a random order.
        group: batches per step.
        class_weight: "balanced" weights an example of class c by n / (C n_c), where the client has
            n examples of C classes, n_c of them of class c.
        augment: what changes the inputs of a batch first; None for nothing.
    """

    size: int
    epochs: int = 1
    shuffle: bool = True
    group: int = 1
    class_weight: ClassWeight = "none"
    augment: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        for field in ("size", "epochs", "group"):
            require_int(f"batches.{field}", getattr(self, field), 1)

    @staticmethod
    def whole(block: int = WHOLE_BLOCK) -> Batches:
        """Every sample once, in order, in blocks: for sums over all samples."""
        return Batches(size=block, shuffle=False)

    def steps(self, sizes: Tensor) -> Tensor:
        """The number of steps of clients with these numbers of samples."""
        return self._groups(sizes) * self.epochs

    def most(self, longest: int) -> int:
        """The number of steps of a client with `longest` samples."""
        batches = -(-longest // self.size)
        return -(-batches // self.group) * self.epochs

    def _groups(self, sizes: Tensor) -> Tensor:
        batches = (sizes + self.size - 1) // self.size
        return (batches + self.group - 1) // self.group


@dataclass(frozen=True)
class Plan:
    """The samples and the key of each step, for K clients and S steps."""

    # (K, S, group, size) positions in the client's data; padding repeats samples of the same batch
    position: Tensor
    valid: Tensor  # (K, S, group) the number of real samples of a batch
    key: Tensor  # (K, S)


def make_plan(batches: Batches, sizes: Tensor, keys: Tensor, longest: int) -> Plan:
    """The plan of clients with these numbers of samples, at most `longest`, and these keys.

    Rows beyond a client's last step are never read. `longest` only sets the size of the tensors.
    """
    device = sizes.device
    groups = batches._groups(sizes)
    step = torch.arange(batches.most(longest), device=device)

    epoch = (step // groups[:, None]).clamp(max=batches.epochs - 1)
    number = (step % groups[:, None])[..., None] * batches.group + torch.arange(
        batches.group, device=device
    )
    per_epoch = (sizes + batches.size - 1) // batches.size
    first = (number % per_epoch[:, None, None]) * batches.size
    valid = (sizes[:, None, None] - first).clamp(max=batches.size)
    place = first[..., None] + torch.arange(batches.size, device=device) % valid[..., None]

    if batches.shuffle:
        order = _orders(batches.epochs, sizes, longest, keys)
        flat = (epoch[..., None, None] * longest + place).flatten(1)
        place = order.flatten(1).gather(1, flat).view(place.shape)
    return Plan(place, valid, hash_with(keys[:, None], counter_block(len(step), 0, device)))


def _orders(epochs: int, sizes: Tensor, longest: int, keys: Tensor) -> Tensor:
    """(K, epochs, longest): a random order of the client's samples for each epoch, by sorting
    hashes.
    """
    device = sizes.device
    # Epoch keys come from a range of counters that no step reaches, so that an order never shares
    # bits with a step's dropout.
    epoch_key = hash_with(keys[:, None], counter_block(epochs, 1 << 31, device))
    rank = hash_with(epoch_key[..., None], counter_block(longest, 0, device))
    absent = torch.arange(longest, device=device) >= sizes[:, None]
    rank = torch.where(absent[:, None, :], 1 << 32, rank)
    return rank.argsort(dim=-1, stable=True)
