"""FedBABU: the body is trained with a head that never changes; clients fine-tune at the end."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fedclade.core.federation import Federation
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import State
from fedclade.core.program import Program
from fedclade.errors import require_int
from fedclade.methods.base import check_choices
from fedclade.methods.fedavg import fedavg_round
from fedclade.methods.fedper import FedPer
from fedclade.methods.lg_fedavg import sgd_keeping


@dataclass(frozen=True)
class FedBABU(FedPer):
    """Body aggregation, body update: all clients have the same random head, which is never trained
    and never sent. They train the body, and the server averages it as in FedAvg. A client
    fine-tunes its model on its data before it uses it; a client that never trained does the same.

    Args:
        local_layers: names of the layers (or parameters) of the head. The default is the last
            linear layer.
        fine_tune: what clients fine-tune: the whole model, or only the head.
        fine_tune_epochs: the epochs of fine-tuning.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> method = fc.FedBABU(fine_tune_epochs=1)
        >>> result = fc.run(method, clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "fedbabu"
    title: ClassVar[str] = "FedBABU: a body trained with a fixed head, then fine-tuning"
    paper: ClassVar[str] = (
        "Oh, Kim and Yun, FedBABU: Toward Enhanced Representation for Federated Image"
        " Classification, ICLR 2022"
    )
    no_guarded_layer: ClassVar[str] = "fine-tunes its model on all samples of a client"

    fine_tune: Literal["all", "head"] = "all"
    fine_tune_epochs: int = 10

    def __post_init__(self) -> None:
        check_choices(self)
        require_int("method.fine_tune_epochs", self.fine_tune_epochs, 1)

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        own = self.local_params()
        train = sgd_keeping(self.local, own, self.shared_params())
        return fedavg_round(fed, train, state, cohort, key, own)

    def personalization_program(self) -> Program:
        only = self.local_params() if self.fine_tune == "head" else None
        return sgd(
            replace(self.local, epochs=self.fine_tune_epochs, steps=0), only, stream="fine_tune"
        )
