"""Running statistics: the buffers that a model changes while it trains, such as those of BatchNorm.

They are part of a model's tree, under their names, like weights: each client has its own, sends
them, and the server averages them. A training step gives their new value in place of a gradient
step.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode

_BATCH_NORM = inspect.signature(F.batch_norm)


def statistic_names(module: nn.Module, x: Tensor | None = None) -> tuple[str, ...]:
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


def _changed_buffers(module: nn.Module, x: Tensor) -> set[str]:
    trained = copy.deepcopy(module).train()
    try:
        with torch.random.fork_rng(), torch.no_grad():
            # A server has samples of zeros, which may leave a running mean at zero.
            trained(x + torch.rand_like(x) if x.is_floating_point() else x)
    except Exception:  # a model that cannot take these inputs is refused later, with the reason
        return set()
    before = dict(module.named_buffers())
    return {
        name
        for name, after in trained.named_buffers()
        if name in before and not torch.equal(before[name], after)
    }


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


class MaskedBatchNorm(TorchFunctionMode):
    """In this context BatchNorm takes its batch statistics from the real examples only.

    It replaces the function that all BatchNorm layers call, also those of timm. A batch with one
    value per channel has no variance: then the running statistics are used and stay as they are.

    Args:
        weight: (B,) the weight of each example, 0 for padding.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        given = _BATCH_NORM.bind(*args, **kwargs)
        given.apply_defaults()
        if not given.arguments.pop("training") or len(given.arguments["input"]) % len(self.weight):
            return func(*args, **kwargs)
        return self._batch_norm(**given.arguments)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        x = input
        axes, channels = (0, *range(2, x.ndim)), (1, -1, *[1] * (x.ndim - 2))
        # A model may have merged the axes of examples and of positions in a sequence.
        mask = self.weight.repeat_interleave(len(x) // len(self.weight))
        count = mask.sum() * math.prod(x.shape[2:])
        share = (mask / count.clamp_min(1)).view(-1, *[1] * (x.ndim - 1))
        mean = (x * share).sum(axes)
        var = ((x - mean.view(channels)).square() * share).sum(axes)
        if running_mean is not None and running_var is not None:
            has_variance = count > 1
            unbiased = var * (count / (count - 1).clamp_min(1))
            for running, new in ((running_mean, mean), (running_var, unbiased)):
                after = running + momentum * (new.detach() - running)
                running.copy_(torch.where(has_variance, after, running))
            mean = torch.where(has_variance, mean, running_mean)
            var = torch.where(has_variance, var, running_var)
        factor = (var + eps).rsqrt()
        if weight is not None:
            factor = factor * weight
        result = (x - mean.view(channels)) * factor.view(channels)
        return result if bias is None else result + bias.view(channels)
