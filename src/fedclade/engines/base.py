"""The interface of an engine: `map`, which methods call, and what only the training loop calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from fedclade.core.federation import Failure, Federation, ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.output_metric import AnyMetric
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree
from fedclade.data.client_metadata import ClientMetadata
from fedclade.engines.profiler import Profiler
from fedclade.errors import InvalidInputError

Split: TypeAlias = Literal["train", "validation", "test"]


@dataclass
class Traffic:
    """Bytes sent between server and clients."""

    up: int = 0
    down: int = 0


@dataclass(frozen=True)
class EvalRequest:
    """An evaluation of each client's model on the client's own data.

    Args:
        model: the model and its loss.
        metrics: the metrics to compute in addition to the loss, by name.
        split: the part of the client's data.
        finetune: a program that first trains a copy of the model on the client's training part.
        is_served: whether clients make predictions with `model`; else it is the model of the run,
            before the personal layer.
    """

    model: Objective
    metrics: Mapping[str, AnyMetric]
    split: Split = "test"
    finetune: AnyProgram | None = None
    is_served: bool = True


@dataclass(frozen=True)
class Delivery:
    """The evaluated models are the final ones: each client gets its own.

    Args:
        finetune: a program that trains each client's model before the client keeps it.
        key: the randomness of this program.
    """

    finetune: AnyProgram | None = None
    key: int = 0


class ClientStateTransaction(Protocol):
    """The state that clients keep between rounds, for the training loop."""

    version: int  # the round after which it was committed

    def commit(self, version: int) -> None:
        """Make the state that was written in this round permanent."""

    def rollback(self) -> None:
        """Discard the state that was written since the last commit."""

    def tensors(self) -> Tree:
        """The tensors that a checkpoint stores."""

    def restore(self, tensors: Tree, version: int) -> None:
        """Load the client state that `tensors` returned."""

    def retain(self, tensors: Tree) -> None:
        """Make sure that the client state that `tensors` returned can be restored later, until the
        next call.
        """


class Engine(Federation, Protocol):
    """The clients, reached through an engine."""

    name: str
    holds_clients: bool  # whether the clients' state and data are in this process
    has_secure_sums: bool  # whether `SegmentSum.min_clients` is kept
    device: torch.device  # the device of the server's tensors
    traffic: Traffic
    clock: Profiler

    @property
    def client_state(self) -> ClientStateTransaction: ...

    def client_metadata(self) -> ClientMetadata:
        """The clients that are known now. Their number never decreases."""

    def refresh_membership(self) -> None:
        """Look for new clients; called before each round."""

    def begin_round(self, round_number: int) -> None:
        """From now on, every client uses the data that it has in this round."""

    def init_client_state(self, initial: Tree) -> None:
        """Give every client this initial state (a method's `initial_client_state`)."""

    def evaluate(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        requests: Sequence[EvalRequest],
        key: int = 0,
        deliver: Delivery | None = None,
    ) -> list[Tree]:
        """For each request the mean loss and metrics of each client's model on the client's own
        data: tensors of shape (len(ids),), NaN for clients without such data, or where a metric is
        not defined.

        Only the training loop calls this: methods have no access to test data.

        Args:
            assignment: the model of each client.
            ids: the clients.
            requests: the evaluations.
            key: the randomness of fine-tuning.
            deliver: these are the final models: a real client gets its own with the evaluation.
        """

    def models_of(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        finetune: AnyProgram | None = None,
        key: int = 0,
    ) -> Tree:
        """The models of these clients, one row for each, with the parameters that are in their
        client state.

        Args:
            assignment: the model of each client.
            ids: the clients.
            finetune: see `EvalRequest`.
            key: the randomness of fine-tuning.
        """

    def push_final_models(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        finetune: AnyProgram | None = None,
        key: int = 0,
    ) -> None:
        """Send every client its final model; called at the end of a run. The arguments are those of
        `models_of`.
        """

    def pop_failures(self) -> list[Failure]:
        """The clients that did not answer or were rejected since the last call."""


def checked_ids(ids: Tensor, clients: int) -> Tensor:
    """The clients of a call, on the CPU; an error if one does not exist or occurs twice.

    Args:
        ids: the clients.
        clients: the number of clients of the federation.
    """
    ids = torch.as_tensor(ids, dtype=torch.int64).cpu()
    numbers = ids.tolist()
    if numbers and not 0 <= min(numbers) <= max(numbers) < clients:
        raise InvalidInputError(
            f"ids: the clients are {min(numbers)} to {max(numbers)}; they must be 0 to"
            f" {clients - 1}.",
            "ids",
        )
    twice = [client for client, count in Counter(numbers).items() if count > 1]
    if twice:
        raise InvalidInputError(
            f"ids: client {twice[0]} occurs more than once; the clients of a call must be"
            " distinct.",
            "ids",
        )
    return ids
