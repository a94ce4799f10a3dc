"""The part of a client's training data that becomes its validation data."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core.rng import client_keys, fold_in


def validation_positions(labels: Tensor, share: float, seed: int) -> Tensor:
    """The positions of a client's training examples that become validation data, in order.

    They depend only on the client's own labels and on the seed, so that a client on another machine
    makes the same split. Every class has about the same share of them: the examples are sorted by
    class, at random within a class, and taken at equal distances.

    Args:
        labels: (examples,) the class of each example; all the same where there are no classes.
        share: the share of the examples. A client with fewer than 1 / share has none.
        seed: the seed of the split.
    """
    size = len(labels)
    count = int(share * size + 1e-9)  # 0.29 · 100 is slightly less than 29
    # The hash is a bijection: no two ranks are equal, so every sorting algorithm gives one order.
    order = np.argsort(client_keys(fold_in(seed, "validation"), np.arange(size)))
    order = order[stable_order(labels.numpy()[order])]
    places = ((np.arange(count) + 0.5) * size / max(1, count)).astype(np.int64)
    return torch.from_numpy(np.sort(order[places]))


def stable_order(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order that sorts whole numbers; equal ones stay in their order.

    Args:
        values: (values,) the numbers.
    """
    small = len(values) > 0 and values.min() >= 0 and values.max() < 1 << 16
    # numpy sorts 16 bits ten times as fast.
    return np.argsort(values.astype(np.uint16) if small else values, kind="stable")
