"""Convolutional classifiers of the papers: two or three convolutions, each with a 2x2 pooling, and
dense layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count, pairwise
from typing import ClassVar

from torch import nn

from fedclade.errors import is_int, require, require_int
from fedclade.models.base import (
    MAX_UNITS,
    centre,
    chain,
    check_classes,
    check_dropout,
    check_image,
    dropout,
    dropout2d,
    standardize,
)

_KERNEL = 5


@dataclass(frozen=True)
class LeafCNN:
    """The CNN of LEAF (arXiv 1812.01097) for FEMNIST, which FLT (arXiv 2103.15947) uses too.

    On (1, 28, 28) with padding 2, as in the code of both papers, it has 6,603,710 parameters for 62
    classes and 6,572,975 for 47. FLT prints 3,459,582, which is the number for `padding=0` on
    (3, 32, 32) with 62 classes.

    Args:
        padding: the padding of both convolutions, from 0 to 4; 2 keeps the size of the image.
        standardized: whether a first layer subtracts 0.1307 from inputs from 0 … 1 and divides them
            by 0.3081, the mean and the standard deviation of MNIST's pixels.
    """

    name: ClassVar[str] = "leaf_cnn"
    padding: int = 2
    standardized: bool = False

    def __post_init__(self) -> None:
        # With more than 4 the outermost outputs of a 5x5 kernel would depend only on padding.
        require_int("model.padding", self.padding, 0, _KERNEL - 1, "2 keeps the image's size")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        pixels = _pixels_left("LeafCNN", shape, self.padding)
        check_classes(classes)
        return chain(
            standardize=standardize(self.standardized),
            conv1=nn.Conv2d(shape[0], 32, _KERNEL, padding=self.padding),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, _KERNEL, padding=self.padding),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * pixels, 2048),
            relu3=nn.ReLU(),
            fc2=nn.Linear(2048, classes),
        )


@dataclass(frozen=True)
class SmallCNN:
    """FLT's small CNN for MNIST (arXiv 2103.15947, Scenarios 1 and 2).

    It has 21,840 parameters on (1, 28, 28) with 10 classes.

    Args:
        dropout: the share of feature maps that are dropped after the second convolution, and of
            units that are dropped before the last layer.
    """

    name: ClassVar[str] = "small_cnn"
    dropout: float = 0.5

    def __post_init__(self) -> None:
        check_dropout(self.dropout)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        pixels = _pixels_left("SmallCNN", shape)
        check_classes(classes)
        return chain(
            conv1=nn.Conv2d(shape[0], 10, _KERNEL),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(10, 20, _KERNEL),
            dropout1=dropout2d(self.dropout),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(20 * pixels, 50),
            relu3=nn.ReLU(),
            dropout2=dropout(self.dropout),
            fc2=nn.Linear(50, classes),
        )


@dataclass(frozen=True)
class LeNet5:
    """LeNet-5 with ReLU and max pooling, as in FLT and FLIS.

    FLT uses it for CIFAR-10 in Scenarios 1 and 2; FLIS calls it "simple-cnn". With 10 classes it
    has 62,006 parameters on (3, 32, 32) and 44,426 on (1, 28, 28).

    Args:
        centred: whether a first layer maps inputs from 0 … 1 to −1 … 1, as both papers do for
            CIFAR-10. Training is then several times faster.
    """

    name: ClassVar[str] = "lenet5"
    centred: bool = False

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        pixels = _pixels_left("LeNet5", shape)
        check_classes(classes)
        return chain(
            centre=centre(self.centred),
            conv1=nn.Conv2d(shape[0], 6, _KERNEL),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, _KERNEL),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * pixels, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            fc3=nn.Linear(84, classes),
        )


@dataclass(frozen=True)
class CflCNN:
    """A CNN of five layers for CIFAR-10, as in CFL (arXiv 1910.01991).

    It has 188,810 parameters on (3, 32, 32) with 10 classes. The paper does not describe the
    layers. fedclade uses 3x3 convolutions of 32, 64 and 64 maps, then 128 units.

    Args:
        centred: whether a first layer maps inputs from 0 … 1 to −1 … 1.
    """

    name: ClassVar[str] = "cfl_cnn"
    centred: bool = False

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        check_image("CflCNN", shape, least=8)
        check_classes(classes)
        return chain(
            centre=centre(self.centred),
            conv1=nn.Conv2d(shape[0], 32, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(64, 64, 3, padding=1),
            relu3=nn.ReLU(),
            pool3=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * (shape[1] // 8) * (shape[2] // 8), 128),
            relu4=nn.ReLU(),
            fc2=nn.Linear(128, classes),
        )


@dataclass(frozen=True)
class CNN:
    """Two 5x5 convolutions without padding, each with a 2x2 pooling, and dense layers.

    With the defaults it is the "4-layer CNN" of PFLlib's leaderboard, with 582,026 parameters on
    (1, 28, 28) with 10 classes. With 64 and 64 maps and 120 and 64 units it is that of FedRep's
    authors for CIFAR-10.

    Args:
        maps: the numbers of maps of the convolutions.
        hidden: the number of units of each hidden dense layer.
        centred: whether a first layer maps inputs from 0 … 1 to −1 … 1.
    """

    name: ClassVar[str] = "cnn"
    maps: tuple[int, int] = (32, 64)
    hidden: tuple[int, ...] = (512,)
    centred: bool = False

    def __post_init__(self) -> None:
        for field in ("maps", "hidden"):  # from an array in a TOML file; specs must be hashable
            object.__setattr__(self, field, tuple(getattr(self, field)))
        ok = len(self.maps) == 2 and all(is_int(maps, 1, MAX_UNITS) for maps in self.maps)
        require(ok, "model.maps", self.maps, "must be two whole numbers of at least 1")
        ok = len(self.hidden) > 0 and all(is_int(units, 1, MAX_UNITS) for units in self.hidden)
        require(ok, "model.hidden", self.hidden, "must be whole numbers of at least 1")

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        first, second = self.maps
        widths = (second * _pixels_left("CNN", shape), *self.hidden)
        check_classes(classes)
        dense: dict[str, nn.Module] = {}
        for number, (inputs, units) in enumerate(pairwise(widths), start=1):
            dense |= {f"fc{number}": nn.Linear(inputs, units), f"relu{number + 2}": nn.ReLU()}
        return chain(
            centre=centre(self.centred),
            conv1=nn.Conv2d(shape[0], first, _KERNEL),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(first, second, _KERNEL),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            **dense,
            **{f"fc{len(widths)}": nn.Linear(widths[-1], classes)},
        )


@dataclass(frozen=True)
class GmccCNN:
    """FedGMCC's CNN for EMNIST (arXiv 2204.11017), as in the authors' code.

    It has 486,654 parameters on (1, 28, 28) with 62 classes.

    Args:
        dropout: the share of units that are dropped after each pooling and before the last layer.
    """

    name: ClassVar[str] = "gmcc_cnn"
    dropout: float = 0.5

    def __post_init__(self) -> None:
        check_dropout(self.dropout)

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        check_image("GmccCNN", shape, least=4)
        check_classes(classes)
        return chain(
            conv1=nn.Conv2d(shape[0], 128, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            dropout1=dropout(self.dropout),
            conv2=nn.Conv2d(128, 64, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            dropout2=dropout(self.dropout),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * (shape[1] // 4) * (shape[2] // 4), 128),
            relu3=nn.ReLU(),
            dropout3=dropout(self.dropout),
            fc2=nn.Linear(128, classes),
        )


@dataclass(frozen=True)
class PflCNN:
    """The CNN of pfl-research's benchmark on CIFAR-10 (arXiv 2404.06430), with Glorot's initial
    weights.

    It has 1,626,442 parameters on (3, 32, 32) with 10 classes.

    Args:
        dropout: whether a quarter of the units after the pooling and half of those before the last
            layer are dropped.
    """

    name: ClassVar[str] = "pfl_cnn"
    dropout: bool = True

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        check_image("PflCNN", shape, least=6)
        check_classes(classes)
        side = [(length - 4) // 2 for length in shape[1:]]
        module = chain(
            conv1=nn.Conv2d(shape[0], 32, 3),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            dropout1=dropout(0.25 * self.dropout),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * side[0] * side[1], 128),
            relu3=nn.ReLU(),
            dropout2=dropout(0.5 * self.dropout),
            fc2=nn.Linear(128, classes),
        )
        for layer in module:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)
        return module


def _pixels_left(model: str, shape: tuple[int, ...], padding: int = 0) -> int:
    """The pixels of one feature map after two 5x5 convolutions and poolings. Raises an error for
    images that are too small.
    """
    least = next(side for side in count(1) if _side_left(side, padding) > 0)
    check_image(model, shape, least)
    return _side_left(shape[1], padding) * _side_left(shape[2], padding)


def _side_left(side: int, padding: int) -> int:
    for _ in range(2):
        if side > 0:
            side = (side + 2 * padding - _KERNEL + 1) // 2
    return max(side, 0)
