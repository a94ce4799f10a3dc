"""Nodes in this process: messages are encoded, like those of a real transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedclade.core.federation import ModelAssignment
from fedclade.core.program import AnyProgram
from fedclade.core.program_serialization import NodeContext
from fedclade.core.pytree import Tree, stack
from fedclade.data import Clients
from fedclade.engines.remote.federation import RemoteFederation
from fedclade.engines.remote.messages import Message, NodeError, decode, encode
from fedclade.engines.remote.node import InMemoryStateStore, Node
from fedclade.engines.simulator import Faults, Simulator

COMPATIBILITY_INFO = {"fedclade": "test", "configuration": "one"}


class InProcessTransport:
    """A transport to nodes in this process."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.connected = dict(nodes)
        self.sent: list[dict[str, Message]] = []
        # Whether a message gets no answer in time.
        self.is_lost: Callable[[str, Message], bool] = lambda node, message: False

    def nodes(self) -> list[str]:
        return sorted(self.connected)

    def send_and_receive(self, messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        self.sent.append(dict(messages))
        answers: dict[str, Message | NodeError] = {}
        for node, message in messages.items():
            # The node does the work even if its answer comes too late.
            answer = copied(self.connected[node].answer(copied(message)))
            answers[node] = (
                NodeError("no answer in time") if self.is_lost(node, message) else answer
            )
        return answers

    def hello(self, messages: Mapping[str, Message], wait: bool) -> dict[str, Message | NodeError]:
        return self.send_and_receive(messages) if messages else {}


def copied(message: Message) -> Message:
    return decode(*encode(message))


def nodes_of(
    clients: Clients, count: int, make: Callable[[Clients, list[str]], Node]
) -> dict[str, Node]:
    """`count` nodes; node i has every `count`-th client, from client i on."""
    everyone = torch.arange(len(clients))
    ids_of = {f"node-{node}": everyone[node::count] for node in range(count)}
    return {
        name: make(clients.only(ids.tolist()), [str(client) for client in ids.tolist()])
        for name, ids in ids_of.items()
        if len(ids)
    }


class InProcessFederation(RemoteFederation):
    """A remote federation whose nodes are in this process. It can replace a simulator in a check.

    Args:
        clients: the clients' data.
        context: what every node has: the objective, the encoder, the secret.
        faults: changes or drops replies, as in `Simulator`.
        nodes: the number of nodes that share the clients.
        chunk: how many clients a node runs in one step.
        options: further options of the nodes' simulators.
    """

    def __init__(
        self,
        clients: Clients,
        context: NodeContext,
        faults: Faults | None = None,
        nodes: int = 2,
        chunk: int | None = None,
        **options: Any,
    ) -> None:
        def make(data: Clients, names: list[str]) -> Node:
            node = Node(data, names, context, {}, COMPATIBILITY_INFO)
            node.state_stores = lambda run: node.state_store
            numbers = [int(name) for name in names]
            tamper = (
                (lambda key, client, reply: faults(key, numbers[client], reply))
                if faults is not None
                else None
            )
            node.simulator = Simulator(data, faults=tamper, chunk=chunk, **options)
            return node

        self.in_process = InProcessTransport(nodes_of(clients, nodes, make))
        super().__init__(self.in_process, COMPATIBILITY_INFO)
        self.refresh_membership()
        # The same numbers as in the simulator.
        self.membership.client_records.sort(key=lambda record: int(record.name))

    def final_models(self, assignment: ModelAssignment, ids: Tensor, finetune: AnyProgram) -> Tree:
        """The models that the nodes save for these clients at the end of a run."""
        self.push_final_models(assignment, ids, finetune)
        rows = []
        for client in ids.tolist():
            record = self.membership.client_records[client]
            store = self.in_process.connected[record.node].state_store
            assert isinstance(store, InMemoryStateStore)
            rows.append(store.models[record.name])
        return stack(rows)

    def read(self, ids: Tensor) -> Tree:
        """The state of these clients, read from their nodes."""
        rows: dict[int, Tree] = {}
        for client in ids.tolist():
            record = self.membership.client_records[client]
            node = self.in_process.connected[record.node]
            initial, snapshots = node.state_store.load()
            committed_ids = self.client_state.committed_at(self.membership.state_key(record.node))
            committed = [each for each in snapshots if each.transaction_id in committed_ids]
            node.simulator.init_client_state(initial)
            if committed:
                node.simulator.client_state.restore(committed[-1].client_state, 0)
            state = node.simulator.client_state.read(torch.tensor([record.place]))
            rows[client] = {name: value[0] for name, value in state.items()}
        names = rows[int(ids[0])] if len(ids) else {}
        return {
            name: torch.stack([rows[client][name] for client in ids.tolist()]) for name in names
        }
