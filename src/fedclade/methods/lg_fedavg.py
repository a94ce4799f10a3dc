"""LG-FedAvg: each client has its own representation layers; all clients share one head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedclade.core.federation import Federation
from fedclade.core.local_sgd import sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.method_state import State
from fedclade.core.program import Program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, nbytes, strip_prefix
from fedclade.errors import InvalidInputError, require
from fedclade.methods.fedavg import FedAvg, fedavg_round


@serializable_program
def sgd_keeping(
    local: LocalTraining, own: tuple[str, ...], only: tuple[str, ...] | None = None
) -> Program:
    """`sgd`. The parameters named in `own` stay in the client's state; the reply has the others.

    Args:
        local: the objective and the settings of SGD.
        own: the names of the parameters that stay.
        only: the parameters to train; None for all.
    """

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        w = strip_prefix("w", carry)
        local_params = {name: w[name] for name in own}
        shared = {name: value for name, value in w.items() if name not in local_params}
        return shared, local_params or None

    return replace(sgd(local, only), finish=finish, name="sgd_keeping", rng_stream="sgd")


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """The representation layers are local: each client has its own, and they never leave it. The
    other layers are shared and averaged as in FedAvg. A client trains both together.

    Args:
        local_layers: names of the layers (or parameters) that stay with the client. The default is
            that of the paper: all but the last linear layer. An empty list is FedAvg. (The authors'
            CIFAR-10 code does the opposite: it shares the convolutions.)

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> method = fc.LGFedAvg(local_layers=("fc1",))
        >>> result = fc.run(method, clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "lg_fedavg"
    title: ClassVar[str] = "LG-FedAvg: local representations, one shared head"
    paper: ClassVar[str] = (
        "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global"
        " Representations, 2020"
    )
    client_disclosure: ClassVar[str] = (
        "the trained weights of the shared layers, once a round; the server needs only their"
        " weighted sum"
    )
    upload_cost: ClassVar[str] = "G"
    download_cost: ClassVar[str] = "G"

    local_layers: tuple[str, ...] | None = None

    def local_params(self) -> tuple[str, ...]:
        """The names of the parameters that stay with the client."""
        objective = self.local.objective
        if self.local_layers is None:
            return self._default_own()
        try:
            own = objective.param_names_under(self.local_layers)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"method.local_layers: {error}", "method.local_layers"
            ) from error
        require(
            len(own) < len(objective.names),
            "method.local_layers",
            self.local_layers,
            "must leave at least one layer to share",
        )
        return own

    def _default_own(self) -> tuple[str, ...]:
        """The parameters that stay with the client if `local_layers` is None."""
        head = self.local.objective.head_param_names()
        return tuple(name for name in self.local.objective.names if name not in head)

    def shared_params(self) -> tuple[str, ...]:
        """The names of the parameters that the server averages."""
        own = self.local_params()
        return tuple(name for name in self.local.objective.names if name not in own)

    def initial_client_state(self, params: Tree) -> Tree:
        return {name: params[name] for name in self.local_params()}

    def init(self, fed: Federation, params: Tree, key: int) -> State:
        own = self.local_params()
        return super().init(
            fed, {name: value for name, value in params.items() if name not in own}, key
        )

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        own = self.local_params()
        return fedavg_round(fed, sgd_keeping(self.local, own), state, cohort, key, own)

    def cost_symbols(self, state: State) -> dict[str, int]:
        return super().cost_symbols(state) | {"G": nbytes(state.models)}
