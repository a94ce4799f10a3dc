"""Residual networks with GroupNorm instead of BatchNorm: running statistics cannot be assigned to a
client or averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fedclade.models.base import chain, check_classes, check_image

_GROUPS = 32


class Residual(nn.Module):
    """x + body(x)."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = x + self.body(x)
        return total


@dataclass(frozen=True)
class ResNet9:
    """ResNet-9, FLIS's network for CIFAR-100 (arXiv 2208.09754).

    It has 6,621,540 parameters on (3, 32, 32) with 100 classes: eight 3x3 convolutions with biases
    and 64 to 512 maps, two pairs of them in residual blocks, and a dense layer. Each norm has 32
    groups. The last pooling takes the maximum of each map, so images may have other sizes than
    32x32.
    """

    name: ClassVar[str] = "resnet9"

    def build(self, shape: tuple[int, ...], classes: int) -> nn.Module:
        """The module for samples of `shape` (without a batch axis) and `classes` outputs."""
        check_image("ResNet9", shape, least=8)
        check_classes(classes)
        return chain(
            block1=_block(shape[0], 64),
            block2=_block(64, 128, pool=2),
            residual1=Residual(chain(block1=_block(128, 128), block2=_block(128, 128))),
            block3=_block(128, 256, pool=2),
            block4=_block(256, 512, pool=2),
            residual2=Residual(chain(block1=_block(512, 512), block2=_block(512, 512))),
            pool=nn.MaxPool2d((shape[1] // 8, shape[2] // 8)),
            flatten=nn.Flatten(),
            fc=nn.Linear(512, classes),
        )


def _block(channels: int, maps: int, pool: int = 1) -> nn.Module:
    return chain(
        conv=nn.Conv2d(channels, maps, 3, padding=1),
        norm=nn.GroupNorm(_GROUPS, maps),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(pool) if pool > 1 else None,
    )
