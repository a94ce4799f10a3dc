"""A federation over several simulators, each in a worker of its own.

The results are those of one simulator, to the byte wherever a simulator's results do not depend on
its chunks: the randomness of a client comes from its number, batches are as large as in the whole
federation, and partial sums are exact.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedclade.core.federation import (
    Aggregator,
    ClientResults,
    Failure,
    ModelAssignment,
    SegmentSum,
    ServerUpdate,
)
from fedclade.core.program import AnyProgram
from fedclade.core.program_serialization import to_spec
from fedclade.core.pytree import Tree, concatenate, tree_index
from fedclade.data.client_metadata import ClientMetadata
from fedclade.engines.accumulator import Accumulator, check_sum, ordered_results
from fedclade.engines.base import Delivery, EvalRequest, Traffic, checked_ids
from fedclade.engines.profiler import Profiler
from fedclade.engines.sharded.calls import Answer, Call
from fedclade.engines.sharded.placement import place_clients
from fedclade.engines.sharded.worker import Evaluate, PartialResults
from fedclade.engines.sharded.worker_transport import WorkerDiedError, Workers
from fedclade.errors import FedcladeError, require

_MAX_DEATHS = 3  # of one worker in one call: then it is the call that kills it
_log = logging.getLogger("fedclade")


@dataclass
class ShardTimes:
    """The seconds that each worker computed, and how long all waited for the slowest.

    Args:
        busy: the seconds of each worker.
        waited: the sum over all calls of the time between the mean and the last answer.
        slowest: the seconds of the slowest worker in the last call.
    """

    busy: list[float]
    waited: float = 0.0
    slowest: float = 0.0

    def add(self, answers: Mapping[int, Answer]) -> None:
        for worker, answer in answers.items():
            self.busy[worker] += answer.seconds
        seconds = [answer.seconds for answer in answers.values()]
        self.slowest = max(seconds, default=0.0)
        self.waited += self.slowest - sum(seconds) / len(self.busy)

    @property
    def in_words(self) -> str:
        """The times of all workers, in one line."""
        busy = ", ".join(f"{seconds:.1f}" for seconds in self.busy)
        return (
            f"{len(self.busy)} workers computed for {busy} s; each waited for the slowest for"
            f" {self.waited:.1f} s on average."
        )


class ShardedSimulator:
    """A federation whose clients are in the simulators of several workers.

    A client's state stays in its worker. A worker that dies is replaced; its clients start again
    from the state of the last committed round, and repeat what they did since. So the results are
    those without the death.

    Args:
        workers: the workers; shard i of the clients is in worker i.
        metadata: the clients' metadata. Their sizes give the shards.
        device: the device of the server's tensors.
    """

    holds_clients = True
    has_secure_sums = False
    aggregator: Aggregator = "mean"
    server_update = ServerUpdate()

    def __init__(
        self, workers: Workers, metadata: ClientMetadata, device: torch.device | str = "cpu"
    ) -> None:
        require(
            1 <= workers.count <= len(metadata),
            "engine.shards",
            workers.count,
            f"must be from 1 to the number of clients, {len(metadata)}",
        )
        self.workers, self.name = workers, workers.name
        self.device = torch.device(device)
        self.traffic = Traffic()
        self.clock = Profiler(self.device, False)
        self.times = ShardTimes([0.0] * workers.count)
        self.client_state = ShardedClientState(self)
        self._metadata = metadata
        self._shard = place_clients(metadata.sizes, workers.count).shard
        self._initial: Tree = {}
        self._round = 0
        self._failures: list[Failure] = []
        # What the workers did since the last commit, to be repeated by one that replaces another.
        self._uncommitted: dict[int, list[Call]] = {}

    @property
    def sizes(self) -> Tensor:
        """(clients,) the number of training examples of each client."""
        return self._metadata.sizes

    def client_metadata(self) -> ClientMetadata:
        """The metadata of all clients."""
        return self._metadata

    def refresh_membership(self) -> None:
        """Do nothing: all clients are always present."""

    def begin_round(self, round_number: int) -> None:
        """Every call from now on names this round."""
        self._round = round_number

    def push_final_models(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        finetune: AnyProgram | None = None,
        key: int = 0,
    ) -> None:
        """Do nothing: the clients are simulated."""

    def init_client_state(self, initial: Tree) -> None:
        """Give every client this initial state."""
        self._initial, self._uncommitted = initial, {}
        self.client_state.forget()
        self.call_all(Call("start", {"initial": initial, "version": None}))

    def pop_failures(self) -> list[Failure]:
        """The clients that were rejected since the last call."""
        failures, self._failures = self._failures, []
        return failures

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
        """Run the program on these clients' training data, each in its worker."""
        ids = checked_ids(ids, len(self.sizes))
        if reduce:
            check_sum(reduce, len(ids))
        common = {"program": to_spec(program), "broadcast": broadcast, "key": key}
        places_at = self._places_at(ids)
        calls = {
            worker: Call(
                "map",
                {
                    **common,
                    "ids": ids[places],
                    "per_client": None if per_client is None else _part(per_client, places),
                    "reduce": None if reduce is None else _part_of_sum(reduce, places),
                    "round_number": self._round,
                },
            )
            for worker, places in places_at.items()
        }
        answers = self._call(calls)
        for worker, call in calls.items():
            has_state = self._initial or answers[worker].has_temporary_state
            if has_state and self._can_replace_workers:
                self._uncommitted.setdefault(worker, []).append(call)
        total = Accumulator(reduce) if reduce else None
        places, outputs, failures = list[Tensor](), list[Tree](), list[Failure]()
        for worker, in_call in places_at.items():
            partial: PartialResults = answers[worker]
            places.append(in_call[partial.places])
            if partial.outputs:
                outputs.append(self._on_device(partial.outputs))
            if total is not None and partial.total is not None:
                total.merge(partial.total)
            failures += partial.failures
            self.traffic.up += partial.traffic.up
            self.traffic.down += partial.traffic.down
        self._failures += failures
        results = ordered_results(ids, places, outputs, total, failures)
        return replace(results, sums=self._on_device(results.sums))

    def evaluate(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        requests: Sequence[EvalRequest],
        key: int = 0,
        deliver: Delivery | None = None,
    ) -> list[Tree]:
        """For each request the mean loss and metrics of each client's model on the client's own
        data; see `Engine.evaluate`.
        """
        ids = checked_ids(ids, len(self.sizes))
        described = [
            Evaluate(
                tuple(request.metrics),
                request.split,
                _spec_or_none(request.finetune),
                request.is_served,
            )
            for request in requests
        ]
        results: list[Tree] = [
            {
                name: torch.full((len(ids),), torch.nan, dtype=torch.float64)
                for name in ("loss", *request.metrics)
            }
            for request in requests
        ]
        common = {"requests": described, "key": key, "round_number": self._round}
        places_at, answers = self._call_for(Call("evaluate", common), assignment, ids)
        for worker, places in places_at.items():
            for result, values in zip(results, answers[worker], strict=True):
                for name, value in values.items():
                    result[name][places] = value
        return results

    def models_of(
        self,
        assignment: ModelAssignment,
        ids: Tensor,
        finetune: AnyProgram | None = None,
        key: int = 0,
    ) -> Tree:
        """The models of these clients, one row for each; see `Engine.models_of`."""
        if not assignment.local_params and finetune is None:
            return assignment.gather({})
        common = {"finetune": _spec_or_none(finetune), "key": key, "round_number": self._round}
        places_at, answers = self._call_for(Call("models_of", common), assignment, ids)
        order = torch.cat(list(places_at.values())).argsort()
        return self._on_device(tree_index(concatenate([answers[w] for w in places_at]), order))

    def call_all(self, call: Call) -> list[Any]:
        """The value of this call at every worker."""
        values = self._call(dict.fromkeys(range(self.workers.count), call))
        return [values[worker] for worker in range(self.workers.count)]

    def load_state(self, tensors: Tree, version: int) -> None:
        """Give each worker the state of its clients."""
        nobody = dict.fromkeys(range(self.workers.count), torch.arange(0))
        parts = nobody | self._places_at(tensors["ids"])
        parts_of = {worker: tree_index(tensors, places) for worker, places in parts.items()}
        self._call(
            {
                worker: Call("restore", {"tensors": part, "version": version})
                for worker, part in parts_of.items()
            }
        )

    @property
    def has_client_state(self) -> bool:
        return bool(self._initial)

    @property
    def _can_replace_workers(self) -> bool:
        """Whether a worker that dies leaves the committed state of its clients."""
        return not self._initial or self.workers.state_outlasts_worker

    def forget_uncommitted(self) -> None:
        """What the workers did so far need not be repeated."""
        self._uncommitted = {}

    def _places_at(self, ids: Tensor) -> dict[int, Tensor]:
        shards = self._shard[ids]
        places_at = {
            worker: torch.nonzero(shards == worker).flatten()
            for worker in range(self.workers.count)
        }
        return {worker: places for worker, places in places_at.items() if len(places)}

    def _call_for(
        self, call: Call, assignment: ModelAssignment, ids: Tensor
    ) -> tuple[dict[int, Tensor], dict[int, Any]]:
        """Call the workers of these clients with their part of the assignment. Returns the places
        of each worker's clients, and its value.
        """
        places_at = self._places_at(ids) or {0: torch.arange(0)}
        calls = {
            worker: Call(
                call.name,
                {**call.arguments, "assignment": _part(assignment, places), "ids": ids[places]},
            )
            for worker, places in places_at.items()
        }
        return places_at, self._call(calls)

    def _call(self, calls: Mapping[int, Call]) -> dict[int, Any]:
        """The value of each worker's call. Dead workers are replaced, and called again."""
        answers: dict[int, Answer] = {}
        remaining, deaths = dict(calls), 0
        while remaining:
            died: dict[int, WorkerDiedError] = {}
            for worker, answer in self.workers.call(remaining).items():
                if isinstance(answer, WorkerDiedError):
                    died[worker] = answer
                else:
                    answers[worker] = answer
            remaining = {worker: calls[worker] for worker in died}
            deaths += bool(died)
            for worker, reason in died.items():
                self._replace(worker, reason, calls[worker], deaths)
        for worker in sorted(answers):
            error = answers[worker].error
            if error is not None:
                raise error
        self.times.add(answers)
        return {worker: answer.value for worker, answer in answers.items()}

    def _replace(self, worker: int, reason: WorkerDiedError, call: Call, deaths: int) -> None:
        """Start another worker with the state that the dead one had before this call."""
        if deaths >= _MAX_DEATHS:
            raise FedcladeError(
                f"engine.shards: worker {worker} ended {deaths} times in one call ({reason})."
                " Memory may have run out: use fewer shards on a machine, or set engine.chunk.",
                "engine.shards",
            )
        if not self._can_replace_workers:
            raise FedcladeError(
                f"engine.shards: worker {worker} ended ({reason}), and its clients' state with it."
                " Continue from the last checkpoint with --resume, or set"
                " engine.client_state = 'disk'.",
                "engine.shards",
            )
        _log.warning("Worker %d ended (%s); another one takes its place.", worker, reason)
        self.workers.replace(worker)
        version = self.client_state.opened_version
        repeated = [Call("start", {"initial": self._initial, "version": version})]
        repeated += self._uncommitted.get(worker, [])
        if call.name == "start":
            repeated = []
        for earlier in repeated:
            answer = self.workers.call({worker: earlier})[worker]
            if isinstance(answer, WorkerDiedError):
                self._replace(worker, answer, call, deaths + 1)
                return
            if answer.error is not None:
                raise answer.error

    def _on_device(self, tree: Tree) -> Tree:
        return {name: value.to(self.device) for name, value in tree.items()}


