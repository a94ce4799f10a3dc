"""Metrics over all outputs of a client, in addition to metrics per example."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from fedclade.core.losses import ExampleLoss


@dataclass(frozen=True)
class OutputMetric:
    """A metric that is no mean over examples, such as the area under the ROC curve.

    Args:
        function: (outputs, targets) of all examples of a client -> one number; NaN where the metric
            is not defined.
        lowest: the least value that a client may report.
        highest: the largest value that a client may report.
        is_thread_safe: whether several threads may call the function at the same time.
    """

    function: Callable[[Tensor, Tensor], float]
    lowest: float = -1e12
    highest: float = 1e12
    is_thread_safe: bool = True


AnyMetric: TypeAlias = ExampleLoss | OutputMetric
