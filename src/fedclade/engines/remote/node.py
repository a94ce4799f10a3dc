"""A site: one place where some of a federation's clients live. It answers the server's letters with
what its clients compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedclade.core.federation import ClientResults, Failure
from fedclade.core.functional_model import ExampleLoss
from fedclade.core.program_serialization import NodeContext, from_spec
from fedclade.core.pytree import Tree, add_prefix, concatenate, strip_prefix, tree_index
from fedclade.data.federated_dataset import Clients
from fedclade.engines.base import EvalRequest
from fedclade.engines.remote.messages import Message, numbers, unpacked_rows
from fedclade.engines.simulator import Simulator
from fedclade.errors import FedcladeError

PROTOCOL = 1  # what letters say; another number, another language
KEPT = 2  # committed memories: the server's last checkpoint may be one round behind


@dataclass(frozen=True)
class StateSnapshot:
    """What the clients of a site remember after a turn of the server; `turn` says which."""

    transaction_id: str
    memory: Tree


class StateStore(Protocol):
    """Where a site keeps what must last when its process ends, for one run of the server."""

    def load(self) -> tuple[Tree, list[StateSnapshot]]:
        """What clients start from, and what they remember, oldest first."""

    def save(self, initial: Tree, kept: list[StateSnapshot]) -> None: ...

    def deliver(self, names: list[str], models: Tree) -> None:
        """Put each client's own model, a row of `models`, where it can be used."""


class InMemoryStateStore:
    """A keeper for as long as the process lasts."""

    def __init__(self) -> None:
        self.initial: Tree = {}
        self.kept: list[StateSnapshot] = []
        self.models: dict[str, Tree] = {}

    def load(self) -> tuple[Tree, list[StateSnapshot]]:
        return self.initial, self.kept

    def save(self, initial: Tree, kept: list[StateSnapshot]) -> None:
        self.initial, self.kept = initial, kept

    def deliver(self, names: list[str], models: Tree) -> None:
        self.models |= {
            name: tree_index(models, torch.tensor(row)) for row, name in enumerate(names)
        }


class StateLostError(FedcladeError):
    """The clients' memory is not there."""


