"""FedBN: each client keeps its own BatchNorm layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedclade.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg in which clients keep their BatchNorm layers: weight, bias and running statistics.
    It is FedAvg with `local.batch_norm = "own"`, which most other methods can have too.

    The layers are found by their type, not by their name. A client that never trained has the
    initial BatchNorm layers; the paper does not define new clients.

    Example:
        >>> import fedclade as fc
        >>> from torch import nn
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> model = nn.Sequential(
        ...     nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
        ... )
        >>> result = fc.run(fc.FedBN(), clients, model, rounds=2, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "fedbn"
    title: ClassVar[str] = "FedBN: FedAvg with BatchNorm layers of its own for each client"
    paper: ClassVar[str] = (
        "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization,"
        " ICLR 2021"
    )
    client_disclosure: ClassVar[str] = (
        "the trained weights without the BatchNorm layers, once a round; the server needs only"
        " their weighted sum"
    )
    own_batch_norm: ClassVar[bool] = True
