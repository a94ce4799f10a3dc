"""Predictions of a finished run's models for new rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from fedclade.core.inputs import (
    Inputs,
    as_inputs,
    call,
    describe_inputs,
    outputs_tensor,
    samples_in,
    select,
    shape_of,
)
from fedclade.core.losses import LOSSES, LossName
from fedclade.data import array_checks
from fedclade.errors import InvalidInputError, require

ROWS = 1024  # of one call of a model

PredictionKind: TypeAlias = Literal["label", "probability", "output"]


@dataclass(frozen=True)
class TaskSpec:
    """What the models of a run read and predict.

    Args:
        shape: the shape of one input; None if an input is several tensors.
        classes: the number of classes; None if the targets are not class labels.
        loss: the setting `local.loss`. A run with a loss function of the user has the default.
    """

    shape: tuple[int, ...] | None
    classes: int | None
    loss: LossName

    @property
    def is_classification(self) -> bool:
        """Whether a model has one output for each class."""
        return self.loss == "cross_entropy" and self.classes is not None

    @property
    def has_unknown_loss(self) -> bool:
        """Whether the loss was a function of the user, which a result does not keep."""
        return self.loss == "cross_entropy" and self.classes is None

    def check_kind(self, kind: str) -> None:
        """Raise `InvalidInputError` for a kind of prediction that these models do not have."""
        allowed = get_args(PredictionKind)
        require(kind in allowed, "kind", kind, f"must be one of {', '.join(map(repr, allowed))}")
        require(
            kind != "probability" or self.is_classification or self.loss == "bce",
            "kind",
            kind,
            "the models predict numbers, not classes; use 'label' or 'output'",
        )

    def inputs(self, x: object, what: str = "x") -> Inputs:
        """Rows as a model reads them, after the checks of training data."""
        return as_inputs(self._checked(array_checks.inputs(x, what), what))

    def labeled(self, x: object, y: object) -> tuple[Inputs, Tensor]:
        """Labeled rows as the loss reads them."""
        if self.has_unknown_loss:
            raise InvalidInputError(
                "labeled: the run used a loss function of your own, which a result does not keep;"
                " give client=….",
                "labeled",
            )
        inputs, targets = array_checks.samples(x, y, "x", "y", "labeled: ")
        if self.is_classification:
            require(
                not targets.is_floating_point() and int(targets.max()) < (self.classes or 0),
                "labeled",
                targets.max().item(),
                f"targets must be class numbers, 0 to {(self.classes or 0) - 1}",
            )
        return as_inputs(self._checked(inputs, "labeled")), targets

    def decode(self, outputs: Tensor, kind: PredictionKind) -> Tensor:
        """The predictions from a model's outputs.

        Args:
            outputs: (rows, …) the outputs.
            kind: "label": a class, for the loss bce 0 or 1, else a number; "probability": of each
                class or label; "output": the outputs themselves.
        """
        if kind == "output":
            return outputs
        if self.is_classification:
            return outputs.softmax(-1) if kind == "probability" else outputs.argmax(-1)
        if outputs.ndim > 1 and outputs.shape[-1] == 1:
            outputs = outputs.squeeze(-1)
        if self.loss == "bce":
            return outputs.sigmoid() if kind == "probability" else (outputs > 0).long()
        return outputs

    def mean_loss(self, outputs: Tensor, y: Tensor) -> float:
        """The mean loss over labeled rows."""
        try:
            return float(LOSSES[self.loss](outputs, y).mean())
        except (ValueError, RuntimeError) as error:
            raise InvalidInputError(
                f"labeled: the targets do not fit ({error}).", "labeled"
            ) from error

    def _checked(self, x: Inputs, what: str) -> Inputs:
        if self.shape is not None and shape_of(x) != self.shape:
            raise InvalidInputError(
                f"{what} has rows of shape {describe_inputs(x)}: the models read {self.shape}.",
                what,
            )
        return x


@torch.no_grad()
def outputs_of(module: nn.Module, x: Inputs) -> Tensor:
    """The outputs of a module for all rows, some rows at a time."""
    try:
        parts = [
            outputs_tensor(call(module, select(x, slice(start, start + ROWS))), module)
            for start in range(0, samples_in(x), ROWS)
        ]
    except (RuntimeError, TypeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InvalidInputError(f"x: the model cannot read it ({reason}).", "x") from error
    return torch.cat(parts)


def least_loss(
    task: TaskSpec, candidates: Iterable[tuple[int, nn.Module]], x: Inputs, y: Tensor
) -> int | None:
    """The client whose model has the least mean loss on labeled rows; None without candidates. Of
    equal ones it is the first.

    Args:
        task: what the models predict.
        candidates: pairs of a client and its model.
        x: the inputs of the labeled rows.
        y: their targets.
    """
    best, lowest = None, math.inf
    for client, module in candidates:
        loss = task.mean_loss(outputs_of(module, x), y)
        if best is None or loss < lowest:
            # a model that has diverged is the worst
            best, lowest = client, math.inf if math.isnan(loss) else loss
    return best
