"""What a model is in fedclade: a spec of hyper-parameters that builds a torch module once the
data's shape is known.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar, Protocol

from torch import Tensor, nn

from fedclade.errors import InvalidInputError, is_int, require, require_int


class ModelSpec(Protocol):
    """A model before the data is known. Specs are frozen dataclasses: their fields are what
    `[model]` holds in an experiment file.

    `build` draws the first weights from torch's global generator; who wants the same weights again
    seeds it before. A module built here runs under `torch.func.vmap(grad(...))`: no BatchNorm, no
    in-place operations, and dropout only as `nn.Dropout` or `nn.Dropout2d` modules, one for each
    place, because the engine replaces them by name.
    """

    name: ClassVar[str]

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (one sample: no batch axis) and `classes` outputs."""
        ...


def chain(**layers: nn.Module | None) -> nn.Sequential:
    """The layers in the order and under the names given. None is left out, and the names of the
    others stay as they are.
    """
    return nn.Sequential(
        OrderedDict((name, layer) for name, layer in layers.items() if layer is not None)
    )


class Centre(nn.Module):
    """Inputs from 0 … 1 moved to −1 … 1."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x - 1


def centre(wanted: bool) -> Centre | None:
    """A first layer that centres the inputs, or None where they stay as they are."""
    return Centre() if wanted else None


def dropout(share: float) -> nn.Dropout | None:
    """A dropout layer, or None where nothing is dropped: it would only cost random numbers."""
    return nn.Dropout(share) if share > 0 else None


def dropout2d(share: float) -> nn.Dropout2d | None:
    """As `dropout`, for whole feature maps."""
    return nn.Dropout2d(share) if share > 0 else None


MAX_UNITS = 10**8


def check_dropout(share: object) -> None:
    ok = isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share < 1
    require(
        ok,
        "model.dropout",
        share,
        "the share of units that are dropped, a number from 0 up to but not including 1",
    )


def check_classes(classes: object) -> None:
    require_int("classes", classes, 1, MAX_UNITS, "it is the number of outputs")


def check_sample(model: str, shape: tuple[int, ...]) -> None:
    """Refuse what cannot be flattened to at least one feature."""
    if not shape or not all(is_int(side, 1, MAX_UNITS) for side in shape):
        raise InvalidInputError(
            f"{model} needs samples with at least one axis and no axis of length 0, such as (60,),"
            f" got {_written(shape)}."
        )


def check_image(model: str, shape: tuple[int, ...], least: int = 1, multiple: int = 1) -> None:
    """Refuse what is not (channels, height, width) with sides of at least `least` that are
    multiples of `multiple`.
    """
    needs = f"{model} needs images (channels, height, width) of at least {least}x{least}"
    if multiple > 1:
        needs += f" with sides divisible by {multiple}"
    fits = len(shape) == 3 and all(is_int(side, 1, MAX_UNITS) for side in shape)
    if not fits or any(side < least or side % multiple for side in shape[1:]):
        raise InvalidInputError(f"{needs}, got {_written(shape)}{_remedy(shape, multiple)}.")


def _remedy(shape: tuple[int, ...], multiple: int) -> str:
    """What to do about a shape that is no image a network can take."""
    if len(shape) == 2:
        return f"; add the axis of channels: {_written((1, *shape))}"
    # (28, 28, 1) and (32, 32, 3) are images as matplotlib and Keras keep them.
    if len(shape) == 3 and shape[2] in (1, 3) and shape[0] > 3:
        return f"; put the channels first: {_written((shape[2], shape[0], shape[1]))}"
    if multiple > 1:
        return "; pad or crop the images" if len(shape) == 3 else ""
    return "; use MLP, which takes any shape"


def _written(shape: tuple[int, ...]) -> str:
    return str(tuple(shape))  # a torch.Size reads as a plain tuple
