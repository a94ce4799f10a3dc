"""The network of pfl's benchmark on CIFAR-10 and its evaluation, for the peers, which use torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

EVALUATED_AT_ONCE = 2_000


class ChannelsFirst(nn.Module):
    """Images (examples, height, width, channels) as torch's layers take them."""

    def forward(self, images: Tensor) -> Tensor:
        return images.permute(0, 3, 1, 2)


def layers() -> list[nn.Module]:
    return [
        ChannelsFirst(),
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    ]


def fill(module: nn.Module, weights: Sequence[Any]) -> None:
    """Set the weights by position."""
    with torch.no_grad():
        for value, weight in zip(module.parameters(), weights, strict=True):
            value.copy_(torch.tensor(weight))


def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    """The accuracy on these images, in percent."""
    module.eval()
    with torch.no_grad():
        correct = sum(
            int((module(images).argmax(1) == labels).sum())
            for images, labels in zip(
                x.split(EVALUATED_AT_ONCE), y.split(EVALUATED_AT_ONCE), strict=True
            )
        )
    return 100 * correct / len(y)


class Snapshots:
    """The weights after some rounds, which are evaluated when all rounds are done."""

    def __init__(self) -> None:
        self._weights: dict[int, list[Tensor]] = {}

    def take(self, number: int, weights: Mapping[str, Tensor]) -> None:
        self._weights[number] = [value.detach().clone() for value in weights.values()]

    def evaluated(self, module: nn.Module, x: Tensor, y: Tensor) -> dict[int, float]:
        """The accuracy after each of these rounds."""
        found = {}
        for number, weights in self._weights.items():
            fill(module, [value.cpu().numpy() for value in weights])
            found[number] = accuracy(module, x, y)
        return found
