"""Metrics over all outputs of a client by name, and metrics of torchmetrics, which is imported only
if a run needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from fedclade.core.functional_model import Objective
from fedclade.core.losses import ExampleLoss
from fedclade.core.output_metric import OutputMetric
from fedclade.core.torch_loss import TorchLoss
from fedclade.errors import InvalidInputError
from fedclade.training.config import MetricName

if TYPE_CHECKING:
    from torchmetrics import Metric

UserMetrics: TypeAlias = Mapping[str, "ExampleLoss | Metric"]
"""The user's metrics by name: functions with one value per example, or torchmetrics objects."""
Task: TypeAlias = Literal["multiclass", "binary", "multilabel", "regression"]
_REGRESSION = ("mae", "rmse", "r2")
_BINS = 15  # of the calibration error


def is_torchmetric(metric: object) -> bool:
    """Whether this is a metric object of torchmetrics. It is not imported: if it was not imported
    before, there is no such object.
    """
    return any(kind.__module__ == "torchmetrics.metric" for kind in type(metric).__mro__)


def from_torchmetrics(metric: Metric) -> OutputMetric:
    """A user's metric, which gets the outputs and the targets as they are. Clients for which it
    raises a ValueError have no value.
    """

    def value(outputs: Tensor, y: Tensor) -> float:
        own = metric.clone().to(outputs.device)
        own.reset()
        try:
            own.update(outputs, y)
            return _as_number(own.compute())
        except ValueError:
            return math.nan

    return OutputMetric(value, is_thread_safe=False)


def check_torchmetric(field: str, metric: Metric, outputs: Tensor, y: Tensor) -> None:
    """Raise `InvalidInputError` unless the metric gives one number for these outputs."""
    own = metric.clone().to(outputs.device)
    own.reset()
    try:
        own.update(outputs, y)
        _as_number(own.compute())
    except Exception as error:
        raise InvalidInputError(
            f"{field}: it cannot take outputs of shape {tuple(outputs.shape)} and targets of shape"
            f" {tuple(y.shape)} ({y.dtype}), or does not give one number: {error}",
            field,
        ) from error


def by_name(
    names: Sequence[MetricName],
    objective: Objective,
    classes: int | None,
    outputs: Tensor,
    y: Tensor,
) -> dict[str, OutputMetric]:
    """The metrics of these names, for the task that follows from the data.

    Args:
        names: the names.
        objective: the model and its loss.
        classes: the number of classes; None if the targets are not class labels.
        outputs: the outputs of the model for a few examples.
        y: the targets of these examples.
    """
    if names:
        _import_torchmetrics(names)
    return {name: _named(name, objective, classes, outputs, y) for name in names}


def _import_torchmetrics(names: Sequence[str]) -> None:
    """Import it here, before the training: it also imports libraries such as torchvision if they
    are installed, and fails if they do not fit torch.
    """
    try:
        import torchmetrics.functional.classification
        import torchmetrics.functional.regression  # noqa: F401
    except ImportError as error:
        raise InvalidInputError(
            f"run.metrics = {list(names)}: torchmetrics is not installed ({error}). Install it"
            " with: pip install 'fedclade[metrics]'",
            "run.metrics",
        ) from error
    except Exception as error:
        raise InvalidInputError(
            f"run.metrics = {list(names)}: torchmetrics cannot be imported ({error}).",
            "run.metrics",
        ) from error


def _named(
    name: MetricName, objective: Objective, classes: int | None, outputs: Tensor, y: Tensor
) -> OutputMetric:
    task = _task(name, classes, outputs, y)
    is_probability = isinstance(objective.example_loss, TorchLoss) and isinstance(
        objective.example_loss.module, nn.BCELoss
    )
    num_outputs = outputs.shape[-1] if task == "multiclass" else math.prod(y.shape[1:])
    function = _FUNCTIONS[name]

    def value(outputs: Tensor, y: Tensor) -> float:
        outputs = outputs.to(torch.float32)
        if task == "multiclass":  # the positions of sequences count as examples
            outputs, y = outputs.reshape(-1, num_outputs).softmax(-1), y.reshape(-1)
        else:
            outputs, y = outputs.reshape(-1, num_outputs), y.reshape(-1, num_outputs)
            if task != "regression":
                outputs = outputs if is_probability else outputs.sigmoid()
                y = (y > 0.5).to(torch.int64)
        return function(outputs, y, task)

    if name in _REGRESSION:
        return OutputMetric(value, highest=1.0) if name == "r2" else OutputMetric(value, lowest=0.0)
    return OutputMetric(value, lowest=0.0, highest=1 + 1e-6)  # the areas have rounding errors


