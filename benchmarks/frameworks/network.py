"""The network and its training, for the frameworks that use PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from worker import BATCH, LEARNING_RATE, NAMES


def layers_for(weights: Mapping[str, np.ndarray]) -> tuple[nn.Linear, nn.ReLU, nn.Linear]:
    (hidden, inputs), classes = weights["0.weight"].shape, len(weights["2.bias"])
    return nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes)


def fill(module: nn.Module, weights: Mapping[str, np.ndarray]) -> None:
    """Set the weights by position, because a module may use any names for its two layers."""
    module.load_state_dict(
        {
            own: torch.tensor(weights[name])
            for own, name in zip(module.state_dict(), NAMES, strict=True)
        }
    )


def weights_of(module: nn.Module) -> dict[str, np.ndarray]:
    return {
        name: value.detach().numpy()
        for name, value in zip(NAMES, module.state_dict().values(), strict=True)
    }


def train(module: nn.Module, x: Tensor, y: Tensor, learning_rate: float = LEARNING_RATE) -> None:
    """One epoch of a client, in plain PyTorch."""
    optimiser = torch.optim.SGD(module.parameters(), lr=learning_rate)
    order = torch.randperm(len(y))
    for batch_x, batch_y in zip(x[order].split(BATCH), y[order].split(BATCH), strict=True):
        optimiser.zero_grad()
        F.cross_entropy(module(batch_x), batch_y).backward()
        optimiser.step()
