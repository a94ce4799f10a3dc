"""A node: holds some of a federation's clients, and answers the server's messages with what its
clients compute.

A node does not trust the server: it checks messages and programs, and `NodePolicy` limits what the
server may ask for. Of an error only the type is sent, because its text may contain data.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from fedclade.core.federation import ClientResults, Failure, ModelAssignment
from fedclade.core.inputs import map_inputs, to_tree
from fedclade.core.output_metric import AnyMetric
from fedclade.core.program import AnyProgram
from fedclade.core.program_serialization import NodeContext, from_spec
from fedclade.core.pytree import Tree, add_prefix, concatenate, strip_prefix, tree_index
from fedclade.data.federated_dataset import Clients
from fedclade.engines.base import EvalRequest
from fedclade.engines.remote.evaluation import evaluation_part, join_answers
from fedclade.engines.remote.messages import (
    MAX_REASON,
    Message,
    one_line,
    to_list,
    unpack_assignment,
)
from fedclade.engines.remote.node_policy import (
    NO_LIMITS,
    LookCounter,
    NodePolicy,
    RefusedError,
    time_limit,
)
from fedclade.engines.remote.secure_node import SecureNode
from fedclade.engines.simulator import Simulator
from fedclade.errors import FedcladeError, is_int

PROTOCOL = 6  # the version of the messages
MAX_REQUESTS = 16  # evaluations in one message; a run sends at most four
MAX_NUMBER = 1 << 40  # of a client in the federation
MAX_KEY = (1 << 64) - 1
MAX_TEXT = 200  # characters of the name of a run or a transaction
_ALL_REASONS = 500_000  # characters of all reasons in an answer
_log = logging.getLogger("fedclade")
# Committed snapshots that a node keeps: the server's last checkpoint may be one round behind.
MAX_COMMITTED = 2


@dataclass(frozen=True)
class StateSnapshot:
    """The client state of a node after a message of one transaction of the server.

    Args:
        transaction_id: the name of the transaction.
        client_state: the state of the node's clients.
        call: the number of the message in the transaction.
    """

    transaction_id: str
    client_state: Tree
    call: int = 0


class StateStore(Protocol):
    """Where a node keeps the client state of one run, so that it outlasts the node's process."""

    def load(self) -> tuple[Tree, list[StateSnapshot]]:
        """The initial client state, and the snapshots, oldest first."""

    def save(self, initial: Tree, snapshots: list[StateSnapshot]) -> None: ...

    def save_models(self, names: list[str], models: Tree) -> None:
        """Save each client's model, a row of `models`, where it can be used."""


class InMemoryStateStore:
    """A state store that lasts as long as the process."""

    def __init__(self) -> None:
        self.initial: Tree = {}
        self.snapshots: list[StateSnapshot] = []
        self.models: dict[str, Tree] = {}

    def load(self) -> tuple[Tree, list[StateSnapshot]]:
        return self.initial, self.snapshots

    def save(self, initial: Tree, snapshots: list[StateSnapshot]) -> None:
        self.initial, self.snapshots = initial, snapshots

    def save_models(self, names: list[str], models: Tree) -> None:
        self.models |= {
            name: tree_index(models, torch.tensor(row)) for row, name in enumerate(names)
        }


class StateLostError(RefusedError):
    """The client state is missing."""


