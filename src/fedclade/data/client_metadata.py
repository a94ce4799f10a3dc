"""What is known of the clients of a federation without their data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedclade.data.federated_dataset import Clients

_FEW = 2  # samples on which a model is tried before a run


@dataclass(frozen=True, eq=False)
class ClientMetadata:
    """How much each client holds, and of what kind it is: all that a run needs to know of them
    beside their answers.
    """

    sizes: Tensor  # (clients,) training examples
    test_sizes: Tensor  # (clients,) test examples
    # the different ones among these: a sample may be in several clients' test parts
    test_samples: int
    x: Tensor  # a few inputs of this kind
    y: Tensor  # a few targets
    classes: int | None = None  # None: the targets are not class labels
    groups: Tensor | None = None  # (clients,) the true group of each, where it is known
    probe: Tensor | None = None  # inputs that the server has
    dataset: str = "arrays"
    partition: str = "arrays"
    origin: dict[str, Any] = field(
        default_factory=dict
    )  # what an experiment file would say of the partition

    @staticmethod
    def of(clients: Clients) -> ClientMetadata:
        return ClientMetadata(
            clients.sizes,
            clients.test_sizes,
            _distinct_test_samples(clients),
            clients.x[:_FEW],
            clients.y[:_FEW],
            clients.classes,
            clients.groups,
            clients.probe,
            clients.dataset,
            clients.partition,
            {"clients": len(clients), **clients.origin},
        )

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.x.shape[1:])


def _distinct_test_samples(clients: Clients) -> int:
    """How many different samples the clients are tested on; a rotated or relabelled copy is the
    same sample.
    """
    used = torch.zeros(len(clients.test), dtype=torch.bool)
    used[clients.test_part_id[clients.test_part_id >= 0]] = True
    rows = clients.test.index[used.repeat_interleave(clients.test.sizes)]
    return len(torch.unique(clients.test_sample_id[rows]))
