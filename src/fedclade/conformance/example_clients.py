"""The small federations on which methods are checked."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from fedclade.data import Clients, LabelClusters, RaggedIndex, from_arrays, load, partition

SIZES = (5, 1, 40, 2, 23, 11)


def ragged_clients() -> Clients:
    """Six clients with 1 to 40 samples of 6 numbers and three classes; some have one class only.
    They have no test samples. The probe has 30 inputs.
    """
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for client, size in enumerate(SIZES):
        y = (
            torch.full((size,), client % 3)
            if client % 2
            else torch.randint(0, 3, (size,), generator=generator)
        )
        pairs.append((torch.randn(size, 6, generator=generator), y))
    return replace(from_arrays(pairs), probe=torch.randn(30, 6, generator=generator))


@lru_cache(maxsize=1)
def small_digits() -> Clients:
    """Twenty clients in five true groups, with 12 training samples each."""
    scheme = LabelClusters(clusters=5, classes=2, samples=12)
    return partition(load("digits"), scheme, clients=20, seed=0, probe=None)


def first_clients(clients: Clients, count: int) -> Clients:
    """The first `count` clients, without validation data. The other clients join later."""
    end = int(clients.train.offsets[count])
    return replace(
        clients,
        train=RaggedIndex(clients.train.index[:end], clients.train.offsets[: count + 1]),
        test_part_id=clients.test_part_id[:count],
        validation=None,
        later=None,
    )
