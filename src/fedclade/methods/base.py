"""The base class of methods: a frozen dataclass of hyper-parameters with pure functions from state
to state.
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

from fedclade.core.cost_formula import SYMBOLS
from fedclade.core.federation import Federation, ModelAssignment
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree, nbytes
from fedclade.errors import FedcladeError, require
from fedclade.methods.required_context import INJECTED, is_injected

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
Groups: TypeAlias = Literal["none", "given", "found", "known"]
COST_LEGEND = "; ".join(f"{letter}: {SYMBOLS[letter]}" for letter in "WKG") + "."
GROUPS: dict[Groups, str] = {
    "none": "makes none",
    "given": "must be given their number",
    "found": "finds their number",
    "known": "gets the true groups",
}


def hyperparameters(method: Method | type[Method]) -> list[Field[Any]]:
    """The fields that a user sets."""
    return [each for each in fields(method) if not is_injected(each)]


def check_choices(method: Method) -> None:
    """Raise `InvalidInputError` for a value that is not in its field's `Literal`."""
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
    """A method of federated learning. Its fields are its hyper-parameters; `run` sets the model,
    the loss and the local training.

    `fedclade describe` and the docs show the class variables. `Method[S]` is a method whose state
    has the type S.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    client_disclosure: ClassVar[str]  # what leaves a client, as text
    server_visibility: ClassVar[Needs]  # what the server must see
    groups: ClassVar[Groups] = "none"
    # Bytes that one client of a cohort sends and receives in a round, as expressions
    # (`core.cost_formula`), and what else is sent, as text.
    upload_cost: ClassVar[str] = "W"
    download_cost: ClassVar[str] = "W"
    extra_traffic: ClassVar[str] = ""
    # the method's own aggregation, as text; then `server.aggregator` cannot be set
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
                f"{type(self).__name__} has no model yet: use fc.run, or"
                " method.with_local_config(LocalTraining(…))."
            )
        return self.local_config

    def initial_client_state(self, params: Tree) -> Tree:
        """The state of every client before it trains. Most methods need none."""
        return {}

    @abstractmethod
    def init(self, fed: Federation, params: Tree, key: int) -> S:
        """The state before the first round. One-off phases (signatures) run here."""

    @abstractmethod
    def round(self, fed: Federation, state: S, cohort: Tensor, key: int) -> S:
        """One round with these clients. Clients that do not reply keep their state."""

    @abstractmethod
    def add_clients(self, fed: Federation, state: S, ids: Tensor, key: int) -> S:
        """Assign a cluster to clients that have none."""

    def prepare_cohort(
        self, fed: Federation, state: S, cohort: Tensor, key: int
    ) -> tuple[S, Tensor]:
        """Assign clusters to unassigned clients before a round; drop those that remain
        unassigned.
        """
        unknown = cohort[state.cluster_ids[cohort] == UNKNOWN]
        if len(unknown):
            state = self.add_clients(fed, state, unknown, key)
            cohort = cohort[state.cluster_ids[cohort] != UNKNOWN]
        return state, cohort

    def assign_models(self, state: S, ids: Tensor) -> ModelAssignment:
        """The model that each client uses now."""
        return ModelAssignment(state.models, state.cluster_ids[ids])

    def personalization_program(self) -> AnyProgram | None:
        """The program by which a client adapts its model on its training data before it uses it;
        None if it does not.
        """
        return None

    def cost_symbols(self, state: State) -> dict[str, int]:
        """The values of the letters in `upload_cost` and `download_cost` now."""
        return {"W": nbytes(self.local.objective.params()), "K": len(state)}
