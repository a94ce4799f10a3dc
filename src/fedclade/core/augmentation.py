"""Augmentation: random changes of a client's inputs before a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedclade.core.functional_model import ClientStackedBatch
from fedclade.core.inputs import (
    Inputs,
    device_of,
    from_tensors,
    join_inputs,
    map_inputs,
    samples_in,
    select,
    tensors_of,
)
from fedclade.core.rng import hash_bits
from fedclade.core.seeded_generator import seeded_generator
from fedclade.errors import InvalidInputError

Augment: TypeAlias = Callable[[Any], Any]
"""Inputs of a batch -> inputs of the same structure and number of samples."""

_COUNTER = 1 << 30  # of the augmentation's key; dropout and members of a group have small counters


def augmented(batch: ClientStackedBatch, augment: Augment) -> ClientStackedBatch:
    """The batch with augmented inputs. `augment` gets the examples of one client's batch without
    padding, and draws from torch's generator, which starts from the step's key: so the result
    depends neither on other clients nor on threads.

    Args:
        batch: the batches of some clients, or groups of batches (`Batches.group`).
        augment: the augmentation.
    """
    shape = batch.weight.shape  # clients, or clients and group, and examples
    counts = (batch.weight > 0).sum(-1).flatten().tolist()
    keys = _keys(batch, shape).flatten()
    x = map_inputs(lambda value: value.flatten(0, len(shape) - 2), batch.x)
    rows = []
    for row, count in enumerate(counts):
        new = augment_inputs(select(x, (row, slice(count))), keys[row], augment)
        # Padding repeats examples, as in the plan.
        padding = torch.arange(shape[-1], device=device_of(new)) % count
        rows.append(select(new, padding))
    stacked = join_inputs(torch.stack, rows)
    x = map_inputs(lambda value: value.reshape(*shape, *value.shape[2:]), stacked)
    return ClientStackedBatch(x, batch.y, batch.weight, batch.key, batch.share)


def _keys(batch: ClientStackedBatch, shape: torch.Size) -> Tensor:
    """The key of each batch: of a group, that of `Batch.member`."""
    if len(shape) == 2:
        return batch.key
    return torch.stack([hash_bits(batch.key, number) for number in range(shape[1])], 1)


def augment_inputs(x: Inputs, key: Tensor, augment: Augment) -> Inputs:
    """The augmented inputs of one batch. Raises `InvalidInputError` if they do not fit the batch.

    Args:
        x: the inputs of a batch without padding.
        key: the randomness of the step.
        augment: the augmentation.
    """
    with seeded_generator(hash_bits(key, _COUNTER)), torch.no_grad():
        try:
            new = augment(x)
        except Exception as error:
            raise InvalidInputError(
                f"augment: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}. It"
                " gets the inputs of a batch as floats, with one row per example.",
                "augment",
            ) from error
    if _structure(new) != _structure(x) or any(
        not isinstance(value, Tensor) or value.ndim == 0 or len(value) != samples_in(x)
        for value in tensors_of(new)
    ):
        raise InvalidInputError(
            f"augment: it must return inputs of the same structure with {samples_in(x)} samples,"
            f" as it got them; it returned {_text(new)}.",
            "augment",
        )
    # Subclasses of tensors, such as torchvision's images, become plain tensors.
    return from_tensors([value.as_subclass(Tensor) for value in tensors_of(new)], new)


def _structure(x: Any) -> object:
    if isinstance(x, dict):
        return tuple(x)
    return len(x) if isinstance(x, tuple) else Tensor if isinstance(x, Tensor) else None


def _text(x: Any) -> str:
    return f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
