"""FedPer: a shared body, and a head of its own for each client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedclade.methods.lg_fedavg import LGFedAvg


@dataclass(frozen=True)
class FedPer(LGFedAvg):
    """The base layers are shared and averaged as in FedAvg. The personalization layers stay with
    the client. A client trains both together.

    A client that never trained has the initial head, so its model is not better than chance. Give
    it a few local epochs first (`personal.layer`), or use FedRep.

    Args:
        local_layers: names of the layers (or parameters) that stay with the client: the paper's
            K_P layers. The default is the head, the last linear layer.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> method = fc.FedPer(local_layers=("fc2",))
        >>> result = fc.run(method, clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "fedper"
    title: ClassVar[str] = "FedPer: a shared body, and a head of its own for each client"
    paper: ClassVar[str] = (
        "Arivazhagan et al., Federated Learning with Personalization Layers, arXiv 1912.00818"
    )

    def _default_own(self) -> tuple[str, ...]:
        return self.local.objective.head_param_names()
