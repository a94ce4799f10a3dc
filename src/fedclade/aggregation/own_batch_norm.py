"""FedBN: each client keeps its own BatchNorm layers, and the server averages the others.

Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021.

The weights and running statistics of these layers are in the client's state, under "batch_norm/".
They are no part of the server's models. `OwnBatchNormFederation` adds them to the models that a
client receives and removes them from its replies, so that methods need no code for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from torch import Tensor

from fedclade.aggregation.federation_view import FederationView
from fedclade.core.federation import (
    OWN_BATCH_NORM,
    ClientResults,
    Federation,
    ModelAssignment,
    SegmentSum,
)
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.program import (
    AnyProgram,
    ChainedProgram,
    is_natively_batched,
    natively_batched,
)
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix
from fedclade.errors import InvalidInputError

Received: TypeAlias = Literal["one model", "models", "models in broadcast"]
"""What a client receives: one model at most, a stack of models, or a stack that all receive."""


@dataclass(frozen=True, eq=False)
class OwnBatchNorm:
    """The BatchNorm layers that clients keep.

    Args:
        objective: the model.
        names: the names of their weights and running statistics; empty if there are none.
    """

    objective: Objective
    names: tuple[str, ...] = ()

    def shared(self, params: Tree) -> Tree:
        """The part of a model that the server has."""
        return {name: value for name, value in params.items() if name not in self.names}

    def client_state(self, params: Tree) -> Tree:
        """The initial state of a client: these layers of the initial model."""
        return add_prefix(OWN_BATCH_NORM, {name: params[name] for name in self.names})

    def federation(self, federation: Federation) -> Federation:
        """The federation in which clients keep these layers."""
        return OwnBatchNormFederation(federation, self) if self.names else federation

    def assignment(self, assignment: ModelAssignment) -> ModelAssignment:
        """The assignment with these layers of each client."""
        own = tuple(f"{OWN_BATCH_NORM}/{name}" for name in self.names)
        return replace(assignment, local_params=(*assignment.local_params, *own))

    def received(self, broadcast: Tree | None, per_client: ModelAssignment | None) -> Received:
        """What a client receives in a call of `map`."""
        if per_client is not None:
            return "models" if self._stacked_axes(per_client.models) > 1 else "one model"
        return "models in broadcast" if self._stacked_axes(broadcast or {}) == 1 else "one model"

    def _stacked_axes(self, tree: Tree) -> int:
        """The number of axes before those of one model; 0 for a tree that is not a model."""
        name = next((name for name in tree if name in self.objective.trained), None)
        return tree[name].ndim - self.objective.ndim_of(name) if name is not None else 0


@dataclass(frozen=True)
class OwnBatchNormFederation(FederationView):
    """A federation in which clients keep their BatchNorm layers.

    Args:
        federation: the clients.
        own: the layers.
    """

    own: OwnBatchNorm

    def map(
        self,
        program: AnyProgram,
        ids: Tensor,
        *,
        broadcast: Tree | None = None,
        per_client: ModelAssignment | None = None,
        key: int,
        reduce: SegmentSum | None = None,
    ) -> ClientResults:
        return super().map(
            keep_batch_norm(program, self.own.names, self.own.received(broadcast, per_client)),
            ids,
            broadcast=broadcast,
            per_client=per_client,
            key=key,
            reduce=reduce,
        )


@serializable_program
def keep_batch_norm(program: AnyProgram, names: tuple[str, ...], received: Received) -> AnyProgram:
    """The program on models with the client's own BatchNorm layers. Where its reply has new values
    of them, these are stored in the client's state instead.

    Args:
        program: the program.
        names: the names of the weights and running statistics of these layers.
        received: what the client receives.
    """
    if isinstance(program, ChainedProgram):
        return replace(
            program,
            first=keep_batch_norm(program.first, names, received),
            # It gets one model, from `connect`.
            second=keep_batch_norm(program.second, names, "one model"),
            spec=None,
        )
    if received != "one model" and any(map(is_natively_batched, program.functions)):
        raise InvalidInputError(
            f"local.batch_norm = 'own': the program '{program.name}' gets several models, so it"
            " cannot be natively batched. Remove @natively_batched from its functions.",
            "local.batch_norm",
        )

    def with_own(models: Tree, memory: Tree, is_here: bool, is_stack: bool) -> Tree:
        """The models with the client's own layers, if there are models."""
        if not is_here or not models:
            return models
        own = strip_prefix(OWN_BATCH_NORM, memory)
        if is_stack:
            count = len(next(iter(models.values())))
            own = {name: value.expand(count, *value.shape) for name, value in own.items()}
        return models | own

    def complete(broadcast: Tree, memory: Tree) -> Tree:
        return with_own(broadcast, memory, received == "models in broadcast", is_stack=True)

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        const, carry = program.start(
            complete(broadcast, memory),
            with_own(params, memory, is_here=True, is_stack=received == "models"),
            {name: value for name, value in memory.items() if not _is_own(name)},
        )
        return add_prefix("const", const) | add_prefix("memory", memory), carry

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        memory = strip_prefix("memory", const)
        return program.step(complete(broadcast, memory), strip_prefix("const", const), carry, batch)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        memory = strip_prefix("memory", const)
        reply, written = program.finish(
            complete(broadcast, memory), strip_prefix("const", const), carry
        )
        reply, own = _split(reply, names)
        if written is None and not own:
            return reply, None
        return reply, memory | (written or {}) | add_prefix(OWN_BATCH_NORM, own)

    if is_natively_batched(program.start):
        natively_batched(start)
    if is_natively_batched(program.step):
        natively_batched(step)
    if is_natively_batched(program.finish):
        natively_batched(finish)
    return replace(program, start=start, step=step, finish=finish, spec=None)


def _is_own(name: str) -> bool:
    return name.startswith(f"{OWN_BATCH_NORM}/")


def _split(reply: Tree, names: tuple[str, ...]) -> tuple[Tree, Tree]:
    """The reply without the parameters `names`, and their values. In a reply they may have a
    prefix, such as "y/" in SCAFFOLD.
    """
    rest: Tree = {}
    own: Tree = {}
    for key, value in reply.items():
        name = key if key in names else key.partition("/")[2]
        if name not in names:
            rest[key] = value
        elif name in own:
            raise InvalidInputError(
                f"local.batch_norm = 'own': a reply has two values of '{name}'. Use another"
                " method, or 'average'.",
                "local.batch_norm",
            )
        else:
            own[name] = value
    return rest, own
