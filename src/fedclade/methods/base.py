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

from torch import Tensor, nn
from typing_extensions import TypeVar

from fedclade.core.cost_formula import SYMBOLS
from fedclade.core.federation import Federation, ModelAssignment, ServerOptimizer
from fedclade.core.functional_model import Objective
from fedclade.core.inputs import Inputs
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.losses import cross_entropy
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.notebook_html import html_table
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree, nbytes, tree_index
from fedclade.core.torch_loss import TorchLoss
from fedclade.errors import FedcladeError, InvalidInputError, require
from fedclade.methods.required_context import INJECTED, is_injected

S = TypeVar("S", bound=State, default=Any)
"""The state of a method. `Method` without it is a method of any state."""

Needs: TypeAlias = Literal["nothing", "sum", "updates", "signatures", "probe"]
NEEDS: dict[Needs, str] = {
    "nothing": "nothing",
    "sum": "only the sum of the clients' replies, so secure aggregation is possible",
    "updates": "each client's trained model in clear",
    "signatures": "each client's signature in clear",
    "probe": "each client's trained model in clear, which it runs on probe data",
}
NO_SECURE_SUM: dict[Needs, str] = {
    "nothing": "sends nothing, so there is nothing to hide; leave privacy.secure_sum out",
    "updates": "compares the models of single clients; use clade_groups or ifca",
    "probe": "runs the models of single clients on probe data; use clade_groups or ifca",
}
"""Why the server cannot do with sums."""
NO_CLIENT_PRIVACY: dict[Needs, str] = {
    "nothing": "sends nothing, so it needs no noise; leave privacy.epsilon out",
    "sum": "",
    "updates": "needs the model of each client; use clade_groups with method.signature_epsilon, or"
    " ifca",
    "signatures": "sends what it groups clients by without noise; use clade_groups with"
    " method.signature_epsilon, or ifca",
    "probe": "needs the model of each client; use clade_groups with method.signature_epsilon, or"
    " ifca",
}
"""Why training cannot be differentially private for whole clients."""
Groups: TypeAlias = Literal["none", "given", "found", "known"]
COST_LEGEND = "; ".join(f"{letter}: {SYMBOLS[letter]}" for letter in "WKGV") + "."
LayerName: TypeAlias = Literal["none", "finetune", "interpolate", "knn", "auto"]
GROUPS: dict[Groups, str] = {
    "none": "makes none",
    "given": "needs their number",
    "found": "finds their number",
    "known": "gets the true groups",
}


def hyperparameters(method: Method | type[Method]) -> list[Field[Any]]:
    """The fields that a user sets."""
    return [parameter for parameter in fields(method) if not is_injected(parameter)]


def check_choices(method: Method) -> None:
    """Raise `InvalidInputError` for a value that is not in its field's `Literal`."""
    hints = get_type_hints(type(method))
    for parameter in hyperparameters(method):
        kind, value = hints[parameter.name], getattr(method, parameter.name)
        if get_origin(kind) is Literal:
            require(
                value in get_args(kind),
                f"method.{parameter.name}",
                value,
                f"must be one of {', '.join(map(repr, get_args(kind)))}",
            )


def is_classification(objective: Objective) -> bool:
    """Whether the loss is cross-entropy, so that the outputs of a model give the probabilities of
    classes.
    """
    loss = objective.example_loss
    is_torch = isinstance(loss, TorchLoss) and isinstance(loss.module, nn.CrossEntropyLoss)
    return loss is cross_entropy or is_torch


def require_class_labels(
    objective: Objective, method: str, why: str = "mixes the probabilities of classes"
) -> None:
    """Raise `InvalidInputError` unless `is_classification`.

    Args:
        objective: the model and its loss.
        method: the name of the method.
        why: what the method does with classes.
    """
    if not is_classification(objective):
        raise InvalidInputError(
            f"local.loss: method {method} {why}, so it needs the loss 'cross_entropy'. Use another"
            " method.",
            "local.loss",
        )