class ShardedClientState:
    """The client state of all workers, for the training loop.

    Args:
        federation: the workers' federation.
    """

    def __init__(self, federation: ShardedSimulator) -> None:
        self.version = 0
        # The committed version that the workers' folders have; None: they have no rows.
        self.opened_version: int | None = None
        self._federation = federation

    def forget(self) -> None:
        """No client has written anything."""
        self.opened_version = None

    def commit(self, version: int) -> None:
        if self._federation.has_client_state:
            self._federation.call_all(Call("commit", {"version": version}))
            self.opened_version = version
        self._federation.forget_uncommitted()
        self.version = version

    def rollback(self) -> None:
        self._federation.call_all(Call("rollback"))
        self._federation.forget_uncommitted()

    def tensors(self) -> Tree:
        """The committed state, in the form of one simulator's: any number of shards can load it."""
        if not self._federation.has_client_state:
            return {}
        joined = concatenate(self._federation.call_all(Call("state_tensors")))
        return tree_index(joined, joined["ids"].argsort())

    def retain(self, tensors: Tree) -> None:
        """Do nothing: `tensors` are the whole state."""

    def restore(self, tensors: Tree, version: int) -> None:
        if tensors and self._federation.has_client_state:
            self._federation.forget_uncommitted()
            self.forget()
            self._federation.load_state(tensors, version)
            self.opened_version = version
        self.version = version


def _part(assignment: ModelAssignment, places: Tensor) -> ModelAssignment:
    """The assignment of the clients at these places, with their models only."""
    models = {
        name: value
        for name, value in assignment.models.items()
        if name not in assignment.local_params
    }
    distinct, model_ids = torch.unique(assignment.model_ids.cpu()[places], return_inverse=True)
    if models and len(distinct) < len(next(iter(models.values()))):
        models = tree_index(models, distinct)
    elif models:
        model_ids = assignment.model_ids.cpu()[places]
    return ModelAssignment(models, model_ids, assignment.local_params)


def _part_of_sum(reduce: SegmentSum, places: Tensor) -> SegmentSum:
    """The sums of the clients at these places."""
    segments = reduce.segment_ids
    return replace(
        reduce,
        weights=reduce.weights.cpu()[places],
        segment_ids=segments.cpu()[places] if isinstance(segments, Tensor) else segments,
    )


def _spec_or_none(program: AnyProgram | None) -> Mapping[str, Any] | None:
    return None if program is None else to_spec(program)
