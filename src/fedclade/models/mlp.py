"""Fully connected models, for samples of any shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch import nn

from fedclade.errors import is_int, require
from fedclade.models.base import (
    MAX_UNITS,
    chain,
    check_classes,
    check_dropout,
    check_sample,
    dropout,
)


@dataclass(frozen=True)
class MLP:
    """A multilayer perceptron: hidden layers with ReLU, for samples of any shape.

    With the default it is the MLP of FLT (arXiv 2103.15947) for EMNIST and FEMNIST, with
    (200, 200) the "2NN" of FedAvg. 784 → 200 → 62 has 169,462 parameters, as FLT prints; with 47
    classes it has 166,447. FLT's code drops half of the hidden units (`dropout=0.5`) before the
    ReLU, which gives the same result as after it.

    Args:
        hidden: the number of units of the hidden layer, or a tuple with one number for each layer.
        dropout: the share of hidden units that are dropped in training.
    """

    name: ClassVar[str] = "mlp"
    hidden: int | tuple[int, ...] = 200
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.hidden, list):  # from an array in a TOML file; specs must be hashable
            object.__setattr__(self, "hidden", tuple(self.hidden))
        widths = self.hidden if isinstance(self.hidden, tuple) else (self.hidden,)
        ok = len(widths) > 0 and all(is_int(width, 1, MAX_UNITS) for width in widths)
        require(
            ok,
            "model.hidden",
            self.hidden,
            "must be a whole number of at least 1, or several for several layers; it is the number"
            " of units of a hidden layer",
        )
        check_dropout(self.dropout)

    @property
    def widths(self) -> tuple[int, ...]:
        """Units of each hidden layer."""
        return self.hidden if isinstance(self.hidden, tuple) else (self.hidden,)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        check_sample("MLP", shape)
        check_classes(classes)
        return _dense(prod(shape), self.widths, classes, self.dropout)


@dataclass(frozen=True)
class Logistic:
    """Multinomial logistic regression, one linear layer: LEAF's model for synthetic data."""

    name: ClassVar[str] = "logistic"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        check_sample("Logistic", shape)
        check_classes(classes)
        return _dense(prod(shape), (), classes, share=0.0)


def _dense(features: int, hidden: Sequence[int], classes: int, share: float) -> nn.Sequential:
    """Layers flatten, fc1, fc2, …; the last one gives the class scores."""
    layers: dict[str, nn.Module | None] = {"flatten": nn.Flatten()}
    for number, width in enumerate(hidden, start=1):
        layers[f"fc{number}"] = nn.Linear(features, width)
        layers[f"dropout{number}"] = dropout(share)
        layers[f"relu{number}"] = nn.ReLU()
        features = width
    layers[f"fc{len(hidden) + 1}"] = nn.Linear(features, classes)
    return chain(**layers)
