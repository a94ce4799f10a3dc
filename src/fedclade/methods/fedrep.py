"""FedRep: each client trains its own head first, then the shared body."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fedclade.core.federation import Federation
from fedclade.core.local_sgd import chain_training, sgd
from fedclade.core.method_state import State
from fedclade.core.program import Program
from fedclade.errors import require_int
from fedclade.methods.base import check_choices
from fedclade.methods.fedavg import fedavg_round
from fedclade.methods.fedper import FedPer
from fedclade.methods.lg_fedavg import sgd_keeping


@dataclass(frozen=True)
class FedRep(FedPer):
    """Each round a client trains its own head h_i for τ_h epochs with the body φ fixed, then the
    body for τ_φ epochs (`local.epochs`) with the head fixed. The new body is the mean of the
    clients' bodies, with equal weights as in the paper, or weighted by examples as in the authors'
    code (`weights = "examples"`).

    Before it uses its model, a client trains its head on the current body. So a client that joins
    late, or never trained, has a head too; the body does not change. The authors do this once at
    the end.

    Args:
        local_layers: names of the layers (or parameters) of the client's head h_i. The default is
            the last linear layer.
        head_epochs: τ_h.
        final_head_epochs: the epochs of the head before the model is used; 0 for none. The
            authors' code has max(10, τ_h).
        weights: the weights of the mean of the bodies: "clients" or "examples".

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.FedRep(head_epochs=2), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep: a shared body, and heads that clients train first"
    paper: ClassVar[str] = (
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning,"
        " ICML 2021"
    )

    head_epochs: int = 10
    final_head_epochs: int = 10
    weights: Literal["examples", "clients"] = "clients"

    def __post_init__(self) -> None:
        check_choices(self)
        require_int("method.head_epochs", self.head_epochs, 1)
        require_int("method.final_head_epochs", self.final_head_epochs, 0)

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        own = self.local_params()
        train = chain_training(
            self._train_head(self.head_epochs), sgd_keeping(self.local, own, self.shared_params())
        )
        return fedavg_round(fed, train, state, cohort, key, own, self.weights)

    def personalization_program(self) -> Program | None:
        return self._train_head(self.final_head_epochs) if self.final_head_epochs else None

    def _train_head(self, epochs: int) -> Program:
        return sgd(replace(self.local, epochs=epochs, steps=0), self.local_params(), stream="head")
