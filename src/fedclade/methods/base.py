"""What every method is: a frozen dataclass of hyper-parameters with pure functions from state to
state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import Field, dataclass, field, fields, replace
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    Self,
    TypeAlias,
    get_args,
    get_origin,
    get_type_hints,
)

from torch import Tensor
from typing_extensions import TypeVar

from fedclade.core.cost_expression import SYMBOLS
from fedclade.core.federation import Federation, ModelAssignment
from fedclade.core.local_training import LocalTraining
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree, nbytes
from fedclade.core.state import UNKNOWN, State
from fedclade.errors import FedcladeError, require
from fedclade.methods.requirements import INJECTED, is_injected

S = TypeVar("S", bound=State, default=Any)
"""The state of a method. `Method` without it is a method of any state."""

Needs: TypeAlias = Literal["nothing", "sum", "updates", "signatures", "probe"]
NEEDS: dict[Needs, str] = {
    "nothing": "nothing",
    "sum": "only the sum of what clients send, so secure aggregation fits",
    "updates": "each client's trained model in clear",
    "signatures": "each client's signature in clear",
    "probe": "each client's trained model in clear, which it runs on probe data",
}
Groups: TypeAlias = Literal["none", "given", "found", "told"]
COST_LEGEND = "; ".join(f"{letter}: {SYMBOLS[letter]}" for letter in "WKG") + "."
GROUPS: dict[Groups, str] = {
    "none": "makes none",
    "given": "must be given their number",
    "found": "finds their number",
    "told": "is told who is in which",
}


def hyperparameters(method: Method | type[Method]) -> list[Field[Any]]:
    """The fields that a user sets."""
    return [each for each in fields(method) if not is_injected(each)]


def check_choices(method: Method) -> None:
    """Refuse a value that is none of those its field's `Literal` lists."""
    hints = get_type_hints(type(method))
    for each in hyperparameters(method):
        kind, value = hints[each.name], getattr(method, each.name)
        if get_origin(kind) is Literal:
            require(
                value in get_args(kind),
                f"method.{each.name}",
                value,
                f"must be one of {', '.join(map(repr, get_args(kind)))}",
            )


@dataclass(frozen=True)
class Method(ABC, Generic[S]):
    """A method of federated learning. Its fields are its hyper-parameters; `run` binds the model,
    the loss and the local training.

    Subclasses say in class variables what `describe` and the docs tell about them.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    client_disclosure: ClassVar[str]  # what leaves a client, in words
    server_visibility: ClassVar[Needs]  # what the server must see of the clients
    groups: ClassVar[Groups] = "none"
    # Bytes that one client of a cohort sends and receives in a round, as expressions
    # (`core.cost_expression`), and what else is sent, as text.
    upload_cost: ClassVar[str] = "W"
    download_cost: ClassVar[str] = "W"
    extra_traffic: ClassVar[str] = ""
    # where it makes one model of several in a way of its own, which: there is no choice of
    # `run.average`
    custom_aggregation: ClassVar[str] = ""
    state: ClassVar[type[State]] = State

    local_config: LocalTraining | None = field(
        default=None, kw_only=True, repr=False, compare=False, metadata=INJECTED
    )

    def with_local_config(self, local: LocalTraining) -> Self:
        return replace(self, local_config=local)

    @property
    def local(self) -> LocalTraining:
        if self.local_config is None:
            raise FedcladeError(
                f"{type(self).__name__} is not bound to a model yet: use fc.run, or"
                " method.bind(LocalTraining(…))."
            )
        return self.local_config

    def initial_client_state(self, params: Tree) -> Tree:
        """What every client remembers before it has trained. Most methods need nothing."""
        return {}

    @abstractmethod
    def init(self, fed: Federation, params: Tree, key: int) -> S:
        """The state before the first round; one-off phases (signatures) happen here."""

    @abstractmethod
    def round(self, fed: Federation, state: S, cohort: Tensor, key: int) -> S:
        """One round with these clients. Who does not answer keeps what it had."""

    @abstractmethod
    def add_clients(self, fed: Federation, state: S, ids: Tensor, key: int) -> S:
        """Give a cluster to clients that were not there before."""

    def prepare_cohort(
        self, fed: Federation, state: S, cohort: Tensor, key: int
    ) -> tuple[S, Tensor]:
        """Before a round: who is not known is admitted, and who still is not cannot take part."""
        unknown = cohort[state.cluster_ids[cohort] == UNKNOWN]
        if len(unknown):
            state = self.add_clients(fed, state, unknown, key)
            cohort = cohort[state.cluster_ids[cohort] != UNKNOWN]
        return state, cohort

    def assign_models(self, state: S, ids: Tensor) -> ModelAssignment:
        """The model each client uses now."""
        return ModelAssignment(state.models, state.cluster_ids[ids])

    def personalization_program(self) -> AnyProgram | None:
        """What a client does on its own training data with the model it is served before it uses
        it; None: nothing.
        """
        return None

    def cost_symbols(self, state: State) -> dict[str, int]:
        """The values of the letters in `upload_cost` and `download_cost` now."""
        return {"W": nbytes(self.local.objective.params()), "K": len(state)}