class Node:
    """clients: those that live here; names: what each is called; here: the model, its loss and the
    encoder of this place; metrics: what is measured beside the loss; about: version and
    configuration, in words, which must be the server's too; keepers: by the name of a run, where
    its memory lasts; check: called once, before it is agreed that this site takes part: it raises
    what speaks against it.
    """

    def __init__(
        self,
        clients: Clients,
        names: list[str],
        here: NodeContext,
        metrics: Mapping[str, ExampleLoss],
        about: Mapping[str, str],
        state_stores: Callable[[str], StateStore] | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        self.clients, self.names, self.here, self.metrics, self.about = (
            clients,
            names,
            here,
            metrics,
            dict(about),
        )
        here_only: dict[str, StateStore] = {}
        self.state_stores = state_stores or (
            lambda run: here_only.setdefault(run, InMemoryStateStore())
        )
        self.state_store: StateStore = InMemoryStateStore()
        self.check = check
        self.simulator = Simulator(clients)

    def answer(self, message: Message) -> Message:
        """The answer to a letter; what cannot be done is said in it, never raised."""
        kinds: dict[str, Callable[[Message], Message]] = {
            "hello": self._hello,
            "map": self._map,
            "evaluate": self._evaluate,
            "deliver": self._deliver,
        }
        head = message.header
        try:
            if head["kind"] != "hello" and head["about"] != self.about:
                return Message({"refused": describe_mismatch(head["about"], self.about)})
            if head["kind"] != "hello":
                self.state_store = self.state_stores(head["run"])
            return kinds[head["kind"]](message)
        except FedcladeError as error:
            return Message({"refused": str(error), "forgotten": isinstance(error, StateLostError)})
        # of the user's own code: whatever it is, the federation goes on without this site
        except Exception as error:
            return Message({"refused": f"{type(error).__name__}: {error}"})

    def _hello(self, message: Message) -> Message:
        self.check()
        data = self.clients
        head = {
            "about": self.about,
            "names": self.names,
            "sizes": numbers(data.sizes),
            "test_sizes": numbers(data.test_sizes),
            "classes": data.classes,
            "metrics": list(self.metrics),
        }
        # Of the samples only what kind they are is told.
        return Message(
            head,
            {
                "x": data.x.new_zeros(2, *data.x.shape[1:]),
                "y": data.y.new_zeros(2, *data.y.shape[1:]),
            },
        )

    def _map(self, message: Message) -> Message:
        head = message.header
        program = from_spec(head["program"], self.here)
        local = torch.tensor(head["clients"], dtype=torch.int64)
        broadcast = strip_prefix("shared", message.tensors)
        each = unpacked_rows(head["each"], message.tensors) if head["each"] is not None else None
        kept = self._recall(message)

        def run(places: Tensor) -> ClientResults:
            rows = each[places] if each is not None else None
            return self.simulator.map(
                program, local[places], broadcast=broadcast, per_client=rows, key=head["key"]
            )

        everyone = torch.arange(len(local))
        try:
            replies = [run(everyone)]
        except (RuntimeError, ValueError, TypeError):
            if len(local) == 1:
                raise
            replies = [self._alone(run, place, int(local[place])) for place in everyone[:, None]]
        if self.simulator.client_state.initial:
            self.simulator.client_state.commit(0)
            kept = [each for each in kept if each.transaction_id != head["turn"]]
            self.state_store.save(
                self.simulator.client_state.initial,
                [*kept, StateSnapshot(head["turn"], self.simulator.client_state.tensors())],
            )
        out = (
            concatenate([reply.outputs for reply in replies if len(reply.ids)])
            if any(len(reply.ids) for reply in replies)
            else {}
        )
        return Message(
            {
                "clients": [client for reply in replies for client in numbers(reply.ids)],
                "failures": [
                    list(astuple(failure)) for reply in replies for failure in reply.failures
                ],
            },
            {name: value.cpu() for name, value in add_prefix("out", out).items()},
        )

    @staticmethod
    def _alone(run: Callable[[Tensor], ClientResults], place: Tensor, client: int) -> ClientResults:
        """One client by itself, where all together failed: it costs only itself."""
        try:
            return run(place)
        except (RuntimeError, ValueError, TypeError) as error:
            return ClientResults(
                place[:0], {}, failures=[Failure(client, f"{type(error).__name__}: {error}")]
            )

    def _evaluate(self, message: Message) -> Message:
        head = message.header
        self._recall(message)
        rows, local = (
            unpacked_rows(head["each"], message.tensors),
            torch.tensor(head["clients"], dtype=torch.int64),
        )
        values: Tree = {}
        for number, told in enumerate(head["looks"]):
            metrics = {name: self.metrics[name] for name in told["metrics"]}
            tune = from_spec(told["tune"], self.here) if told["tune"] is not None else None
            look = EvalRequest(self.here.objective, metrics, told["part"], tune)
            values |= add_prefix(
                f"value{number}", self.simulator.measure(rows, local, look, head["key"])
            )
        return Message({}, values)

    def _deliver(self, message: Message) -> Message:
        head = message.header
        self._recall(message)
        tune = from_spec(head["tune"], self.here) if head["tune"] is not None else None
        rows, local = (
            unpacked_rows(head["each"], message.tensors),
            torch.tensor(head["clients"], dtype=torch.int64),
        )
        models = self.simulator.models_of(rows, local, tune, head["key"])
        self.state_store.deliver(
            [self.names[client] for client in local.tolist()],
            {name: value.cpu() for name, value in models.items()},
        )
        return Message({})

    def _recall(self, message: Message) -> list[StateSnapshot]:
        """Give the clients the memory that the server means, and their numbers in the federation;
        what is left of what was kept.

        Of turns that the server has committed the latest counts, or this turn's own if there was a
        letter before. What any other turn left was never part of the run: the server died in it, or
        went on without this site's answer.
        """
        head, first = message.header, strip_prefix("memory", message.tensors)
        initial, kept = (first, []) if first else self.state_store.load()
        if first:
            self.state_store.save(first, [])
        if head["remembers"] and not initial:
            raise StateLostError(
                "this site has lost what its clients remembered; they begin anew with the next"
                " letter."
            )
        committed = set(head["committed"])
        kept = [
            each
            for each in kept
            if each.transaction_id in committed or each.transaction_id == head["turn"]
        ]
        kept = [
            *[each for each in kept if each.transaction_id in committed][-KEPT:],
            *[each for each in kept if each.transaction_id not in committed],
        ]
        self.simulator.names = torch.tensor(head["numbers"], dtype=torch.int64)
        self.simulator.init_client_state(initial)
        if kept:
            self.simulator.client_state.restore(kept[-1].memory, 0)
        return kept


def describe_mismatch(server: Mapping[str, str], node: Mapping[str, str]) -> str:
    """What server and site do not agree on, both sides named."""
    differing = [name for name in {**server, **node} if server.get(name) != node.get(name)]
    told = "; ".join(
        f"{name}: the server has {server.get(name, 'none')}, this site {node.get(name, 'none')}"
        for name in differing
    )
    return (
        f"server and site do not fit together ({told}); give both the same version and"
        " configuration."
    )
