"""Clients that are evaluated on a part of their training data: for choices before a run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedclade.data.federated_dataset import Clients, RaggedIndex

HELD_OUT = 0.2


def held_out(clients: Clients, seed: int) -> Clients:
    """A fifth of each client's training data becomes its test part. Clients with fewer than three
    samples have no test part.

    Args:
        clients: the clients; their test data are left out.
        seed: the seed of the choice.
    """
    rng = np.random.default_rng([seed, len(clients)])
    train, test = [], []
    for client in range(len(clients)):
        rows = clients.train[client]
        rows = rows[torch.from_numpy(rng.permutation(len(rows)))]
        count = max(1, round(HELD_OUT * len(rows))) if len(rows) > 2 else 0
        test.append(rows[:count])
        train.append(rows[count:])
    test_part_id = torch.tensor([client if len(rows) else -1 for client, rows in enumerate(test)])
    return replace(
        clients,
        train=RaggedIndex.of(train),
        x_test=clients.x,
        y_test=clients.y,
        test=RaggedIndex.of(test),
        test_part_id=test_part_id,
        test_sample_id=torch.arange(len(clients.y)),
    )
