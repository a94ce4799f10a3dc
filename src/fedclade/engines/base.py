"""What a run sees of a federation: the one verb of methods, and what only the run may do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedclade.core.federation import Failure, Federation, ModelAssignment
from fedclade.core.functional_model import ExampleLoss, Objective
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree
from fedclade.data.client_metadata import ClientMetadata
from fedclade.engines.profiler import Profiler


@dataclass
class Traffic:
    """Bytes that went between server and clients, counted from what was really sent."""

    up: int = 0
    down: int = 0


@dataclass(frozen=True)
class EvalRequest:
    """What is measured: on which of a client's parts, by which metrics beside the loss; `tune`
    trains its copy on its own training part first.
    """

    model: Objective
    metrics: Mapping[str, ExampleLoss]
    split: Literal["train", "test"] = "test"
    finetune: AnyProgram | None = None


class ClientStateTransaction(Protocol):
    """What clients remember between rounds, as the run sees it."""

    version: int  # the round after which it was committed

    def commit(self, version: int) -> None:
        """The round is over: what was written in it lasts."""

    def rollback(self) -> None:
        """Forget what was written since the last commit."""

    def tensors(self) -> Tree:
        """What a checkpoint needs to know of it."""

    def restore(self, tensors: Tree, version: int) -> None:
        """The memory that `tensors` gave."""


class Engine(Federation, Protocol):
    """The clients, reached through an engine."""

    name: str
    holds_clients: bool  # whether the clients' memory and data are in this process
    device: torch.device  # where the server's tensors are
    traffic: Traffic
    clock: Profiler

    @property
    def client_state(self) -> ClientStateTransaction: ...

    def client_metadata(self) -> ClientMetadata:
        """The clients there are now. Their number only grows."""

    def refresh_membership(self) -> None:
        """Before a round: look who has come."""

    def init_client_state(self, initial: Tree) -> None:
        """Give every client this memory to start from (a method's `memory0`)."""

    def evaluate(
        self, rows: ModelAssignment, ids: Tensor, looks: Sequence[EvalRequest], key: int = 0
    ) -> list[Tree]:
        """For each look the mean loss and metrics of each client's model on its own data,
        (len(ids),), NaN where there is none.

        Only the runner asks this: methods never see test data.
        """

    def models_of(
        self, rows: ModelAssignment, ids: Tensor, tune: AnyProgram | None = None, key: int = 0
    ) -> Tree:
        """The models themselves, a row for each of these clients, what is in their memory included;
        `tune` as in `Look`.
        """

    def push_final_models(
        self, rows: ModelAssignment, ids: Tensor, tune: AnyProgram | None = None, key: int = 0
    ) -> None:
        """At the end of a run: every client gets the model that it is served, to keep."""

    def pop_failures(self) -> list[Failure]:
        """Who did not answer or was refused since this was last asked."""
