"""Losses and metrics: functions of (outputs, targets) with one value per example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedclade.core.torch_loss import TorchLoss, is_plain_cross_entropy
from fedclade.errors import InvalidInputError

ExampleLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one number per example. Metrics have the same type."""

LossName: TypeAlias = Literal["cross_entropy", "bce", "mse", "mae", "huber"]


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """The default loss, one value per example. For a sequence of labels it is the mean over its
    positions.

    Args:
        outputs: the outputs of a model, one for each class.
        y: the labels.

    Returns:
        One value for each example.

    Example:
        >>> import torch
        >>> import fedclade as fc
        >>> fc.cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3])).shape
        torch.Size([2])
    """
    if y.ndim == 1:
        return F.cross_entropy(outputs, y, reduction="none")
    return (
        F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none")
        .view(y.shape)
        .flatten(1)
        .mean(1)
    )


def bce(outputs: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy of logits, the mean over an example's labels. Targets are 0 or 1, or
    numbers between.
    """
    outputs, y = _same_shape(outputs, y)
    return _mean(F.binary_cross_entropy_with_logits(outputs, y, reduction="none"))


def mse(outputs: Tensor, y: Tensor) -> Tensor:
    """The squared error, the mean over an example's targets."""
    return _mean(_errors(outputs, y).square())


def mae(outputs: Tensor, y: Tensor) -> Tensor:
    """The absolute error, the mean over an example's targets."""
    return _mean(_errors(outputs, y).abs())


def huber(outputs: Tensor, y: Tensor) -> Tensor:
    """The Huber loss with δ = 1, the mean over an example's targets: e² / 2 for errors e up to 1,
    then |e| - 1/2.
    """
    size = _errors(outputs, y).abs()
    return _mean(torch.where(size <= 1, size.square() / 2, size - 0.5))


LOSSES: dict[LossName, ExampleLoss] = {
    "cross_entropy": cross_entropy,
    "bce": bce,
    "mse": mse,
    "mae": mae,
    "huber": huber,
}
"""The losses of experiment files, by name."""

REGRESSION = (mse, mae, huber)
"""The losses of targets that are numbers, not classes."""


def _errors(outputs: Tensor, y: Tensor) -> Tensor:
    """Not by torch's functions: their batching rules fail where only the outputs have an axis of
    models.
    """
    outputs, y = _same_shape(outputs, y)
    return outputs - y


def _mean(values: Tensor) -> Tensor:
    """The mean over an example's numbers."""
    return values.flatten(1).mean(1) if values.ndim > 1 else values


def _same_shape(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets as floats of the same shape: outputs (n, 1) become (n,) for one number
    per example.
    """
    if outputs.ndim == y.ndim + 1 and outputs.shape[-1] == 1:
        outputs = outputs.squeeze(-1)
    if outputs.shape != y.shape:
        raise ValueError(
            f"a target has the shape {tuple(y.shape[1:])} and an output {tuple(outputs.shape[1:])};"
            " they must be equal"
        )
    return outputs, y.to(outputs.dtype)


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    """1 if the largest output is the label. For a sequence of labels it is the mean over its
    positions.

    Args:
        outputs: the outputs of a model, one for each class.
        y: the labels.

    Returns:
        One value for each example.

    Example:
        >>> import torch
        >>> import fedclade as fc
        >>> fc.accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1])).tolist()
        [1.0, 0.0]
    """
    right = (outputs.argmax(-1) == y).to(torch.float32)
    return right if y.ndim == 1 else right.flatten(1).mean(1)


def label_accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    """The share of an example's labels that are right, for the loss `bce`: a label is 1 if its
    logit is above 0.
    """
    outputs, y = _same_shape(outputs, y)
    return _mean(((outputs > 0) == (y > 0.5)).to(torch.float32))


def example_loss(loss: ExampleLoss | None, device: torch.device) -> ExampleLoss:
    """The loss per example of a function or a loss module of torch; None for cross-entropy."""
    if loss is None or is_plain_cross_entropy(loss):
        return cross_entropy
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        return TorchLoss(loss, device)
    if isinstance(loss, type) or not callable(loss):
        raise InvalidInputError(
            f"loss = {loss!r}: give a function of (outputs, targets), a torch loss such as"
            f" nn.MSELoss(), or one of {', '.join(LOSSES)}.",
            "loss",
        )
    return loss


def require_per_example(field: str, function: ExampleLoss, outputs: Tensor, y: Tensor) -> None:
    """Raise `InvalidInputError` unless a loss or metric gives each example a value of its own.

    Outputs (n, 1) and targets (n,) broadcast to (n, n): every value would then depend on all
    targets, and a wrong model would be trained without an error.

    Args:
        field: the name in the message.
        function: the loss or metric.
        outputs: the model's outputs for a few examples, of which two have different targets.
        y: the targets of these examples.
    """
    try:
        values = function(outputs, y)
        singles = torch.cat(
            [function(outputs[i : i + 1], y[i : i + 1]).reshape(-1) for i in range(len(y))]
        )
    except Exception as error:
        raise InvalidInputError(
            f"{field}: it cannot take outputs of shape {tuple(outputs.shape)} and targets of shape"
            f" {tuple(y.shape)} ({y.dtype}): {next(iter(str(error).splitlines()), '')}",
            field,
        ) from error
    if not isinstance(values, Tensor) or values.shape != y.shape[:1]:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InvalidInputError(
            f"{field}: it must give one value for each example, shape ({len(y)},), got {shape}:"
            " leave the mean out (reduction='none').",
            field,
        )
    if values.shape != singles.shape or not torch.allclose(
        values.float(), singles.float(), 1e-3, 1e-5, equal_nan=True
    ):
        raise InvalidInputError(
            f"{field}: the value of an example changes with the other examples of the batch."
            f" Outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(y.shape)} may"
            " broadcast: give both the same shape, as outputs.squeeze(1) does for one output.",
            field,
        )
