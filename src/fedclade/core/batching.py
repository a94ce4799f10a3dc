"""The minibatches of a client: which of its samples are in which step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from fedclade.core.rng import counter_block, hash_with
from fedclade.errors import require_int

ClassWeight: TypeAlias = Literal["none", "balanced"]
Part: TypeAlias = Literal["all", "fit", "held_out", "none"]
N = TypeVar("N", int, Tensor)

WHOLE_BLOCK = 64
HELD_OUT = 5  # every fifth sample of a client is held out


@dataclass(frozen=True)
class Batches:
    """How a program reads a client's data.

    The last batch of an epoch may be smaller than `size`; it is padded with weight 0. If the number
    of batches is not a multiple of `group`, the last group repeats the epoch's first batches, so
    that a client with a single batch makes a step too.

    Args:
        size: examples per batch.
        epochs: passes over the data.
        num_steps: the number of steps, in place of `epochs`: passes follow each other until there
            are enough steps. 0 for whole passes.
        shuffle: whether each epoch has a random order.
        group: batches per step.
        class_weight: "balanced" weights an example of class c by n / (C n_c), where the client has
            n examples of C classes, n_c of them of class c.
        augment: what changes the inputs of a batch first; None for nothing.
        part: "held_out" reads every fifth sample, "fit" the other ones: a client chooses a number
            (λ of Ditto) by its loss on samples that it did not train on. A client with fewer than
            five samples has none held out. "none": a program without steps.
    """

    size: int
    epochs: int = 1
    num_steps: int = 0
    shuffle: bool = True
    group: int = 1
    class_weight: ClassWeight = "none"
    augment: Callable[[Any], Any] | None = None
    part: Part = "all"

    def __post_init__(self) -> None:
        for field in ("size", "epochs", "group"):
            require_int(f"batches.{field}", getattr(self, field), 1)
        require_int("batches.num_steps", self.num_steps, 0)

    @staticmethod
    def whole(block: int = WHOLE_BLOCK) -> Batches:
        """Every sample once, in order, in blocks: for sums over all samples."""
        return Batches(size=block, shuffle=False)

    @staticmethod
    def none() -> Batches:
        """No sample: for a program without steps."""
        return Batches(size=1, shuffle=False, part="none")

    def steps(self, sizes: Tensor) -> Tensor:
        """The number of steps of clients with these numbers of samples."""
        groups = self._groups(self.read(sizes))
        return self.num_steps * (groups > 0) if self.num_steps else groups * self.epochs

    def most(self, longest: int) -> int:
        """The number of steps of a client with `longest` samples."""
        batches = -(-self.read(longest) // self.size)
        if self.num_steps:
            return self.num_steps if batches else 0
        return -(-batches // self.group) * self.epochs

    @property
    def most_passes(self) -> int:
        """The most passes over the data that a client starts. With `num_steps`, a client whose
        data are one step starts one in every step.
        """
        return self.num_steps or self.epochs

    def read(self, sizes: N) -> N:
        """The number of samples that are read, of clients with these numbers of samples."""
        if self.part == "all":
            return sizes
        if self.part == "none":
            return sizes * 0
        held_out = sizes // HELD_OUT
        return held_out if self.part == "held_out" else sizes - held_out

    def position(self, place: Tensor) -> Tensor:
        """The positions in the client's data of these places among the samples that are read."""
        if self.part in ("all", "none"):
            return place
        if self.part == "held_out":
            return place * HELD_OUT + HELD_OUT - 1
        return place + place // (HELD_OUT - 1)

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
    step = torch.arange(batches.most(longest), device=device)
    last = sizes[:, None, None, None] - 1
    # A client of which no sample is read has no step; its rows only have to be valid.
    sizes, longest = batches.read(sizes).clamp(min=1), max(1, batches.read(longest))
    groups = batches._groups(sizes)

    epoch = (step // groups[:, None]).clamp(max=batches.most_passes - 1)
    number = (step % groups[:, None])[..., None] * batches.group + torch.arange(
        batches.group, device=device
    )
    per_epoch = (sizes + batches.size - 1) // batches.size
    first = (number % per_epoch[:, None, None]) * batches.size
    valid = (sizes[:, None, None] - first).clamp(max=batches.size)
    place = first[..., None] + torch.arange(batches.size, device=device) % valid[..., None]

    if batches.shuffle:
        order = _orders(batches.most_passes, sizes, longest, keys)
        flat = (epoch[..., None, None] * longest + place).flatten(1)
        place = order.flatten(1).gather(1, flat).view(place.shape)
    position = torch.minimum(batches.position(place), last)
    return Plan(position, valid, hash_with(keys[:, None], counter_block(len(step), 0, device)))


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
