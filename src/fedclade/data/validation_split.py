"""The part of a client's training data that becomes its validation data."""

from __future__ import annotations

import numpy as np
import torch
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
    rank = client_keys(fold_in(seed, "validation"), np.arange(size))
    order = np.lexsort((rank, labels.numpy()))
    places = ((np.arange(count) + 0.5) * size / max(1, count)).astype(np.int64)
    return torch.from_numpy(np.sort(order[places]))