def _task(name: MetricName, classes: int | None, outputs: Tensor, y: Tensor) -> Task:
    """What the metric measures, by the shapes of outputs and targets."""
    each_class = classes is not None and outputs.shape[:-1] == y.shape and outputs.shape[-1] > 1
    each_target = outputs.shape == y.shape or outputs.shape == (*y.shape, 1)
    if name in _REGRESSION and each_target:
        return "regression"
    if name not in _REGRESSION and each_class:
        return "multiclass"
    if name not in _REGRESSION and each_target:
        return "binary" if math.prod(y.shape[1:]) == 1 else "multilabel"
    needs = (
        "an output for each target"
        if name in _REGRESSION
        else "class labels and an output for each class, or targets of 0 and 1 and an output for"
        " each"
    )
    raise InvalidInputError(
        f"run.metrics = '{name}': it needs {needs}; the outputs have shape {tuple(outputs.shape)},"
        f" the targets {tuple(y.shape)}.",
        "run.metrics",
    )


def _auroc(outputs: Tensor, y: Tensor, task: Task) -> float:
    """The mean over the classes (or labels) that have both positive and negative examples."""
    from torchmetrics.functional.classification import binary_auroc

    positive = y if task != "multiclass" else nn.functional.one_hot(y, outputs.shape[1])
    both = (positive.sum(0) > 0) & (positive.sum(0) < len(positive))
    values = [
        float(binary_auroc(outputs[:, label], positive[:, label], validate_args=False))
        for label in both.nonzero().flatten().tolist()
    ]
    return _mean(values)


def _f1(outputs: Tensor, y: Tensor, task: Task) -> float:
    """The mean over the classes (or labels) that are in the targets or predicted."""
    from torchmetrics.functional.classification import binary_f1_score, multiclass_f1_score

    if task == "multiclass":
        return float(multiclass_f1_score(outputs, y, outputs.shape[1], average="macro"))
    there = (y > 0).any(0) | (outputs > 0.5).any(0)
    return _mean(
        [
            float(binary_f1_score(outputs[:, label], y[:, label], validate_args=False))
            for label in there.nonzero().flatten().tolist()
        ]
    )


def _ece(outputs: Tensor, y: Tensor, task: Task) -> float:
    """The expected calibration error with 15 bins; labels count as single examples."""
    from torchmetrics.functional.classification import (
        binary_calibration_error,
        multiclass_calibration_error,
    )

    if task == "multiclass":
        return float(multiclass_calibration_error(outputs, y, outputs.shape[1], n_bins=_BINS))
    return float(binary_calibration_error(outputs.flatten(), y.flatten(), n_bins=_BINS))


def _mae(outputs: Tensor, y: Tensor, task: Task) -> float:
    from torchmetrics.functional.regression import mean_absolute_error

    return float(mean_absolute_error(outputs, y.to(outputs.dtype)))


def _rmse(outputs: Tensor, y: Tensor, task: Task) -> float:
    from torchmetrics.functional.regression import mean_squared_error

    return float(mean_squared_error(outputs, y.to(outputs.dtype), squared=False))


def _r2(outputs: Tensor, y: Tensor, task: Task) -> float:
    """The mean over the outputs whose targets are not all the same."""
    from torchmetrics.functional.regression import r2_score

    y = y.to(outputs.dtype)
    varies = (y != y[:1]).any(0).nonzero().flatten().tolist()
    return _mean([float(r2_score(outputs[:, i], y[:, i])) for i in varies])


_FUNCTIONS: dict[str, Callable[[Tensor, Tensor, Task], float]] = dict(
    zip(get_args(MetricName), (_auroc, _f1, _ece, _mae, _rmse, _r2), strict=True)
)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _as_number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    raise TypeError(f"{type(value).__name__} is not one number")
