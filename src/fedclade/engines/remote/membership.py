"""Who takes part in a remote federation: the nodes that are connected, and their clients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedclade.core.inputs import Inputs, InputsKind, describe_inputs, from_tree, tensors_of
from fedclade.core.names import Names, checked_client_names, checked_names
from fedclade.core.pytree import Tree, strip_prefix
from fedclade.data.client_metadata import ClientMetadata
from fedclade.engines.remote.messages import Message, NodeError, Transport, one_line
from fedclade.engines.remote.node import MAX_TEXT, describe_mismatch
from fedclade.engines.reply_validation import spec_of
from fedclade.errors import FedcladeError, InvalidInputError, is_int, require

MAX_NAMES = 10_000  # clients of a node
MAX_SIZE = (1 << 40) - 1  # samples of a client
MAX_CLASSES = 1 << 20
Note = Callable[[str], None]
LONGEST_PAUSE = 64  # updates of the membership until a refused node is asked again
CheckSamples = Callable[[ClientMetadata], object]


@dataclass(frozen=True)
class ClientRecord:
    """A client of a remote federation.

    Args:
        node: the id of its node; "": the node has not registered yet.
        place: its place among the clients of the node.
        name: its name at its site.
        size: its number of training samples.
        test_size: its number of test samples.
        site: the name of its site; "": the node has none.
        owner: the only node that may hold the client; "": any node.
        validation_size: its number of validation samples.
    """

    node: str
    place: int
    name: str
    size: int
    test_size: int
    site: str = ""
    owner: str = ""
    validation_size: int = 0

    @property
    def full_name(self) -> str:
        """The name in the federation: SITE/CLIENT."""
        return f"{self.site}/{self.name}" if self.site else self.name


class Membership:
    """The nodes that are connected, and the clients that they hold.

    Clients that join together are numbered in the order of site and name, so that neither the ids
    of the nodes nor the order of their answers matters. Clients that join later get the next
    numbers. A number never changes.

    Args:
        transport: sends messages to the nodes.
        compatibility_info: version and configuration, which every node must share.
        bind_clients_to_nodes: a client belongs to the node that registered it first, so that no
            node can take over the client of another.
        client_records: the clients that are known already, in the order of their numbers.
        check_samples: raises an error if the model cannot take the samples of a node, or has fewer
            outputs than the node has classes.
        note: is called with a line for each node that registers or cannot take part.
    """

    def __init__(
        self,
        transport: Transport,
        compatibility_info: Mapping[str, str],
        *,
        bind_clients_to_nodes: bool = False,
        client_records: Sequence[ClientRecord] = (),
        check_samples: CheckSamples = lambda metadata: None,
        note: Note = lambda text: None,
    ) -> None:
        self.transport, self.compatibility_info = transport, dict(compatibility_info)
        self.bind_clients_to_nodes, self.note = bind_clients_to_nodes, note
        self.check_samples = check_samples
        self.client_records: list[ClientRecord] = list(client_records)
        self.present: set[str] = set()
        # Why a node that answered cannot take part: another node has its site or its clients.
        self.conflicts: dict[str, str] = {}
        self._noted: dict[str, str] = {}  # the last reason that was noted for each unused node
        self._claimed: dict[str, str] = {}  # the name of the site of such a node
        self._unnumbered: list[ClientRecord] = []
        self._registered: dict[str, dict[str, Any]] = {}  # the header of each node's registration
        self._blocked: set[str] = set()
        self._changed: set[str] = set()  # the nodes that must register again
        # For each refused node: the updates until it is asked again, and the next pause.
        self._pauses: dict[str, tuple[int, int]] = {}
        # Two empty samples of each node, for their shape and dtype; then those of the federation.
        self._samples_of: dict[str, tuple[InputsKind, Tree]] = {}
        self._samples: Tree = {}
        self._inputs_kind: InputsKind = "tensor"

    @property
    def sizes(self) -> Tensor:
        return torch.tensor([record.size for record in self.client_records], dtype=torch.int64)

    def metadata(self, probe: Inputs | None) -> ClientMetadata:
        """What the nodes have reported about their clients."""
        if not self._registered:
            self.refresh()
        if not self._samples:
            raise InvalidInputError(
                "federation: no node has answered yet; start the nodes, then run again.",
                "federation",
            )
        test_sizes = torch.tensor(
            [record.test_size for record in self.client_records], dtype=torch.int64
        )
        validation_sizes = torch.tensor(
            [record.validation_size for record in self.client_records], dtype=torch.int64
        )
        classes = [header["classes"] for header in self._registered.values()]
        return ClientMetadata(
            self.sizes,
            test_sizes,
            int(test_sizes.sum()),
            from_tree(self._inputs_kind, strip_prefix("x", self._samples)),
            self._samples["y"],
            None if None in classes else max(classes),
            probe=probe,
            dataset="federation",
            partition="sites",
            names=Names(clients=tuple(record.full_name for record in self.client_records)),
            validation_sizes=validation_sizes if bool(validation_sizes.any()) else None,
        )

    def refresh(self) -> None:
        """Update which nodes are present, register new ones and number their clients."""
        self.register_nodes()
        self.number_clients()

    def number_clients(self) -> None:
        """Give the new clients of the nodes that are present the next numbers."""
        if not self._samples:
            self._choose_samples()
        joining = [record for record in self._unnumbered if record.node in self.present]
        self.client_records += sorted(joining, key=lambda record: (record.site, record.name))
        self._unnumbered = [
            record for record in self._unnumbered if record.node not in self.present
        ]

    def _choose_samples(self) -> None:
        """The kind of samples that most nodes have is that of the federation, so that one node that
        registers first cannot exclude all others. The other nodes are not used.
        """
        offered = {
            node: self._samples_of[node] for node in self._registered if node in self.present
        }
        if not offered:
            return
        self._inputs_kind, self._samples = max(
            offered.values(),
            key=lambda one: sum(_same_samples(one, other) for other in offered.values()),
        )
        chosen = (self._inputs_kind, self._samples)
        for node in [node for node in offered if not _same_samples(offered[node], chosen)]:
            self._noted[node] = self._differs(*offered[node])
            self._claimed[node] = str(self._registered[node]["site"])
            self.note(f"{self._label(node, None)}: not used: {self._noted[node]}")
            del self._registered[node]
            self._unnumbered = [record for record in self._unnumbered if record.node != node]
            self.present.discard(node)
            self._blocked.add(node)

    def _differs(self, kind: InputsKind, samples: Tree) -> str:
        theirs = from_tree(kind, strip_prefix("x", samples))
        ours = from_tree(self._inputs_kind, strip_prefix("x", self._samples))
        return (
            f"its samples differ from the others': {_kind_of(theirs)}, the others' {_kind_of(ours)}"
        )

    def register_nodes(self) -> None:
        """Update which nodes are present, and register new ones. Their new clients have no numbers
        yet.
        """
        before, self.present = self.present, set(self.transport.nodes()) - self._blocked
        if before - self.present:
            self._pauses = {}  # the node that was in conflict with another may have left
        for node in self._changed:
            self._registered.pop(node, None)
        self._changed = set()
        new = self.present - self._registered.keys()
        due = {node for node in new if not self._pauses.get(node, (0, 0))[0]}
        self._pauses = {
            node: (max(0, left - 1), pause) for node, (left, pause) in self._pauses.items()
        }
        # A node that loads its data slowly does not delay the others, unless there are no others.
        answers = self.transport.hello(
            {node: Message({"kind": "register"}) for node in sorted(due)}, wait=new == self.present
        )
        # The order of sites decides what is reported first, and which of two twins is in conflict.
        for node in sorted(answers, key=lambda node: (_site(answers[node]), node)):
            reason = self._admit(node, answers[node]) if node in self.present else "it has left"
            if reason is not None:
                _, pause = self._pauses.get(node, (0, 0))
                self._pauses[node] = (pause, min(LONGEST_PAUSE, max(1, 2 * pause)))
                if self._noted.get(node) != reason:
                    self.note(f"{self._label(node, answers[node])}: not used: {reason}")
                self._noted[node] = reason
        # Without a registration a node cannot take part.
        self.present &= self._registered.keys()

    def name_of(self, node: str) -> str:
        """The name of a node's site, for the log; the id of a node without one."""
        return str(self._registered.get(node, {}).get("site", "")) or f"node {node}"

    def refused(self) -> dict[str, str]:
        """Why each node that is connected cannot take part, by its name in the log."""
        return {
            self._label(node, None): reason
            for node, reason in self._noted.items()
            if node not in self._registered and node in self.transport.nodes()
        }

    def _label(self, node: str, answer: Message | NodeError | None) -> str:
        """The name of a node that cannot take part: that of its site, with the node's id, because
        the node of this site may be another one.
        """
        if isinstance(answer, Message):
            with suppress(FedcladeError):
                site = answer.header.get("site", "")
                check_site(site)
                self._claimed[node] = str(site)
        return f"{self._claimed[node]} (node {node})" if node in self._claimed else f"node {node}"

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

    def data_of(self, node: str) -> str:
        """What identifies the data with which a node has registered."""
        return str(self._registered[node]["data"])

    def forget(self, node: str) -> None:
        """Ask a node to register again before the next round: its data have changed."""
        self._changed.add(node)

    def state_key(self, node: str) -> str:
        """The name of a node's client state. It outlasts the id of the node, which may change when
        the node restarts.
        """
        header = self._registered[node]
        # No site contains "/": a client of a node without a site cannot have the key of a site.
        return str(header["site"] or f"/{header['names'][0]}")

    def _admit(self, node: str, answer: Message | NodeError) -> str | None:
        """Register a node, or return why it cannot take part. A node whose own answer rules it out
        is blocked. Others may try again: a node whose twin has left is no longer in conflict.
        """
        if isinstance(answer, NodeError):
            return answer.reason
        if "rejected" in answer.header:
            return one_line(answer.header["rejected"])
        try:
            if answer.header["compatibility_info"] != self.compatibility_info:
                reason: str | None = describe_mismatch(
                    self.compatibility_info, answer.header["compatibility_info"]
                )
            else:
                reason = self._register_node(node, answer)
                if node in self.conflicts:
                    return reason
        # The answer comes from another machine: whatever it causes is the fault of that machine.
        except Exception as error:
            reason = f"its registration is malformed ({type(error).__name__}: {error})"
        if reason is None:
            return None
        self._blocked.add(node)
        return one_line(reason)

    def _register_node(self, node: str, answer: Message) -> str | None:
        """Register a node and its clients, or return why it cannot take part."""
        header = answer.header
        # Only shape and dtype of the samples count.
        samples = {name: torch.zeros_like(value) for name, value in answer.tensors.items()}
        kind: InputsKind = header["inputs"]
        x = from_tree(kind, strip_prefix("x", samples))
        if not tensors_of(x) or any(len(value) != 2 for value in samples.values()):
            return "its samples have no inputs, or are not two"
        if self._samples and not _same_samples((kind, samples), (self._inputs_kind, self._samples)):
            return self._differs(kind, samples)
        records = self._read_records(node, header)
        self.conflicts.pop(node, None)
        if reason := self._conflict(node, records):
            self.conflicts[node] = reason
            return reason
        self.check_samples(_metadata_of_one(records, x, samples["y"], header["classes"]))
        self._samples_of[node] = (kind, samples)
        # A node that has left and whose site is now here must register again if it returns.
        self._registered = {
            other: earlier
            for other, earlier in self._registered.items()
            if not header["site"] or earlier["site"] != header["site"]
        }
        self._registered[node] = dict(header)
        numbers = {record.full_name: number for number, record in enumerate(self.client_records)}
        replaced = {record.full_name for record in records}
        # A client that its site no longer has keeps its number, and is not connected.
        self.client_records = [
            replace(record, node="", place=-1)
            if record.node == node and record.full_name not in replaced
            else record
            for record in self.client_records
        ]
        self._unnumbered = [
            record for record in self._unnumbered if record.full_name not in replaced
        ]
        for record in records:
            if record.full_name in numbers:
                self.client_records[numbers[record.full_name]] = record
            else:
                self._unnumbered.append(record)
        self.note(f"{self.name_of(node)}: {len(records)} clients")
        return None

    def _read_records(self, node: str, header: Mapping[str, Any]) -> list[ClientRecord]:
        """The clients that a node registers. Names from another machine are checked like a user's
        names.
        """
        site, owner = header["site"], node if self.bind_clients_to_nodes else ""
        if site != "":
            check_site(site)
        if not isinstance(header["data"], str) or len(header["data"]) > MAX_TEXT:
            raise ValueError("what identifies its data is not a short text")
        names = header["names"]
        if not isinstance(names, list) or not 0 < len(names) <= MAX_NAMES:
            raise ValueError(f"its names are not a list of 1 to {MAX_NAMES:,}")
        checked_names(names, "names")
        if site == "" and any("/" in name for name in names):
            raise ValueError("one of its names has '/', as if it belonged to a site")
        if header["classes"] is not None and not is_int(header["classes"], 1, MAX_CLASSES):
            raise ValueError(f"its number of classes is not a number from 1 to {MAX_CLASSES:,}")
        for name in ("sizes", "test_sizes", "validation_sizes"):
            sizes = header[name]
            if not isinstance(sizes, list) or len(sizes) != len(header["names"]):
                raise ValueError(f"its number of {name} is not that of its names")
            if not all(is_int(size, 0, MAX_SIZE) for size in sizes):
                raise ValueError(f"one of its {name} is not a number from 0 to {MAX_SIZE:,}")
        counts = zip(header["sizes"], header["test_sizes"], header["validation_sizes"], strict=True)
        records = [
            ClientRecord(node, place, name, size, test_size, site, owner, validation_size)
            for place, (name, (size, test_size, validation_size)) in enumerate(
                zip(header["names"], counts, strict=True)
            )
        ]
        checked_client_names([record.full_name for record in records], "names")
        return records

    def _conflict(self, node: str, records: Sequence[ClientRecord]) -> str | None:
        """Why these clients of a node cannot be registered next to those of other nodes."""
        known = {record.full_name: record for record in (*self.client_records, *self._unnumbered)}
        site, own = records[0].site, {record.full_name for record in records}
        for record in known.values():
            bound = record.owner not in ("", node)
            if bound and (record.full_name in own or (site and record.site == site)):
                return f"the client '{record.full_name}' of its site belongs to {record.owner}"
        for other, header in self._registered.items():
            if site and header["site"] == site and other != node and other in self.present:
                return (
                    f"site = {site!r}: node {other} has this name too. Give each node its own"
                    " node-name (--node-config 'node-name=\"…\"')"
                )
        for record in records:
            earlier = known.get(record.full_name, record)
            if earlier.node != node and earlier.node in self.present:
                return f"its client '{record.full_name}' is already registered by {earlier.node}"
        return None


def check_site(site: object) -> None:
    """Raise `InvalidInputError` unless `site` can be the name of a site."""
    (name,) = checked_client_names([site], "node-name")
    require("/" not in name, "node-name", name, "it must not contain '/'")


def _site(answer: Message | NodeError) -> str:
    return str(answer.header.get("site", "")) if isinstance(answer, Message) else ""


def _same_samples(one: tuple[InputsKind, Tree], other: tuple[InputsKind, Tree]) -> bool:
    return one[0] == other[0] and spec_of(one[1]) == spec_of(other[1])


def _metadata_of_one(
    records: Sequence[ClientRecord], x: Inputs, y: Tensor, classes: int | None
) -> ClientMetadata:
    """The clients of one node, as if there were no others."""
    sizes = torch.tensor([record.size for record in records])
    test_sizes = torch.tensor([record.test_size for record in records])
    return ClientMetadata(sizes, test_sizes, int(test_sizes.sum()), x, y, classes)


def _kind_of(x: Inputs) -> str:
    types = ", ".join(str(value.dtype) for value in tensors_of(x))
    return f"{describe_inputs(x)} of {types}"
