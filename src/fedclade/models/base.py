"""Model specs: hyperparameters that build a torch module when the data's shape is known."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar, Protocol

from torch import Tensor, nn

from fedclade.errors import InvalidInputError, is_int, require, require_int


class ModelSpec(Protocol):
    """A model before the data's shape is known. Specs are frozen dataclasses. Their fields are the
    keys of `[model]` in an experiment file.

    `build` draws the initial weights from torch's global generator; seed it to get the same weights
    again. A module that runs under `torch.func.vmap(grad(...))` trains many clients in one step;
    any other trains client by client.
    """

    name: ClassVar[str]

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for some data.

        Args:
            shape: the shape of one sample, without a batch axis.
            classes: the number of outputs.
        """
        ...


def chain(**layers: nn.Module | None) -> nn.Sequential:
    """A sequence of layers with these names, without those that are None."""
    return nn.Sequential(
        OrderedDict((name, layer) for name, layer in layers.items() if layer is not None)
    )


class Centre(nn.Module):
    """Maps inputs from 0 … 1 to −1 … 1."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x - 1


def centre(wanted: bool) -> Centre | None:
    """A first layer that maps inputs from 0 … 1 to −1 … 1, or None if it is not wanted."""
    return Centre() if wanted else None


MNIST_MEAN, MNIST_STD = 0.1307, 0.3081  # of its pixels, which range from 0 to 1


class Standardize(nn.Module):
    """Maps inputs from 0 … 1 to (x − 0.1307) / 0.3081."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - MNIST_MEAN) / MNIST_STD


def standardize(wanted: bool) -> Standardize | None:
    """A first layer that standardizes pixels as those of MNIST, or None if it is not wanted."""
    return Standardize() if wanted else None


def dropout(share: float) -> nn.Dropout | None:
    """A dropout layer, or None if nothing is dropped: the layer would only cost random numbers."""
    return nn.Dropout(share) if share > 0 else None


def dropout2d(share: float) -> nn.Dropout2d | None:
    """Like `dropout`, for whole feature maps."""
    return nn.Dropout2d(share) if share > 0 else None


MAX_UNITS = 10**8


def check_dropout(share: object) -> None:
    ok = isinstance(share, int | float) and not isinstance(share, bool) and 0 <= share < 1
    require(
        ok,
        "model.dropout",
        share,
        "must be at least 0 and below 1; it is the share of units that are dropped",
    )


def check_classes(classes: object) -> None:
    require_int("classes", classes, 1, MAX_UNITS, "it is the number of outputs")


def check_sample(model: str, shape: tuple[int, ...]) -> None:
    """Raise `InvalidInputError` unless samples of `shape` have at least one feature."""
    if not shape or not all(is_int(side, 1, MAX_UNITS) for side in shape):
        raise InvalidInputError(
            f"{model} needs samples with at least one axis and no axis of length 0, such as (60,),"
            f" got {_as_text(shape)}.",
            "model",
        )


def check_image(model: str, shape: tuple[int, ...], least: int = 1, multiple: int = 1) -> None:
    """Raise `InvalidInputError` unless `shape` is that of an image.

    Args:
        model: the name of the model in the message.
        shape: must be (channels, height, width).
        least: the least height and width.
        multiple: height and width must be multiples of this number.
    """
    needs = f"{model} needs images (channels, height, width) of at least {least}x{least}"
    if multiple > 1:
        needs += f" with sides divisible by {multiple}"
    is_image = len(shape) == 3 and all(is_int(side, 1, MAX_UNITS) for side in shape)
    if not is_image or any(side < least or side % multiple for side in shape[1:]):
        raise InvalidInputError(
            f"{needs}, got {_as_text(shape)}{_remedy(shape, multiple)}.", "model"
        )


def _remedy(shape: tuple[int, ...], multiple: int) -> str:
    """What to do about a shape that a convolutional network cannot use."""
    if len(shape) == 2:
        return f"; add the axis of channels: {_as_text((1, *shape))}"
    # matplotlib and Keras have the channels last, as in (28, 28, 1) and (32, 32, 3).
    if len(shape) == 3 and shape[2] in (1, 3) and shape[0] > 3:
        return f"; put the channels first: {_as_text((shape[2], shape[0], shape[1]))}"
    if multiple > 1:
        return "; pad or crop the images" if len(shape) == 3 else ""
    return "; use MLP, which accepts any shape"


def _as_text(shape: tuple[int, ...]) -> str:
    return str(tuple(shape))  # a torch.Size is shown as a plain tuple
