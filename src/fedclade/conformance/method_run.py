"""A method on an engine, driven round by round as `fc.run` drives it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from fedclade.conformance.example_clients import ragged_clients
from fedclade.conformance.in_process_federation import InProcessFederation
from fedclade.conformance.in_process_shards import in_process_shards
from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Objective
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.program_serialization import NodeContext, factories_of
from fedclade.core.pytree import Tree
from fedclade.core.rng import fold_in
from fedclade.data import Clients
from fedclade.engines.sharded.federation import ShardedSimulator
from fedclade.engines.simulator import Faults, Simulator
from fedclade.methods.base import Method
from fedclade.methods.required_context import NeedsEncoder, NeedsSecret
from fedclade.models import MLP
from fedclade.training.config import BatchNorm, LocalConfig
from fedclade.training.setup import inject_context, own_batch_norm_of

EngineName: TypeAlias = Literal["simulator", "remote", "sharded"]
ENGINES: tuple[EngineName, ...] = ("simulator", "remote", "sharded")
"""The simulator, two nodes that the server reaches by messages, and two workers of a sharded
simulator.
"""

_CLASSES = 10
_FAR_ROUND = 10**6  # clients without a cluster get one for the evaluation, in no real round


class MethodRun:
    """A method on an engine.

    Args:
        method: the method.
        engine: the name of the engine.
        clients: the clients' data.
        faults: changes or drops replies.
        batch_norm: for a model with BatchNorm layers, how they are treated; None for an MLP.
        options: options of the engine.
    """

    def __init__(
        self,
        method: Method,
        engine: EngineName,
        clients: Clients,
        faults: Faults | None = None,
        batch_norm: BatchNorm | None = None,
        **options: Any,
    ) -> None:
        # Methods that need true groups get some.
        groups = torch.arange(len(clients)) % 2 if clients.groups is None else clients.groups
        with_context = inject_context(method, replace(clients, groups=groups).metadata, seed=0)
        self.clients, self.batch_norm = clients, batch_norm
        self.module = _module(clients, batch_norm)
        self.objective = Objective(self.module)
        self.method: Method = with_context.with_local_config(
            LocalTraining(self.objective, lr=0.05, batch_size=4, epochs=2)
        )
        self.fed: Simulator | InProcessFederation | ShardedSimulator
        if engine == "simulator":
            self.fed = Simulator(clients, faults=faults, **options)
        elif engine == "sharded":
            self.fed = in_process_shards(clients, self._node_context(), faults, **options)
        else:
            self.fed = InProcessFederation(clients, self._node_context(), faults, **options)
        self.own = own_batch_norm_of(
            self.method, self.objective, LocalConfig(batch_norm=batch_norm or "average")
        )
        self.view = self.own.federation(self.fed)  # what the method works with
        self.params = self.objective.params()
        self.fed.init_client_state(
            self.method.initial_client_state(self.own.shared(self.params))
            | self.own.client_state(self.params)
        )

    def _node_context(self) -> NodeContext:
        module = self.method.encoder_module if isinstance(self.method, NeedsEncoder) else None
        return NodeContext(
            self.objective,
            None if module is None else Encoder(module),
            self.method.secret if isinstance(self.method, NeedsSecret) else None,
            self.served_objective(),
            factories_of(type(self.method)),
        )

    def served_objective(self) -> Objective:
        """The module that clients predict with."""
        return self.method.served_objective(self.module, self.objective)

    def init(self) -> State:
        """The state before the first round."""
        state: State = self.method.init(
            self.view, self.own.shared(self.params), key=fold_in(0, "init")
        )
        self.fed.client_state.commit(0)
        return state

    def round(self, state: State, number: int, cohort: Tensor) -> State:
        """The state after one round."""
        state, cohort = self.method.prepare_cohort(
            self.view, state, cohort, fold_in(0, "admit", number)
        )
        state = self.method.round(self.view, state, cohort, fold_in(0, "round", number))
        self.fed.client_state.commit(number)
        return state

    def rounds(self, state: State, *cohorts: Tensor, first: int = 1) -> State:
        """The state after one round with each of these cohorts."""
        for number, cohort in enumerate(cohorts, start=first):
            state = self.round(state, number, cohort)
        return state

    def served(self, state: State) -> Tree:
        """The weights that each client uses now, after its personalization."""
        ids = torch.arange(len(self.fed.sizes))
        unknown = ids[state.cluster_ids[ids] == UNKNOWN]
        if len(unknown):
            key = fold_in(0, "admit", _FAR_ROUND)
            state = self.method.add_clients(self.view, state, unknown, key)
        known = ids[state.cluster_ids != UNKNOWN]
        assignment = self.own.assignment(self.method.assign_models(state, known))
        personalize = self.method.personalization_program()
        if isinstance(self.fed, InProcessFederation):
            if personalize is not None:
                return self.fed.final_models(assignment, known, personalize)
            return assignment.gather(self.fed.read(known))
        return self.fed.models_of(assignment, known, personalize)

    def continue_from(self, other: MethodRun, number: int) -> None:
        """Take the clients' states of another run after round `number`, as from a checkpoint."""
        if isinstance(self.fed, InProcessFederation):
            assert isinstance(other.fed, InProcessFederation)
            for name, node in self.fed.in_process.connected.items():
                node.state_store = other.fed.in_process.connected[name].state_store
        self.fed.client_state.restore(other.fed.client_state.tensors(), number)

    def with_lr(self, lr: float, new_objective: bool) -> None:
        """Change the learning rate. A new objective has the same weights and no cached program."""
        objective = Objective(self.module) if new_objective else self.objective
        local = replace(self.method.local, objective=objective, lr=lr)
        self.method = self.method.with_local_config(local)


def _module(clients: Clients, batch_norm: BatchNorm | None) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = clients.shape or ()
        if batch_norm is None:
            return MLP(8).build(shape, _CLASSES)
        layers = (nn.Linear(math.prod(shape), 8), nn.BatchNorm1d(8), nn.Tanh())
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(8, _CLASSES))


def cohorts_of(clients: int) -> list[Tensor]:
    """The cohorts of three rounds."""
    return [torch.arange(clients), torch.arange(0, clients, 2), torch.arange(1, clients)]


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    state: State
    served: Tree


@dataclass
class MethodUnderTest:
    """The method that the checks examine. It caches the plain run that several checks compare with.

    Args:
        method: the method.
        engine: the engine of the runs.
        batch_norm: see `MethodRun`.
    """

    method: Method
    engine: EngineName = "simulator"
    batch_norm: BatchNorm | None = None
    _plain: dict[EngineName, Outcome] = field(default_factory=dict)

    def start(
        self, clients: Clients | None = None, faults: Faults | None = None, **options: Any
    ) -> MethodRun:
        """A new run, on the ragged clients unless others are given."""
        clients = ragged_clients() if clients is None else clients
        return MethodRun(self.method, self.engine, clients, faults, self.batch_norm, **options)

    def plain_run(self) -> Outcome:
        """Three rounds on the ragged clients without faults."""
        if self.engine not in self._plain:
            self._plain[self.engine] = self.run(self.start)
        return self._plain[self.engine]

    def run(self, start: Callable[[], MethodRun]) -> Outcome:
        """Three rounds of a new run."""
        run = start()
        state = run.rounds(run.init(), *cohorts_of(len(run.clients)))
        return Outcome(state, run.served(state))

    def on(self, engine: EngineName) -> MethodUnderTest:
        """The same method on another engine, with the same cache."""
        return replace(self, engine=engine)
