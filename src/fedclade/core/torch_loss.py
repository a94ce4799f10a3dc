"""Torch's loss modules as losses that give one value per example."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedclade.errors import require


class TorchLoss:
    """A loss module of torch, such as `nn.MSELoss()`, with one value per example.

    The value of an example with several outputs is the mean over them, so that the mean over a
    batch is that of the module itself. Class weights and ignored labels are the exception: torch
    divides by the sum of the weights in the batch, fedclade by the number of examples.

    Args:
        module: the loss module. It is copied; its reduction becomes "none".
        device: where the weights of the module are needed.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        require(
            module.reduction in ("mean", "none"),
            "loss.reduction",
            module.reduction,
            "must be 'mean' or 'none'; fedclade takes the mean over the examples",
        )
        settings = ", ".join(
            f"{name}={value}"
            for name, value in vars(module).items()
            if not name.startswith("_") and name not in ("training", "reduction")
        )
        self.__qualname__ = f"{type(module).__name__}({settings})"
        self.module = copy.deepcopy(module).to(device)
        setattr(self.module, "reduction", "none")  # noqa: B010, nn.Module has no such field

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        # torch wants the classes of a sequence on the second axis; models here have them last.
        if isinstance(self.module, nn.CrossEntropyLoss | nn.NLLLoss) and not y.is_floating_point():
            outputs = outputs.movedim(-1, 1)
        losses: Tensor = self.module(outputs, y)
        return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def is_plain_cross_entropy(loss: object) -> bool:
    """Whether `loss` is `nn.CrossEntropyLoss()` without weights and smoothing."""
    return (
        type(loss) is nn.CrossEntropyLoss
        and loss.reduction in ("mean", "none")
        and loss.weight is None
        and loss.label_smoothing == 0
        and loss.ignore_index == -100  # torch's default
    )
