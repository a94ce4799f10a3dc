"""Nodes in this process: messages are copied and go through JSON, as in a real transport."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedclade.core.program_serialization import NodeContext
from fedclade.core.pytree import Tree
from fedclade.data import Clients
from fedclade.engines.remote.federation import RemoteFederation
from fedclade.engines.remote.messages import Message
from fedclade.engines.remote.node import Node
from fedclade.engines.simulator import Faults, Simulator

ABOUT = {"fedclade": "test", "configuration": "one"}


class InProcessTransport:
    """A transport to nodes in this process."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.here = dict(nodes)
        self.carried: list[dict[str, Message]] = []
        self.lost: Callable[[str, Message], bool] = lambda node, message: (
            False
        )  # whether a message gets no answer in time

    def nodes(self) -> list[str]:
        return sorted(self.here)

    def send_and_receive(self, messages: Mapping[str, Message]) -> dict[str, Message | str]:
        self.carried.append(dict(messages))
        answers: dict[str, Message | str] = {}
        for node, message in messages.items():
            answer = copied(
                self.here[node].answer(copied(message))
            )  # it is done even where the answer comes too late
            answers[node] = "no answer in time" if self.lost(node, message) else answer
        return answers


def copied(message: Message) -> Message:
    return Message(
        json.loads(json.dumps(message.header)),
        {name: value.clone() for name, value in message.tensors.items()},
    )


def nodes_of(
    clients: Clients, count: int, make: Callable[[Clients, list[str]], Node]
) -> dict[str, Node]:
    """The clients on `count` nodes, one to each in turn."""
    everyone = torch.arange(len(clients))
    dealt = {f"site-{node}": everyone[node::count] for node in range(count)}
    return {
        name: make(clients.only(ids.tolist()), [str(client) for client in ids.tolist()])
        for name, ids in dealt.items()
        if len(ids)
    }


class Remote(RemoteFederation):
    """A remote federation that stands in for a simulator in the conformance tests."""

    def __init__(
        self,
        clients: Clients,
        here: NodeContext,
        faults: Faults | None = None,
        nodes: int = 2,
        chunk: int | None = None,
        **options: Any,
    ) -> None:
        def make(data: Clients, names: list[str]) -> Node:
            node = Node(data, names, here, {}, ABOUT)
            node.state_stores = lambda run: node.state_store
            numbers = [int(name) for name in names]
            tamper = (
                (lambda key, client, reply: faults(key, numbers[client], reply))
                if faults is not None
                else None
            )
            node.simulator = Simulator(data, faults=tamper, chunk=chunk, **options)
            return node

        self.box = InProcessTransport(nodes_of(clients, nodes, make))
        super().__init__(self.box, ABOUT)
        self.refresh_membership()
        order = sorted(
            range(len(self.client_records)),
            key=lambda number: int(self.client_records[number].name),
        )
        self.client_records = [
            self.client_records[number] for number in order
        ]  # numbers as the simulator has them

    def read(self, ids: Tensor) -> Tree:
        """The committed state of these clients, read from their nodes."""
        rows: dict[int, Tree] = {}
        for client in ids.tolist():
            client_record = self.client_records[client]
            node = self.box.here[client_record.node]
            initial, kept = node.state_store.load()
            committed = [
                each
                for each in kept
                if each.transaction_id
                in self.client_state.committed_at(self._state_key(client_record.node))
            ]
            node.simulator.init_client_state(initial)
            if committed:
                node.simulator.client_state.restore(committed[-1].memory, 0)
            rows[client] = {
                name: value[0]
                for name, value in node.simulator.client_state.read(
                    torch.tensor([client_record.place])
                ).items()
            }
        names = rows[int(ids[0])] if len(ids) else {}
        return {
            name: torch.stack([rows[client][name] for client in ids.tolist()]) for name in names
        }