class Node:
    """Holds clients and answers the server's messages.

    Args:
        clients: the data of the node's clients.
        names: the name of each client at this node.
        context: the model with its loss, the encoder and the secret of this node.
        metrics: what is measured in addition to the loss.
        compatibility_info: version and configuration, which the server must share.
        state_stores: the state store of a run, by the name of the run.
        check: is called when the node registers; it raises an error if the node cannot take part.
        site: the name of the node's site, which stays the same when the node restarts; "": none,
            then the names of clients must be unique in the federation.
        policy: what the server may ask for.
        looks: counts the looks at the data.
        secure: the node's part of secure sums; None for new keys.
    """

    def __init__(
        self,
        clients: Clients,
        names: list[str],
        context: NodeContext,
        metrics: Mapping[str, AnyMetric],
        compatibility_info: Mapping[str, str],
        state_stores: Callable[[str], StateStore] | None = None,
        check: Callable[[], object] = lambda: None,
        site: str = "",
        policy: NodePolicy = NO_LIMITS,
        looks: LookCounter | None = None,
        secure: SecureNode | None = None,
    ) -> None:
        self.secure = secure or SecureNode()
        self.policy, self.looks = policy, looks or LookCounter()
        self.clients, self.names, self.context, self.metrics = clients, names, context, metrics
        self.compatibility_info = dict(compatibility_info)
        in_memory: dict[str, StateStore] = {}
        self.state_stores = state_stores or (
            lambda run: in_memory.setdefault(run, InMemoryStateStore())
        )
        self.state_store: StateStore = InMemoryStateStore()
        self.check, self.site = check, site
        self.simulator = Simulator(clients)
        sizes = (clients.sizes, clients.test_sizes, clients.validation_sizes)
        described = repr((names, [None if size is None else to_list(size) for size in sizes]))
        # A node may come back with other data under its old id.
        self.data_digest = hashlib.blake2b(described.encode(), digest_size=8).hexdigest()

    def answer(self, message: Message) -> Message:
        """The answer to a message. An error is part of the answer, never raised."""
        handlers: dict[str, Callable[[Message], Message]] = {
            "register": self._register,
            "map": self._map,
            "evaluate": self._evaluate,
            "save_models": self._save_models,
            "secure_keys": self._secure_keys,
            "secure_deal": self._secure_deal,
            "secure_map": self._secure_map,
            "secure_confirm": self._secure_confirm,
            "secure_reveal": self._secure_reveal,
        }
        header = message.header
        try:
            if header["kind"] != "register":
                if header["compatibility_info"] != self.compatibility_info:
                    reason = describe_mismatch(
                        header["compatibility_info"], self.compatibility_info
                    )
                    return Message({"rejected": one_line(reason)})
                self._check(header)
                if header["data"] != self.data_digest:
                    return Message({"rejected": DATA_CHANGED, "data_changed": True})
                self.state_store = self.state_stores(header["run"])
                self.simulator.begin_round(header["round"])
            with time_limit(self.policy.max_seconds):
                return handlers[header["kind"]](message)
        # User code may raise anything; the federation continues without this node.
        except Exception as error:
            return rejection(error)

    def _check(self, header: Mapping[str, Any]) -> None:
        """Refuse a header that no server of ours sends."""
        for name in ("run", "transaction_id", "retained", "data"):
            _expect(isinstance(header[name], str) and len(header[name]) <= MAX_TEXT, name)
        _expect(is_int(header["key"], 0, MAX_KEY), "key")
        for name in ("clients", "numbers", "committed"):
            _expect(isinstance(header[name], list), name)
        for name in ("call", "round"):
            _expect(is_int(header[name], 0, MAX_NUMBER), name)
        clients, count = header["clients"], len(self.names)
        _expect(all(is_int(client, 0, count - 1) for client in clients), "clients")
        _expect(len(set(clients)) == len(clients), "clients")
        _expect(len(header["numbers"]) == count, "numbers")
        _expect(all(is_int(number, 0, MAX_NUMBER) for number in header["numbers"]), "numbers")
        _expect(all(isinstance(name, str) for name in header["committed"]), "committed")
        if header.get("per_client") is not None:
            model_ids = header["per_client"]["model_ids"]
            _expect(len(model_ids) == len(clients), "per_client.model_ids")
        requests = header.get("requests", [])
        _expect(isinstance(requests, list) and len(requests) <= MAX_REQUESTS, "requests")

    def _register(self, message: Message) -> Message:
        with shown():
            self.check()
        data = self.clients
        header = {
            "compatibility_info": self.compatibility_info,
            "site": self.site,
            "names": self.names,
            "sizes": to_list(data.sizes),
            "test_sizes": to_list(data.test_sizes),
            "validation_sizes": to_list(
                torch.zeros_like(data.sizes)
                if data.validation_sizes is None
                else data.validation_sizes
            ),
            "classes": data.classes,
            "metrics": list(self.metrics),
            "data": self.data_digest,
        }
        # Of the samples only shape and dtype are sent.
        x = map_inputs(_two_zeros, data.x)
        header["inputs"], tensors = to_tree(x)
        return Message(header, {**add_prefix("x", tensors), "y": _two_zeros(data.y)})

    def _map(self, message: Message) -> Message:
        self.policy.check_in_clear(message.header["program"])
        evaluation = evaluation_part(message)
        if evaluation is not None:
            self._check(evaluation.header)
        answer = _answer_of(self._results(message))
        if evaluation is None:
            return answer
        # After the training, so that an evaluation that fails or takes too long costs only itself.
        # It restores the state from before the training.
        try:
            self.simulator.begin_round(evaluation.header["round"])
            return join_answers(answer, self._evaluate(evaluation))
        except Exception as error:
            return join_answers(answer, rejection(error))

    def _secure_keys(self, message: Message) -> Message:
        with shown():
            return self.secure.keys(message)

    def _secure_deal(self, message: Message) -> Message:
        with shown():
            return self.secure.deal(message)

    def _secure_map(self, message: Message) -> Message:
        """The answer of `map`, with the outputs to be summed as masked sums. A node without clients
        of the call only takes part in the masks.
        """
        header = message.header
        self.policy.check_group(header["secure"]["session"]["min_clients"])
        results = self._results(message) if header["clients"] else []
        with shown():
            part, results = self.secure.masked(message, results)
        is_empty = not any(result.outputs for result in results)
        self.policy.check_in_clear(header["program"], is_empty)
        answer = _answer_of(results)
        return Message(answer.header | part.header, answer.tensors | part.tensors)

    def _secure_confirm(self, message: Message) -> Message:
        with shown():
            return self.secure.confirm(message)

    def _secure_reveal(self, message: Message) -> Message:
        with shown():
            return self.secure.reveal(message)

    def _results(self, message: Message) -> list[ClientResults]:
        """The replies of the node's clients."""
        header = message.header
        program = self._program(header["program"])
        has_signature = self.policy.check_noise(header["program"])
        self.looks.add(self.policy, 1, int(has_signature))
        local_ids = torch.tensor(header["clients"], dtype=torch.int64)
        broadcast = strip_prefix("broadcast", message.tensors)
        assignment = (
            unpack_assignment(header["per_client"], message.tensors)
            if header["per_client"] is not None
            else None
        )
        snapshots = self._restore_state(message)

        def run(places: Tensor) -> ClientResults:
            rows = assignment[places] if assignment is not None else None
            return self.simulator.map(
                program, local_ids[places], broadcast=broadcast, per_client=rows, key=header["key"]
            )

        everyone = torch.arange(len(local_ids))
        try:
            results = [run(everyone)]
        except (RuntimeError, ValueError, TypeError):
            if len(local_ids) == 1:
                raise
            # The clients that were done before the error start again, too.
            snapshots = self._restore_state(message)
            results = [
                self._run_alone(run, place, int(local_ids[place])) for place in everyone[:, None]
            ]
        state = self.simulator.client_state
        temporary = state.temporary
        if state.initial or temporary:
            state.commit(0)
            tensors = state.tensors() | temporary
            snapshot = StateSnapshot(header["transaction_id"], tensors, header["call"])
            self.state_store.save(state.initial, [*snapshots, snapshot])
        return results

    @staticmethod
    def _run_alone(
        run: Callable[[Tensor], ClientResults], place: Tensor, client: int
    ) -> ClientResults:
        """Run one client alone after all clients together have failed, so that only the client with
        the error fails.
        """
        try:
            return run(place)
        except (RuntimeError, ValueError, TypeError) as error:
            _log.error("client %s failed", client, exc_info=error)
            reason = f"{type(error).__name__} ({IN_THE_LOG})"
            return ClientResults(place[:0], {}, failures=[Failure(client, reason)])

    def _evaluate(self, message: Message) -> Message:
        header = message.header
        # Programs are checked before the looks are counted.
        finetunes = [self._program_or_none(request["finetune"]) for request in header["requests"]]
        self.looks.add(self.policy, len(finetunes), 0)
        self._restore_state(message)
        assignment = unpack_assignment(header["per_client"], message.tensors)
        local_ids = torch.tensor(header["clients"], dtype=torch.int64)
        requests = [
            EvalRequest(
                (request["is_served"] and self.context.served) or self.context.objective,
                {name: self.metrics[name] for name in request["metrics"]},
                request["split"],
                finetune,
            )
            for request, finetune in zip(header["requests"], finetunes, strict=True)
        ]
        deliver = header["deliver"]
        if _evaluates_final_models(header):  # they are made once, to evaluate and to save them
            finetune = self._program_or_none(deliver["finetune"])
            models = self.simulator.models_of(assignment, local_ids, finetune, header["key"])
            assignment = ModelAssignment(models, torch.arange(len(local_ids)))
            requests = [replace(request, finetune=None) for request in requests]
            deliver = {**deliver, "finetune": None}
        values: Tree = {}
        results = self.simulator.evaluate(assignment, local_ids, requests, header["key"])
        for number, result in enumerate(results):
            values |= add_prefix(f"value{number}", result)
        delivered = False
        if deliver is not None:
            try:
                self._save(deliver, assignment, local_ids)
                delivered = True
            except Exception as error:  # the server sends the models again, and gets the reason
                _log.error("the models cannot be saved", exc_info=error)
        return Message({"delivered": delivered}, values)

    def _save_models(self, message: Message) -> Message:
        self._restore_state(message)
        assignment = unpack_assignment(message.header["per_client"], message.tensors)
        local_ids = torch.tensor(message.header["clients"], dtype=torch.int64)
        self._save(message.header, assignment, local_ids)
        return Message({})

    def _save(
        self, header: Mapping[str, Any], assignment: ModelAssignment, local_ids: Tensor
    ) -> None:
        """Save the final models of these clients, fine-tuned as `header` says."""
        finetune = self._program_or_none(header["finetune"])
        models = self.simulator.models_of(assignment, local_ids, finetune, header["key"])
        self.state_store.save_models(
            [self.names[client] for client in local_ids.tolist()],
            {name: value.cpu() for name, value in models.items()},
        )

    def _program(self, spec: Mapping[str, Any]) -> AnyProgram:
        with shown():
            program = from_spec(spec, self.context)
        self.policy.check_program(program, int(self.clients.sizes.max()))
        return program

    def _program_or_none(self, spec: Mapping[str, Any] | None) -> AnyProgram | None:
        return self._program(spec) if spec is not None else None

    def _restore_state(self, message: Message) -> list[StateSnapshot]:
        """Give the clients the state that the server refers to, and their numbers in the
        federation; returns the snapshots that still count.

        The latest snapshot of a committed transaction counts, or that of this transaction if it had
        an earlier message. Other snapshots were never part of the run: the server crashed in that
        round, or continued without this node's answer, or the node lost its answer to this message
        and now gets the message again. Of the older ones the snapshot that the server may return to
        is kept.
        """
        header, sent = message.header, strip_prefix("client_state", message.tensors)
        initial, stored = (sent, []) if sent else self.state_store.load()
        if sent:
            self.state_store.save(sent, [])
        if header["has_client_state"] and not initial:
            raise StateLostError(
                "Client state is missing on this node; it will be reinitialized with the next"
                " message."
            )
        committed_ids = list(header["committed"])
        # Of each transaction the snapshot after its last message.
        last = {each.transaction_id: each for each in stored}
        committed = [each for name, each in last.items() if name in committed_ids]
        current = [
            snapshot
            for snapshot in stored
            if snapshot.transaction_id == header["transaction_id"]
            and snapshot.transaction_id not in committed_ids
            and snapshot.call < header["call"]
        ][-1:]
        # The node may have written nothing in the retained transaction itself.
        until = committed_ids[: _length_to(header["retained"], committed_ids)]
        retained = [i for i, each in enumerate(committed) if each.transaction_id in until][-1:]
        newest = range(max(0, len(committed) - MAX_COMMITTED), len(committed))
        snapshots = [*(committed[i] for i in sorted({*retained, *newest})), *current]
        self.simulator.names = torch.tensor(header["numbers"], dtype=torch.int64)
        self.simulator.init_client_state(initial)
        if snapshots:
            self.simulator.client_state.restore(snapshots[-1].client_state, 0)
        return snapshots


