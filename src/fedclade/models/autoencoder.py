"""The encoders FLT computes its signatures with."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch import Tensor, nn

from fedclade.errors import is_int, require, require_int
from fedclade.models.base import MAX_UNITS, chain, check_image, check_sample
from fedclade.models.resnet import Residual

_MAPS = 4  # feature maps of the last convolution
_GROUPS = 8  # of the residual one's norms
_INNER = 32  # feature maps inside a residual layer


class Autoencoder(nn.Module):
    """An encoder and a decoder, each a module of its own, so that either can be called alone with
    parameters of its own.

    `pretrained` tells whether the weights were trained on data, or are the random ones it was built
    with.
    """

    pretrained: bool = False

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def encode(self, x: Tensor) -> Tensor:
        """The codes of a batch: (batch, code)."""
        code: Tensor = self.encoder(x)
        return code

    def forward(self, x: Tensor) -> Tensor:
        """The reconstruction, in the shape of `x`."""
        image: Tensor = self.decoder(self.encode(x))
        return image


@dataclass(frozen=True)
class ConvAutoencoder:
    """The convolutional autoencoder of FLT (arXiv 2103.15947): 51,577 parameters on (1, 28, 28), as
    the paper prints.

    The paper's table gives the last layer 16 channels; only with one, the image's, does the count
    come out. The code has no activation. Images are to lie between 0 and 1. Sides are halved twice
    and doubled twice, hence divisible by 4.
    """

    name: ClassVar[str] = "conv_autoencoder"
    code: int = 128

    def __post_init__(self) -> None:
        require_int("model.code", self.code, 1, MAX_UNITS, "it is the length of the code")

    @staticmethod
    def features(shape: tuple[int, ...]) -> int:
        """How many numbers the convolutions hand on to the code."""
        return _MAPS * (shape[1] // 4) * (shape[2] // 4)

    def build(self, shape: tuple[int, ...], classes: int = 0) -> Autoencoder:
        """The module for images of `shape`. `classes` is ignored: an autoencoder has no labels."""
        check_image("ConvAutoencoder", shape, least=4, multiple=4)
        channels, height, width = shape
        small = (_MAPS, height // 4, width // 4)
        features = self.features(shape)
        encoder = chain(
            conv1=nn.Conv2d(channels, 16, 3, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, _MAPS, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc=nn.Linear(features, self.code),
        )
        decoder = chain(
            fc=nn.Linear(self.code, features),
            unflatten=nn.Unflatten(1, small),
            conv1=nn.ConvTranspose2d(_MAPS, 16, 2, stride=2),
            relu1=nn.ReLU(),
            conv2=nn.ConvTranspose2d(16, channels, 2, stride=2),
            sigmoid=nn.Sigmoid(),
        )
        return Autoencoder(encoder, decoder)


@dataclass(frozen=True)
class ResidualAutoencoder:
    """A residual autoencoder for colour images, in the form that FLT's code has for CIFAR (arXiv
    2103.15947).

    As in VQ-VAE (arXiv 1711.00937): two strided convolutions to a quarter of the side, `hidden`
    maps, two residual layers of 32 inner maps; then a linear code without activation. The decoder
    mirrors it with transposed convolutions. GroupNorm stands where FLT has BatchNorm: running
    statistics belong to no client. Images are to lie between 0 and 1, with sides divisible by 4.
    """

    name: ClassVar[str] = "residual_autoencoder"
    hidden: int = 128
    code: int = 128

    def __post_init__(self) -> None:
        # Half of the maps come out of the first convolution, and a norm cuts them into 8 groups.
        ok = is_int(self.hidden, 1, MAX_UNITS) and self.hidden % (2 * _GROUPS) == 0
        require(
            ok,
            "model.hidden",
            self.hidden,
            f"feature maps, a multiple of {2 * _GROUPS}; fewer are faster",
        )
        require_int("model.code", self.code, 1, MAX_UNITS, "it is the length of the code")

    def build(self, shape: tuple[int, ...], classes: int = 0) -> Autoencoder:
        """The module for images of `shape`. `classes` is ignored: an autoencoder has no labels."""
        check_image("ResidualAutoencoder", shape, least=4, multiple=4)
        channels, height, width = shape
        half, small = self.hidden // 2, (self.hidden, height // 4, width // 4)
        encoder = chain(
            conv1=nn.Conv2d(channels, half, 4, stride=2, padding=1),
            norm1=nn.GroupNorm(_GROUPS, half),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(half, self.hidden, 4, stride=2, padding=1),
            norm2=nn.GroupNorm(_GROUPS, self.hidden),
            relu2=nn.ReLU(),
            conv3=nn.Conv2d(self.hidden, self.hidden, 3, padding=1),
            residual1=self._residual(),
            residual2=self._residual(),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            fc=nn.Linear(prod(small), self.code),
        )
        decoder = chain(
            fc=nn.Linear(self.code, prod(small)),
            unflatten=nn.Unflatten(1, small),
            conv1=nn.Conv2d(self.hidden, self.hidden, 3, padding=1),
            residual1=self._residual(),
            residual2=self._residual(),
            relu1=nn.ReLU(),
            conv2=nn.ConvTranspose2d(self.hidden, half, 4, stride=2, padding=1),
            norm=nn.GroupNorm(_GROUPS, half),
            relu2=nn.ReLU(),
            conv3=nn.ConvTranspose2d(half, channels, 4, stride=2, padding=1),
            sigmoid=nn.Sigmoid(),
        )
        return Autoencoder(encoder, decoder)

    def _residual(self) -> nn.Module:
        body = chain(
            relu1=nn.ReLU(),
            conv1=nn.Conv2d(self.hidden, _INNER, 3, padding=1),
            norm1=nn.GroupNorm(_GROUPS, _INNER),
            relu2=nn.ReLU(),
            conv2=nn.Conv2d(_INNER, self.hidden, 1),
            norm2=nn.GroupNorm(_GROUPS, self.hidden),
        )
        return Residual(body)


@dataclass(frozen=True)
class DenseAutoencoder:
    """A fully connected autoencoder, one hidden layer on either side: for vectors, and for images
    that `ConvAutoencoder` does not take.

    FLT has none; ours follows its convolutional one, with no activation on the code. The output is
    linear: vectors may hold any number.
    """

    name: ClassVar[str] = "dense_autoencoder"
    hidden: int = 128
    code: int = 128

    def __post_init__(self) -> None:
        require_int("model.hidden", self.hidden, 1, MAX_UNITS)
        require_int("model.code", self.code, 1, MAX_UNITS, "it is the length of the code")

    def build(self, shape: tuple[int, ...], classes: int = 0) -> Autoencoder:
        """The module for samples of `shape`. `classes` is ignored: an autoencoder has no labels."""
        check_sample("DenseAutoencoder", shape)
        features = prod(shape)
        encoder = chain(
            flatten=nn.Flatten(),
            fc1=nn.Linear(features, self.hidden),
            relu=nn.ReLU(),
            fc2=nn.Linear(self.hidden, self.code),
        )
        decoder = chain(
            fc1=nn.Linear(self.code, self.hidden),
            relu=nn.ReLU(),
            fc2=nn.Linear(self.hidden, features),
            unflatten=nn.Unflatten(1, shape),
        )
        return Autoencoder(encoder, decoder)
