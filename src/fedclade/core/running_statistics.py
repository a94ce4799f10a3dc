"""Running statistics: the buffers that a model changes while it trains, such as those of BatchNorm.

They are part of a model's tree, under their names, like weights: each client has its own, sends
them, and the server averages them. A training step gives their new value in place of a gradient
step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedclade.core.inputs import Inputs, call, map_inputs
from fedclade.core.module_copy import copy_sharing, frozen_parameters


def statistic_names(module: nn.Module, x: Inputs | None = None) -> tuple[str, ...]:
    """The names of the module's running statistics: all buffers of BatchNorm and InstanceNorm
    layers, found by their type, and other buffers that a forward pass in training changes.

    Args:
        module: the model.
        x: a few inputs; None to look at the types of the layers only.
    """
    names = {
        f"{path}.{name}".lstrip(".")
        for path, layer in module.named_modules()
        if isinstance(layer, _NormBase)
        for name, _ in layer.named_buffers(recurse=False)
    }
    if x is not None:
        names |= _changed_buffers(module, x)
    return tuple(name for name, _ in module.named_buffers() if name in names)


def _changed_buffers(module: nn.Module, x: Inputs) -> set[str]:
    trained = copy_sharing(module, frozen_parameters(module)).train()
    try:
        with torch.random.fork_rng(), torch.no_grad():
            call(trained, map_inputs(_varied, x))
    except Exception:  # a model that cannot take these inputs is refused later, with the reason
        return set()
    before = dict(module.named_buffers())
    return {
        name
        for name, after in trained.named_buffers()
        if name in before and not torch.equal(before[name], after)
    }


def _varied(x: Tensor) -> Tensor:
    """A server has samples of zeros, which may leave a running mean at zero."""
    return x + torch.rand_like(x) if x.is_floating_point() else x


def batch_norm_names(module: nn.Module, trained: Sequence[str]) -> tuple[str, ...]:
    """The names of the weights and running statistics of BatchNorm layers, found by their type.

    Args:
        module: the model.
        trained: the names of its trained weights.
    """
    return tuple(
        f"{path}.{name}".lstrip(".")
        for path, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
        for name in (*dict(layer.named_parameters(recurse=False)), *dict(layer.named_buffers()))
        if name in dict(layer.named_buffers()) or f"{path}.{name}".lstrip(".") in trained
    )