def _answer_of(results: list[ClientResults]) -> Message:
    """The answer with these replies."""
    outputs = [result.outputs for result in results if len(result.ids)]
    failures = [failure for result in results for failure in result.failures]
    length = min(MAX_REASON, _ALL_REASONS // max(1, len(failures)))
    return Message(
        {
            "clients": [client for result in results for client in to_list(result.ids)],
            "failures": [
                [failure.client, failure.reason[:length], failure.rejected] for failure in failures
            ],
        },
        {
            name: value.cpu()
            for name, value in add_prefix(
                "outputs", concatenate(outputs) if outputs else {}
            ).items()
        },
    )


DATA_CHANGED = "its clients or their sizes have changed; it registers again before the next round"
IN_THE_LOG = "its text is in the log of the node"


def rejection(error: Exception) -> Message:
    """The answer of a node that cannot answer because of an error. Of errors that may contain data
    only the type is sent; the text is logged.
    """
    if isinstance(error, RefusedError):
        lost = isinstance(error, StateLostError)
        return Message({"rejected": one_line(error), "state_lost": lost})
    _log.error("the node cannot answer a message", exc_info=error)
    return Message({"rejected": f"{type(error).__name__} ({IN_THE_LOG})", "state_lost": False})


@contextmanager
def shown() -> Iterator[None]:
    """A context for code that sees no data: the server gets the text of fedclade's errors."""
    try:
        yield
    except FedcladeError as error:
        raise RefusedError(str(error), error.field) from error


def _expect(condition: bool, name: str) -> None:
    if not condition:
        raise RefusedError(f"message: its '{name}' is malformed.", name)


def _evaluates_final_models(header: Mapping[str, Any]) -> bool:
    """Whether all evaluations of a message are of the models that its clients keep."""
    deliver = header["deliver"]
    return (
        deliver is not None
        and deliver["key"] == header["key"]
        and all(request["finetune"] == deliver["finetune"] for request in header["requests"])
    )


def _two_zeros(samples: Tensor) -> Tensor:
    return samples.new_zeros(2, *samples.shape[1:])


def _length_to(name: str, names: list[str]) -> int:
    """The length of the part of `names` that ends with `name`; 0 if it is not there."""
    return names.index(name) + 1 if name in names else 0


def describe_mismatch(server: Mapping[str, str], node: Mapping[str, str]) -> str:
    """What server and node do not agree on, with both values."""
    differing = [name for name in {**server, **node} if server.get(name) != node.get(name)]
    details = "; ".join(
        f"{name}: the server has {server.get(name, 'none')}, this node {node.get(name, 'none')}"
        for name in differing
    )
    return f"server and node differ ({details}); use the same version and configuration for both."
