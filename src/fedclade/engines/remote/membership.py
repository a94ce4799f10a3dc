"""Who takes part in a remote federation: the nodes that are connected, and their clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedclade.core.pytree import Tree
from fedclade.data.client_metadata import ClientMetadata
from fedclade.engines.remote.messages import Message, NodeError, Transport
from fedclade.engines.remote.node import describe_mismatch
from fedclade.engines.reply_validation import spec_of
from fedclade.errors import InvalidInputError

# The errors that reading a malformed answer of a node can raise.
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)
Note = Callable[[str], None]


@dataclass(frozen=True)
class ClientRecord:
    """A client: its node ("": not seen yet), its place there, its name, and its numbers of
    samples.
    """

    node: str
    place: int
    name: str
    size: int
    test_size: int


class Membership:
    """The nodes that are connected, and the clients that they hold.

    Clients are numbered in the order in which their nodes register, and keep their numbers.

    Args:
        transport: sends messages to the nodes.
        compatibility_info: version and configuration, which every node must share.
        bind_clients_to_nodes: a client's name includes the name of its node, so that no node can
            take over the client of another.
        client_records: the clients that are known already, in the order of their numbers.
        note: is called with a line for each node that registers or cannot take part.
    """

    def __init__(
        self,
        transport: Transport,
        compatibility_info: Mapping[str, str],
        *,
        bind_clients_to_nodes: bool = False,
        client_records: Sequence[ClientRecord] = (),
        note: Note = lambda text: None,
    ) -> None:
        self.transport, self.compatibility_info = transport, dict(compatibility_info)
        self.bind_clients_to_nodes, self.note = bind_clients_to_nodes, note
        self.client_records: list[ClientRecord] = list(client_records)
        self.present: set[str] = set()
        self._registered: dict[str, dict[str, Any]] = {}  # the header of each node's registration
        self._blocked: set[str] = set()
        self._samples: Tree = {}  # two empty samples, for their shape and dtype

    @property
    def sizes(self) -> Tensor:
        return torch.tensor([record.size for record in self.client_records], dtype=torch.int64)

    def metadata(self, probe: Tensor | None) -> ClientMetadata:
        """What the nodes have reported about their clients."""
        if not self._registered:
            self.refresh()
        if not self._samples:
            raise InvalidInputError(
                "federation: no node has answered yet; start the nodes, then run again."
            )
        test_sizes = torch.tensor(
            [record.test_size for record in self.client_records], dtype=torch.int64
        )
        classes = [header["classes"] for header in self._registered.values()]
        return ClientMetadata(
            self.sizes,
            test_sizes,
            int(test_sizes.sum()),
            self._samples["x"],
            self._samples["y"],
            None if None in classes else max(classes),
            probe=probe,
            dataset="federation",
            partition="sites",
        )

    def refresh(self) -> None:
        """Update which nodes are present, and register new ones."""
        self.present = set(self.transport.nodes()) - self._blocked
        new = sorted(self.present - self._registered.keys())
        if not new:
            return
        answers = self.transport.send_and_receive(
            {node: Message({"kind": "register"}) for node in new}
        )
        for node in new:
            reason = self._admit(node, answers[node])
            if reason is not None:
                self.present.discard(node)
                self.note(f"{node}: not used: {reason}")

    def is_connected(self, node: str) -> bool:
        return node in self.present and node in self._registered

    def client_numbers(self, node: str) -> list[int]:
        """The number in the federation of each of a node's clients."""
        by_place = sorted(
            (record.place, number)
            for number, record in enumerate(self.client_records)
            if record.node == node
        )
        return [number for _, number in by_place]

    def state_key(self, node: str) -> str:
        """The name of a node's client state. It outlasts the name of the node, which may change
        when the node restarts.
        """
        return str(self._registered[node]["names"][0])

    def _admit(self, node: str, answer: Message | NodeError) -> str | None:
        """Register a node, or return why it cannot take part. A node whose own answer rules it out
        is blocked; others may try again.
        """
        if isinstance(answer, NodeError):
            return answer.reason
        if "rejected" in answer.header:
            return str(answer.header["rejected"])
        try:
            if answer.header["compatibility_info"] != self.compatibility_info:
                reason: str | None = describe_mismatch(
                    self.compatibility_info, answer.header["compatibility_info"]
                )
            else:
                reason = self._register_node(node, answer)
        except MALFORMED as error:
            reason = f"its registration is malformed ({type(error).__name__}: {error})"
        if reason is not None:
            self._blocked.add(node)
        return reason

    def _register_node(self, node: str, answer: Message) -> str | None:
        """Number the clients of a node, or return why it cannot take part."""
        header, samples = answer.header, dict(answer.tensors)
        if self._samples and spec_of(samples) != spec_of(self._samples):
            theirs, ours = tuple(samples["x"].shape[1:]), tuple(self._samples["x"].shape[1:])
            return (
                f"its samples differ from the others': {theirs} of {samples['x'].dtype}, the"
                f" others' {ours} of {self._samples['x'].dtype}"
            )
        if not header["names"]:
            return "it has no clients"
        names = [
            f"{node}/{name}" if self.bind_clients_to_nodes else str(name)
            for name in header["names"]
        ]
        counts = [
            (int(size), int(test_size))
            for size, test_size in zip(header["sizes"], header["test_sizes"], strict=True)
        ]
        if len(counts) != len(names) or min(map(min, counts)) < 0:
            raise ValueError("its numbers of names and sizes differ, or a size is negative")
        numbers = {record.name: number for number, record in enumerate(self.client_records)}
        for name in names:
            other = self.client_records[numbers[name]].node if name in numbers else node
            if other != node and other in self.present:
                return f"its client '{name}' is already registered by {other}"
        self._samples = self._samples or samples
        self._registered[node] = {**header, "names": names}
        for place, (name, (size, test_size)) in enumerate(zip(names, counts, strict=True)):
            record = ClientRecord(node, place, name, size, test_size)
            if name in numbers:
                self.client_records[numbers[name]] = record
            else:
                self.client_records.append(record)
        self.note(f"{node}: {len(names)} clients")
        return None
