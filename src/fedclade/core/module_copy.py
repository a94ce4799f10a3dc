"""Copies of a module that share the memory of some weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from torch import nn


def copy_sharing(module: nn.Module, shared: Iterable[nn.Parameter]) -> nn.Module:
    """A copy of the module. It holds the parameters in `shared` themselves, and copies of all
    others.
    """
    return copy.deepcopy(module, {id(value): value for value in shared})


def frozen_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not trained."""
    return [value for value in module.parameters() if not value.requires_grad]