@dataclass(frozen=True)
class Method(ABC, Generic[S]):
    """A method of federated learning: a frozen dataclass. Its fields are its hyper-parameters.
    `fc.run` sets the model, the loss and the local training.

    Subclasses define `init`, `round` and `add_clients`. docs/extend.md builds one. `Method[S]` is a
    method whose state has the type S.

    `fedclade describe` and the docs show the class variables:

    - name: the name in experiment files; `fc.register` sets it.
    - title: the method in one line.
    - paper: the source.
    - client_disclosure: what leaves a client, as text.
    - server_visibility: what the server must see.
    - groups: whether the number of groups is given or found.
    - upload_cost, download_cost: the bytes that one client of a cohort sends and receives in a
      round, as expressions (`core.cost_formula`).
    - extra_traffic: what else is sent, as text.
    - custom_aggregation: the method's own aggregation, as text. If it is set, `server.aggregator`
      must be "mean".
    - state: the class of the state.

    Example:
        >>> import fedclade as fc
        >>> method = fc.IFCA(clusters=3)
        >>> method.groups
        'given'
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    client_disclosure: ClassVar[str]
    server_visibility: ClassVar[Needs]
    groups: ClassVar[Groups] = "none"
    upload_cost: ClassVar[str] = "W"
    download_cost: ClassVar[str] = "W"
    extra_traffic: ClassVar[str] = ""
    custom_aggregation: ClassVar[str] = ""
    # the optimizer of the server, and whether it serves means over rounds, unless the user sets
    # them
    server_optimizer: ClassVar[ServerOptimizer] = "fedavg"
    serves_mean: ClassVar[bool] = False
    # why the server cannot use an optimizer or serve means over rounds, as text
    no_server_optimizer: ClassVar[str] = ""
    # why clients must train by SGD, as text; then `local.optimizer` cannot be set
    needs_sgd: ClassVar[str] = ""
    # the personal layer, unless the user sets one
    personal_layer: ClassVar[LayerName] = "none"
    # why clients cannot have a personal layer whose strength they choose, as text
    no_guarded_layer: ClassVar[str] = ""
    # whether clients keep their BatchNorm layers, as with local.batch_norm = "own"
    own_batch_norm: ClassVar[bool] = False
    # why the server cannot do with sums, as text, if `server_visibility` does not say it
    no_secure_sum: ClassVar[str] = ""
    # the names of programs whose replies differential privacy of training does not cover
    without_noise: ClassVar[tuple[str, ...]] = ()
    state: ClassVar[type[State]] = State

    local_config: LocalTraining | None = field(
        default=None, kw_only=True, repr=False, compare=False, metadata=INJECTED
    )

    def with_local_config(self, local: LocalTraining) -> Self:
        """The method with this model, loss and local training. `fc.run` calls it in every round."""
        return replace(self, local_config=local)

    @property
    def local(self) -> LocalTraining:
        """The model, the loss and the local training of this round."""
        if self.local_config is None:
            raise FedcladeError(
                f"method: {type(self).__name__} has no model. Use fc.run, or"
                " method.with_local_config(LocalTraining(…)).",
                "method",
            )
        return self.local_config

    def why_no_own_batch_norm(self) -> str:
        """Why clients cannot keep their own BatchNorm layers, as text; "" if they can."""
        return ""

    def why_no_secure_sum(self) -> str:
        """Why the server cannot do with sums (`privacy.secure_sum`), as text; "" if it can."""
        return self.no_secure_sum or NO_SECURE_SUM.get(self.server_visibility, "")

    def why_no_client_privacy(self) -> str:
        """Why training cannot be differentially private for whole clients (`privacy.epsilon`), as
        text; "" if it can.
        """
        return NO_CLIENT_PRIVACY[self.server_visibility]

    def signature_privacy(self) -> dict[str, Any]:
        """The differential privacy of one-off signatures, for the summary; empty if the method
        sends none.
        """
        return {}

    def initial_client_state(self, params: Tree) -> Tree:
        """The state of each client before it trains. Most methods need none.

        Args:
            params: the initial model, without the layers that clients keep (FedBN).
        """
        return {}

    @abstractmethod
    def init(self, fed: Federation, params: Tree, key: int) -> S:
        """The state before the first round. One-off phases (signatures) run here.

        Args:
            fed: the clients.
            params: the initial model.
            key: the randomness of this call.
        """

    @abstractmethod
    def round(self, fed: Federation, state: S, cohort: Tensor, key: int) -> S:
        """The state after one round. Clients that do not reply keep their client state.

        Args:
            fed: the clients.
            state: the state before the round. It must not be changed in place.
            cohort: the ids of the clients of this round.
            key: the randomness of this round.
        """

    @abstractmethod
    def add_clients(self, fed: Federation, state: S, ids: Tensor, key: int) -> S:
        """The state in which these clients have a cluster. Some may have joined after the state was
        made: call `state.with_num_clients(len(fed.sizes))` first.

        Args:
            fed: the clients.
            state: the state so far. It must not be changed in place.
            ids: clients without a cluster.
            key: the randomness of this call.
        """

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

    def local_params(self) -> tuple[str, ...]:
        """The names of the parameters that are in the clients' state instead of the models."""
        return ()

    def assign_models(self, state: S, ids: Tensor) -> ModelAssignment:
        """The model that each client uses now.

        Args:
            state: the state.
            ids: the clients.
        """
        return ModelAssignment(state.models, state.cluster_ids[ids], self.local_params())

    def personalization_program(self) -> AnyProgram | None:
        """The program by which a client adapts its model on its training data before it uses it;
        None if it does not.
        """
        return None

    def served_module(self, module: nn.Module, weights: Tree | None = None) -> nn.Module:
        """The module with which a client predicts: `module` itself, unless a prediction takes more
        than one model. Its parameters are what `assign_models` and `personalization_program` give
        a client; its outputs are read like those of `module`.

        Args:
            module: the model of the run.
            weights: the parameters of a client, which have the shapes of the result; None if any
                shapes will do.
        """
        return module

    def served_objective(
        self, module: nn.Module, objective: Objective, x: Inputs | None = None
    ) -> Objective:
        """The objective of `served_module`, by which clients are evaluated.

        Args:
            module: the model of the run.
            objective: the objective of that model.
            x: a few inputs, see `Objective`.
        """
        served = self.served_module(module)
        if served is module:
            return objective
        return Objective(served, objective.example_loss, x, bf16=objective.bf16)

    def _repr_html_(self) -> str:
        """The method in a notebook: its settings, and what a client discloses."""
        settings = {each.name: repr(getattr(self, each.name)) for each in hyperparameters(self)}
        title = getattr(self, "title", type(self).__name__)
        facts = {
            "a client sends": getattr(self, "client_disclosure", ""),
            "groups": f"it {GROUPS[self.groups]}",
            "paper": getattr(self, "paper", ""),
        }
        return html_table(f"{type(self).__name__}: {title}", settings | facts)

    def cost_symbols(self, state: State) -> dict[str, int]:
        """The values of the letters in `upload_cost` and `download_cost` now."""
        return {"W": nbytes(tree_index(state.models, slice(1))), "K": len(state)}
