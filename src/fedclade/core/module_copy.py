"""Copies of a module that share the memory of some weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from fedclade.errors import InvalidInputError


def copy_sharing(module: nn.Module, shared: Iterable[nn.Parameter]) -> nn.Module:
    """A copy of the module. It holds the parameters in `shared` themselves, and copies of all
    others.
    """
    return copy.deepcopy(module, {id(value): value for value in shared})


def frozen_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not trained."""
    return [value for value in module.parameters() if not value.requires_grad]


def require_copyable(module: nn.Module) -> None:
    """Raise `InvalidInputError` for a module that no client can have a copy of."""
    for name, layer in module.named_modules():
        where = f"model, layer '{name}' ({type(layer).__name__})" if name else "model"
        if isinstance(layer, torch.jit.ScriptModule):
            raise InvalidInputError(
                f"{where}: it is compiled by torch.jit. Give the nn.Module that it was made from.",
                "model",
            )
        own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        if any(is_lazy(value) for value in own):
            raise InvalidInputError(
                f"{where}: it has no weights yet. Call the model once on a few inputs first.",
                "model",
            )
