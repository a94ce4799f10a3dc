"""LG-FedAvg: every client has its own representation, all share one head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from torch import Tensor

from fedclade.core.federation import Federation, Rows
from fedclade.core.program import Finish, LocalTraining, Program, sgd
from fedclade.core.pytree import Tree, nbytes, under
from fedclade.core.recipes import travels
from fedclade.errors import InvalidInput, check
from fedclade.methods.base import State
from fedclade.methods.fedavg import FedAvg, averaged


@travels
def sgd_keeping(local: LocalTraining, own: tuple[str, ...]) -> Program:
    """`sgd` after which the parameters named in `own` stay in the client's memory and the others are sent."""
    return replace(sgd(local), finish=_keeping(own), name="sgd_keeping", draws_as="sgd")


@lru_cache(maxsize=32)
def _keeping(own: tuple[str, ...]) -> Finish:
    def finish(shared: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        w = under("w", carry)
        kept = {name: w[name] for name in own}
        return {name: value for name, value in w.items() if name not in kept}, kept or None

    return finish


@dataclass(frozen=True)
class LGFedAvg(FedAvg):
    """The layers that make the representation are each client's own and never leave it; the others are shared and averaged as in FedAvg.
    A client trains both together, from its own layers and the shared ones.

    local_layers: names of the layers (or parameters) that stay with the client. By default, as in the paper, all but the last linear
    layer; an empty list is FedAvg. (The authors' CIFAR-10 code has it the other way round: there the convolutions are shared.)
    """

    name: ClassVar[str] = "lg_fedavg"
    title: ClassVar[str] = "LG-FedAvg: local representations, one shared head"
    paper: ClassVar[str] = "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020"
    leaves: ClassVar[str] = "the trained weights of the shared layers, once a round; only their weighted sum is needed"
    up: ClassVar[str] = "G"
    down: ClassVar[str] = "G"

    local_layers: tuple[str, ...] | None = None

    @property
    def own(self) -> tuple[str, ...]:
        """The parameters that stay with the client."""
        objective = self.local.objective
        if self.local_layers is None:
            head = objective.head()
            return tuple(name for name in objective.names if name not in head)
        try:
            own = objective.names_under(self.local_layers)
        except InvalidInput as error:
            raise InvalidInput(f"method.local_layers: {error}") from error
        check(len(own) < len(objective.names), "method.local_layers", self.local_layers, "must leave a layer to be shared")
        return own

    def memory0(self, params: Tree) -> Tree:
        return {name: params[name] for name in self.own}

    def init(self, fed: Federation, params: Tree, key: int) -> State:
        own = self.own
        return super().init(fed, {name: value for name, value in params.items() if name not in own}, key)

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        return averaged(fed, sgd_keeping(self.local, self.own), state, cohort, key, self.own)

    def serve(self, state: State, ids: Tensor) -> Rows:
        return Rows(state.models, state.cluster[ids], own=self.own)

    def symbols(self, state: State) -> dict[str, int]:
        return super().symbols(state) | {"G": nbytes(state.models)}
