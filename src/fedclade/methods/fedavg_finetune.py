"""FedAvg, and each client fine-tunes the shared model before it uses it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedclade.core.program import AnyProgram
from fedclade.errors import require, require_int
from fedclade.methods.fedavg import FedAvg
from fedclade.programs.fine_tune import fine_tune


@dataclass(frozen=True)
class FedAvgFineTune(FedAvg):
    """FedAvg. Before it uses the shared model w, client i trains it for F epochs on its own data,
    to w_i, and uses (1 - α_i) w + α_i w_i.

    By default each client chooses α_i from 0, ¼, ½, ¾, 1: it fine-tunes on four fifths of its
    training samples and takes the α with the least loss on the last fifth; then it fine-tunes on
    all of them. Fine-tuning alone (α = 1) hurts clients with few samples; a client with fewer than
    five samples uses w. A client that never trained does the same.

    Args:
        fine_tune_epochs: F.
        alpha: α_i for all clients; None: each client chooses it.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> method = fc.FedAvgFineTune(fine_tune_epochs=1)
        >>> result = fc.run(method, clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "fedavg_finetune"
    title: ClassVar[str] = "FedAvg, and each client fine-tunes the shared model"
    paper: ClassVar[str] = (
        "Cheng, Chadha and Duchi, Fine-tuning is Fine in Federated Learning, arXiv 2108.07313"
    )
    no_guarded_layer: ClassVar[str] = "has such a layer itself; use fedavg"

    fine_tune_epochs: int = 5
    alpha: float | None = None

    def __post_init__(self) -> None:
        require_int("method.fine_tune_epochs", self.fine_tune_epochs, 1)
        require(
            self.alpha is None or 0 <= self.alpha <= 1,
            "method.alpha",
            self.alpha,
            "must be from 0 to 1; leave it out so that clients choose it",
        )

    def personalization_program(self) -> AnyProgram:
        return fine_tune(replace(self.local, epochs=self.fine_tune_epochs, steps=0), self.alpha)
