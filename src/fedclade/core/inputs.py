"""The inputs of a model: a tensor, or a tuple or dictionary of tensors, each with one row per
sample; and how a model is called with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, nn

from fedclade.core.pytree import Tree
from fedclade.errors import InvalidInputError

Inputs: TypeAlias = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
"""A model gets a tensor as its argument, a tuple as its arguments in order, and a dictionary as
its arguments by name.
"""

InputsKind: TypeAlias = Literal["tensor", "tuple", "dict"]


@overload
def map_inputs(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor: ...
@overload
def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs: ...
def map_inputs(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply `function` to each tensor of the inputs."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, dict):
        return {name: function(value) for name, value in x.items()}
    return tuple(function(value) for value in x)


def tensors_of(x: Inputs) -> tuple[Tensor, ...]:
    """The tensors of the inputs."""
    if isinstance(x, Tensor):
        return (x,)
    return tuple(x.values()) if isinstance(x, dict) else x


def from_tensors(tensors: Sequence[Tensor], like: Inputs) -> Inputs:
    """Inputs of the same structure as `like`: the inverse of `tensors_of`."""
    if isinstance(like, Tensor):
        return tensors[0]
    if isinstance(like, dict):
        return dict(zip(like, tensors, strict=True))
    return tuple(tensors)


def join_inputs(function: Callable[[list[Tensor]], Tensor], parts: Sequence[Inputs]) -> Inputs:
    """Apply `function`, such as `torch.cat`, to the tensors of the same place in all parts."""
    columns = zip(*(tensors_of(part) for part in parts), strict=True)
    return from_tensors([function(list(column)) for column in columns], parts[0])


@overload
def select(x: Tensor, rows: Any) -> Tensor: ...
@overload
def select(x: Inputs, rows: Any) -> Inputs: ...
def select(x: Inputs, rows: Any) -> Inputs:
    """These rows of each tensor."""
    return map_inputs(lambda value: value[rows], x)


def samples_in(x: Inputs) -> int:
    """The number of samples."""
    return len(tensors_of(x)[0])


def device_of(x: Inputs) -> torch.device:
    return tensors_of(x)[0].device


@overload
def as_inputs(x: Tensor) -> Tensor: ...
@overload
def as_inputs(x: Inputs) -> Inputs: ...
def as_inputs(x: Inputs) -> Inputs:
    """Samples as a model reads them: pixels of uint8 as x / 255, everything else as it is."""

    def read(value: Tensor) -> Tensor:
        return value.to(torch.float32).div_(255) if value.dtype == torch.uint8 else value

    return map_inputs(read, x)


def shape_of(x: Inputs) -> tuple[int, ...] | None:
    """The shape of one sample; None if a sample is several tensors."""
    return tuple(x.shape[1:]) if isinstance(x, Tensor) else None


def describe_inputs(x: Inputs) -> str:
    """The shape of one sample, as text."""
    if isinstance(x, Tensor):
        return str(tuple(x.shape[1:]))
    pairs = x.items() if isinstance(x, dict) else enumerate(x)
    return ", ".join(f"{name}: {tuple(value.shape[1:])}" for name, value in pairs)


def one_tensor(x: Inputs, what: str, field: str) -> Tensor:
    """The inputs, if they are one tensor; else `InvalidInputError`.

    Args:
        x: the inputs.
        what: what needs one tensor, such as "method pca_hc".
        field: the field of the error.
    """
    if not isinstance(x, Tensor):
        raise InvalidInputError(
            f"{field}: {what} needs inputs of one tensor, and a sample here is several"
            f" ({describe_inputs(x)}). Use another one.",
            field,
        )
    return x


def flat_numbers(x: Inputs, method: str) -> Tensor:
    """Inputs as vectors of numbers: (n, d). `InvalidInputError` if they are not numbers.

    Args:
        x: the inputs.
        method: the method that needs them, such as "pca_hc".
    """
    x = one_tensor(x, f"method {method}", "method.name")
    if not x.is_floating_point():
        raise InvalidInputError(
            f"data: inputs of type {x.dtype} (tokens) have no principal components. Use another"
            f" method than {method}.",
            "data",
        )
    return x.flatten(1)


def to_tree(x: Inputs) -> tuple[InputsKind, Tree]:
    """The kind of the inputs, and their tensors by name."""
    if isinstance(x, Tensor):
        return "tensor", {"": x}
    if isinstance(x, dict):
        return "dict", x
    return "tuple", {str(place): value for place, value in enumerate(x)}


def from_tree(kind: InputsKind, tree: Tree) -> Inputs:
    """The inverse of `to_tree`."""
    if kind == "tensor":
        return tree[""]
    return dict(tree) if kind == "dict" else tuple(tree[str(place)] for place in range(len(tree)))


def call(function: Callable[..., Any], x: Inputs) -> Any:
    """`function(x)`, with a tuple as its arguments in order and a dictionary as those by name."""
    if isinstance(x, dict):
        return function(**x)
    return function(x) if isinstance(x, Tensor) else function(*x)


def outputs_tensor(outputs: object, module: nn.Module) -> Tensor:
    """The tensor in what a model returned: a tensor; `logits` of an object or a dictionary, as
    models of Hugging Face return them; or the first tensor of a tuple.
    """
    if isinstance(outputs, Tensor):
        return outputs
    logits = (
        outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    )
    if isinstance(logits, Tensor):
        return logits
    if isinstance(outputs, tuple | list):
        for value in outputs:
            if isinstance(value, Tensor):
                return value
    raise InvalidInputError(
        f"model: {type(module).__name__} returns a {type(outputs).__name__} without outputs. It"
        " must return a tensor, a tuple whose first tensor holds the outputs, or an object with"
        " `logits`.",
        "model",
    )
