"""Which shard has which clients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placement:
    """The shard of each client, which never changes in a run: the client's state is there.

    Args:
        shard: (clients,) the shard of each client.
        place: (clients,) the number of each client in its shard.
    """

    shard: Tensor
    place: Tensor

    def ids_of(self, shard: int) -> Tensor:
        """The clients of a shard, in the order of their places."""
        return torch.nonzero(self.shard == shard).flatten()


def place_clients(sizes: Tensor, shards: int) -> Placement:
    """Shards with about the same number of clients and of samples: the clients, by descending size,
    are dealt to the shards forwards and backwards in turns.

    Args:
        sizes: (clients,) the number of training samples of each client.
        shards: the number of shards.
    """
    order = sizes.argsort(descending=True, stable=True)
    turn = torch.arange(len(sizes)) % (2 * shards)
    shard = torch.empty_like(order)
    shard[order] = torch.minimum(turn, 2 * shards - 1 - turn)
    place = torch.empty_like(order)
    for number in range(shards):
        ids = torch.nonzero(shard == number).flatten()
        place[ids] = torch.arange(len(ids))
    return Placement(shard, place)
