"""Clients from torch data sets: any object with a length and items (x, y)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from fedclade.core.inputs import Inputs, map_inputs, tensors_of
from fedclade.data.datasets import from_arrays
from fedclade.data.federated_dataset import Clients
from fedclade.errors import InvalidInputError

Source: TypeAlias = Any
"""A map-style data set with items (x, y), or a pair of arrays (x, y)."""


def from_datasets(
    clients: Mapping[str, Source | tuple[Source, Source | None]],
    groups: Sequence[int] | Tensor | None = None,
    *,
    class_names: Sequence[str] | None = None,
    feature_names: Sequence[str] | None = None,
) -> Clients:
    """Make clients from torch data sets. Every item is read once, into memory.

    Args:
        clients: For each client's name its training data, or (training data, test data). Data are a
            map-style data set (`__len__` and `__getitem__`), whose items are pairs (x, y), or a
            pair of arrays (x, y). x may be a tensor, an array, an image of Pillow, or a tuple or
            dictionary of tensors; y is a number or a tensor. A client without test data is not
            evaluated on test data.
        groups: The true group of each client; None if it is not known.
        class_names: The name of each class; reports and model cards show it instead of its number.
        feature_names: The name of each feature of inputs of shape (samples, features).
    """
    if not isinstance(clients, Mapping):
        raise InvalidInputError(
            f"clients: it is of type {type(clients).__name__}; give a dictionary with the data of"
            ' each client by its name, such as {"north": (train, test)}.',
            "clients",
        )
    arrays: dict[str, tuple[object, ...]] = {}
    for name, given in clients.items():
        train, test = _parts(given)
        parts: tuple[object, ...] = _read(train, f"client {name}: its training data")
        if test is not None:
            parts += _read(test, f"client {name}: its test data")
        arrays[name] = parts
    made = from_arrays(arrays, groups, class_names=class_names, feature_names=feature_names)
    return replace(made, dataset="datasets", partition="datasets")


def _parts(given: Source) -> tuple[Source, Source | None]:
    """The training and the test data of a client. Two arrays are one pair (x, y)."""
    if isinstance(given, tuple) and len(given) == 2 and not _is_pair(given):
        return given
    return given, None


def _is_pair(given: object) -> bool:
    return (
        isinstance(given, tuple)
        and len(given) == 2
        and isinstance(given[1], Tensor | np.ndarray)
        and isinstance(given[0], Tensor | np.ndarray | tuple | dict)
    )


def _read(source: Source, what: str) -> tuple[object, object]:
    """The inputs and the targets of all items. `what` is the name of the data in messages."""
    if _is_pair(source):
        x, y = source
        return x, y
    if isinstance(source, IterableDataset) or not (
        hasattr(source, "__len__") and hasattr(source, "__getitem__")
    ):
        raise InvalidInputError(
            f"{what}: {type(source).__name__} has no length or no items by number. Give a map-style"
            " data set (list(…) makes one of an iterable data set), or a pair of arrays (x, y).",
            what,
        )
    size = len(source)
    if size == 0:
        raise InvalidInputError(f"{what}: there are no items. Give at least one.", what)
    if type(source) is TensorDataset and len(source.tensors) == 2:
        return source.tensors
    x, y = _item(source, 0, what)
    inputs, targets = map_inputs(lambda value: _rows(size, value), x), _rows(size, y)
    for number in range(size):
        values = _item(source, number, what) if number else (x, y)
        if type(values[0]) is not type(x) or (
            isinstance(x, dict) and x.keys() != values[0].keys()  # type: ignore[union-attr]
        ):
            raise InvalidInputError(
                f"{what}: x of item {number} is not built like x of item 0: every item must have"
                " the same tensors.",
                what,
            )
        pairs = zip(
            (*tensors_of(inputs), targets), (*tensors_of(values[0]), values[1]), strict=True
        )
        for place, (into, value) in enumerate(pairs):
            _require_alike(into[0], value, number, place < len(tensors_of(inputs)), what)
            into[number] = value
    return inputs, targets


def _rows(size: int, value: Tensor) -> Tensor:
    return value.new_empty(size, *value.shape)


def _require_alike(first: Tensor, value: Tensor, number: int, is_input: bool, what: str) -> None:
    if first.shape != value.shape or first.dtype != value.dtype:
        raise InvalidInputError(
            f"{what}: {'x' if is_input else 'y'} of item {number} has shape {tuple(value.shape)}"
            f" and type {value.dtype}, that of item 0 shape {tuple(first.shape)} and type"
            f" {first.dtype}: make them equal, for example by a transform.",
            what,
        )


def _item(source: Source, number: int, what: str) -> tuple[Inputs, Tensor]:
    try:
        item = source[number]
    except Exception as error:  # the data set is the user's code
        raise InvalidInputError(
            f"{what}: item {number} cannot be read ({type(error).__name__}: {error}).", what
        ) from error
    if not isinstance(item, tuple | list) or len(item) != 2:
        kind = f"{len(item)} values" if isinstance(item, tuple | list) else type(item).__name__
        raise InvalidInputError(f"{what}: item {number} is {kind}; give a pair (x, y).", what)
    x, y = item
    where = f"{what}: item {number}"
    if isinstance(x, dict):
        inputs: Inputs = {str(name): _tensor(value, where) for name, value in x.items()}
    elif isinstance(x, tuple):
        inputs = tuple(_tensor(value, where) for value in x)
    else:
        inputs = _tensor(x, where)
    return inputs, _tensor(y, where)


def _tensor(value: object, where: str) -> Tensor:
    """A tensor, an array, an image or a number as a tensor."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidInputError(f"{where} is not a rectangular array ({error}).", where) from error
    if array.dtype.kind not in "biuf":
        raise InvalidInputError(
            f"{where} holds values of type {array.dtype}: give numbers, by a transform of the data"
            " set.",
            where,
        )
    return torch.from_numpy(np.array(array))  # a copy: the array of an image is read-only
