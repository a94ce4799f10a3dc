"""A worker: a simulator with one shard of the clients, which answers the leader's calls."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedclade.core.federation import Failure, ModelAssignment, SegmentSum
from fedclade.core.output_metric import AnyMetric
from fedclade.core.program import AnyProgram
from fedclade.core.program_serialization import NodeContext, from_spec
from fedclade.core.pytree import Tree
from fedclade.data.federated_dataset import Clients
from fedclade.engines.accumulator import Accumulator
from fedclade.engines.base import EvalRequest, Split, Traffic
from fedclade.engines.device_dataset import Longest
from fedclade.engines.sharded.calls import Answer, Call
from fedclade.engines.sharded.placement import place_clients
from fedclade.engines.simulator import Simulator


@dataclass(frozen=True)
class Evaluate:
    """An `EvalRequest` without what a worker has itself.

    Args:
        metrics: the names of the metrics.
        split: the part of the client's data.
        finetune: the description of the program that trains the models first.
        is_served: whether to evaluate the model that clients predict with.
    """

    metrics: tuple[str, ...]
    split: Split
    finetune: Mapping[str, Any] | None
    is_served: bool


@dataclass(frozen=True)
class PartialResults:
    """What a shard adds to the results of `map`.

    Args:
        places: the places of the clients that replied, in the call's `ids`.
        outputs: their replies.
        total: the sums, if the call has some.
        failures: the clients without a valid reply, by their number in the federation.
        traffic: the bytes sent.
        has_temporary_state: whether the shard's clients have `TEMPORARY` state.
    """

    places: Tensor
    outputs: Tree
    total: Accumulator | None
    failures: list[Failure]
    traffic: Traffic
    has_temporary_state: bool


class ShardWorker:
    """Answers calls about the clients of one shard. Clients are numbered as in the federation.

    Args:
        clients: all clients of the federation. Those of other shards are not kept.
        shard: the number of this shard.
        shards: the number of shards.
        context: the model with its loss, the encoder and the secret.
        metrics: what is measured in addition to the loss.
        state_folder: where the clients' state is stored; None for memory.
        options: further options of the `Simulator`.
    """

    def __init__(
        self,
        clients: Clients,
        shard: int,
        shards: int,
        context: NodeContext,
        metrics: Mapping[str, AnyMetric],
        state_folder: Path | None = None,
        **options: Any,
    ) -> None:
        placement = place_clients(clients.sizes, shards)
        self.ids, self._place = placement.ids_of(shard), placement.place
        self.context, self.metrics = context, metrics
        self.simulator = Simulator(
            clients.only(self.ids.tolist()),
            longest=Longest.of(clients),
            state_folder=state_folder,
            **options,
        )
        self.simulator.names = self.ids

    def answer(self, call: Call) -> Answer:
        """The answer to a call. An exception is part of it."""
        begin = time.perf_counter()
        try:
            value = getattr(self, call.name)(**call.arguments)
        except Exception as error:
            return Answer(error=error, seconds=time.perf_counter() - begin)
        return Answer(value, seconds=time.perf_counter() - begin)

    def start(self, initial: Tree, version: int | None) -> None:
        """Give the clients this initial state, or that of a committed version in the folder."""
        self.simulator.init_client_state(initial, version)

    def map(
        self,
        program: Mapping[str, Any],
        ids: Tensor,
        broadcast: Tree | None,
        per_client: ModelAssignment | None,
        key: int,
        reduce: SegmentSum | None,
        round_number: int,
    ) -> PartialResults:
        """Do what `Federation.map` does for these clients of the shard."""
        self.simulator.begin_round(round_number)
        before = replace(self.simulator.traffic)
        collected = self.simulator.collect(
            from_spec(program, self.context),
            self._place[ids],
            broadcast=broadcast,
            per_client=per_client,
            key=key,
            reduce=reduce,
        )
        after = self.simulator.traffic
        return PartialResults(
            collected.places,
            collected.outputs,
            None if collected.total is None else collected.total.without_empty_segments(),
            [
                replace(failure, client=int(self.ids[failure.client]))
                for failure in collected.failures
            ],
            Traffic(after.up - before.up, after.down - before.down),
            bool(self.simulator.client_state.temporary),
        )

    def evaluate(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        requests: Sequence[Evaluate],
        key: int,
        round_number: int,
    ) -> list[Tree]:
        """Do what `Engine.evaluate` does for these clients of the shard."""
        self.simulator.begin_round(round_number)
        served = self.context.served or self.context.objective
        evaluations = [
            EvalRequest(
                served if request.is_served else self.context.objective,
                {name: self.metrics[name] for name in request.metrics},
                request.split,
                self._program(request.finetune),
            )
            for request in requests
        ]
        return self.simulator.evaluate(assignment, self._place[ids], evaluations, key)

    def models_of(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        finetune: Mapping[str, Any] | None,
        key: int,
        round_number: int,
    ) -> Tree:
        """Do what `Engine.models_of` does for these clients of the shard."""
        self.simulator.begin_round(round_number)
        return self.simulator.models_of(assignment, self._place[ids], self._program(finetune), key)

    def commit(self, version: int) -> None:
        self.simulator.client_state.commit(version)

    def rollback(self) -> None:
        self.simulator.client_state.rollback()

    def state_tensors(self) -> Tree:
        """The committed state, with the clients' numbers in the federation."""
        tensors = self.simulator.client_state.tensors()
        return {**tensors, "ids": self.ids[tensors["ids"].cpu()]} if tensors else {}

    def restore(self, tensors: Tree, version: int) -> None:
        """Load the state of this shard's clients of `tensors`."""
        self.simulator.client_state.restore(
            {**tensors, "ids": self._place[tensors["ids"]]}, version
        )

    def _program(self, description: Mapping[str, Any] | None) -> AnyProgram | None:
        return None if description is None else from_spec(description, self.context)
