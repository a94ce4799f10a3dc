"""Autoencoders, whose encoders compute FLT's signatures."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import ClassVar

from torch import Tensor, nn

from fedclade.errors import is_int, require, require_int
from fedclade.models.base import MAX_UNITS, chain, check_image, check_sample
from fedclade.models.resnet import Residual

_MAPS = 4  # feature maps of ConvAutoencoder's last convolution
_GROUPS = 8  # groups of ResidualAutoencoder's norms
_INNER = 32  # feature maps inside a residual layer


class Autoencoder(nn.Module):
    """An encoder and a decoder, as two modules, so that each can be called with its own parameters.

    Args:
        encoder: images -> codes.
        decoder: codes -> images.
    """

    pretrained: bool = False  # whether the weights were trained; False for random weights

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
    """The convolutional autoencoder of FLT (arXiv 2103.15947).

    It has 51,577 parameters on (1, 28, 28), as the paper prints. In the paper's table the last
    layer has 16 channels, but only one channel gives this number. The code has no activation.
    Images must be between 0 and 1. Their sides are halved twice, so they must be divisible by 4.

    Args:
        code: the length of a code.
    """

    name: ClassVar[str] = "conv_autoencoder"
    code: int = 128

    def __post_init__(self) -> None:
        require_int("model.code", self.code, 1, MAX_UNITS, "it is the length of the code")

    @staticmethod
    def features(shape: tuple[int, ...]) -> int:
        """The number of inputs of the code's layer, for images of `shape`."""
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
    """A residual autoencoder for color images, as in FLT's code (arXiv 2103.15947).

    FLT uses it for CIFAR. As in VQ-VAE (arXiv 1711.00937), the encoder has two strided convolutions
    to a quarter of the side and two residual layers of 32 inner maps. A linear layer without
    activation gives the code. The decoder mirrors the encoder with transposed convolutions.
    GroupNorm replaces FLT's BatchNorm, because running statistics cannot be assigned to a client.
    Images must be between 0 and 1, with sides divisible by 4.

    Args:
        hidden: the number of feature maps, a multiple of 16.
        code: the length of a code.
    """

    name: ClassVar[str] = "residual_autoencoder"
    hidden: int = 128
    code: int = 128

    def __post_init__(self) -> None:
        # The first convolution has half of the maps, and its norm divides them into 8 groups.
        ok = is_int(self.hidden, 1, MAX_UNITS) and self.hidden % (2 * _GROUPS) == 0
        require(
            ok,
            "model.hidden",
            self.hidden,
            f"must be a multiple of {2 * _GROUPS}; it is the number of feature maps",
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
    """A fully connected autoencoder with one hidden layer in each part.

    It is for vectors, and for images that `ConvAutoencoder` does not accept. FLT has none. As in
    FLT's convolutional autoencoder, the code has no activation. The output is linear, since vectors
    may hold any number.

    Args:
        hidden: the number of units of a hidden layer.
        code: the length of a code.
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
