"""The server's part of secure sums: it hands out keys and lists, and adds masked vectors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fedclade.core.federation import SegmentSum
from fedclade.engines.remote.membership import ClientRecord
from fedclade.engines.remote.messages import Message, NodeError, one_line
from fedclade.engines.remote.secure_messages import (
    COUNTS,
    NO_KEYS,
    deal_from_json,
    deal_to_json,
    identity_from_json,
    identity_to_json,
    masked_from_tensors,
    reveal_from_json,
    session_to_json,
    shares_from_tensor,
    shares_to_tensor,
)
from fedclade.privacy.secure_sum.fixed_point import Words, decode
from fedclade.privacy.secure_sum.protocol import (
    Aggregation,
    Deal,
    Groups,
    Identity,
    ProtocolError,
    Session,
    threshold_of,
)

Send: TypeAlias = Callable[[Mapping[str, Message]], Mapping[str, Message | NodeError]]
Summed: TypeAlias = list[tuple[str, tuple[int, ...]]]
"""Name and shape of each output in a vector."""
MIN_NODES = 2
# To agree on keys. A node that has restarted shows it when it is asked for a deal: in the first
# attempt those without a deal are asked, in the second all.
_ATTEMPTS = 3
_SIGNATURE_BYTES = 64  # of Ed25519


class SecureSums:
    """The parties of a run and their next deals.

    Args:
        run: the name of the run.
    """

    def __init__(self, run: str) -> None:
        self.run = run
        self._identities: dict[str, Identity] = {}
        self._deals: dict[str, Deal] = {}
        self._slots, self._number = 1, 0

    def prepare(self, connected: Iterable[str], slots: int, send: Send) -> None:
        """Make sure that the connected nodes have keys, and have dealt for the next sum. In a
        running federation they have: this sends nothing then.

        Args:
            connected: the nodes.
            slots: the largest number of groups in which a node has clients.
            send: sends messages and returns the answers.
        """
        nodes = sorted(connected)
        for _ in range(_ATTEMPTS):
            self._exchange_keys(nodes, slots, send)
            if self._exchange_deals(nodes, send):
                return

    def _exchange_keys(self, nodes: Sequence[str], slots: int, send: Send) -> None:
        """Ask the nodes that are new, or have restarted, for their keys."""
        new = [node for node in nodes if node not in self._identities]
        if new or slots > self._slots:
            self._slots = max(self._slots, slots)
            self._deals = {}
        if new:
            # A node that is away for a while stays a party, so that its return changes nothing.
            keep = dict(self._identities)
            answers = send({node: Message({"kind": "secure_keys", "party": node}) for node in new})
            for node, answer in answers.items():
                identity = _read(answer, lambda header, _: identity_from_json(header["identity"]))
                if isinstance(identity, Identity) and identity.name == node:
                    keep[node] = identity
            away = len(keep.keys() - set(nodes))
            if len(keep) - away < threshold_of(len(keep)):
                keep = {node: each for node, each in keep.items() if node in nodes}
            self._identities = keep

    def _exchange_deals(self, nodes: Sequence[str], send: Send) -> bool:
        """Ask the nodes that have not dealt for their deals. Returns False if one has restarted:
        then it is no party any more, and all must deal again.
        """
        missing = [n for n in nodes if n in self._identities and n not in self._deals]
        if not missing:
            return True
        asked = {"kind": "secure_deal", **self.directory()}
        parties = sorted(self._identities)
        for node, answer in send({node: Message(asked) for node in missing}).items():
            self.take_deal(node, answer, parties)
        return parties == sorted(self._identities)

    def directory(self) -> dict[str, Any]:
        """What a node needs for a deal."""
        parties = [identity_to_json(self._identities[name]) for name in sorted(self._identities)]
        return {"parties": parties, "slots": self._slots}

    def take_deal(self, node: str, answer: Message | NodeError, parties: Sequence[str]) -> None:
        """Keep the next deal of a node, or note that it has none. All deals that are kept are for
        the same parties: shares for others would not fit.

        Args:
            node: the node.
            answer: its answer.
            parties: the names of the parties that it dealt to, in order.
        """
        deal = _read(
            answer,
            lambda header, tensors: deal_from_json(
                header["deal"], shares_from_tensor(tensors.get("shares"), parties)
            ),
        )
        self._deals.pop(node, None)
        if isinstance(answer, NodeError) and NO_KEYS in answer.reason:
            self._identities.pop(node, None)  # it has restarted, and gets new keys
            self._deals = {}
        elif (
            isinstance(deal, Deal)
            and deal.name == node
            and list(parties) == sorted(self._identities)
        ):
            self._deals[node] = deal

    def session(self, number: str, groups: Groups, min_clients: int) -> Session:
        """The session of all nodes that have dealt."""
        if len(self._deals) < max(MIN_NODES, threshold_of(len(self._identities))):
            raise ProtocolError(
                f"{len(self._deals)} of {len(self._identities)} nodes are ready;"
                f" {max(MIN_NODES, threshold_of(len(self._identities)))} are needed"
            )
        keys = {node: deal.public_key for node, deal in self._deals.items()}
        numbers = {node: deal.number for node, deal in self._deals.items()}
        return Session(self.run, number, groups, keys, numbers, min_clients)

    def next_number(self) -> int:
        """The number of the next session of this process."""
        self._number += 1
        return self._number

    @property
    def ready(self) -> set[str]:
        """The nodes that have dealt."""
        return set(self._deals)

    def sum_message(self, node: str, session: Session, rest: Mapping[str, Any]) -> Message:
        """The part of a message that asks a node for masked sums; the deals are used up with it.

        Args:
            node: the node.
            session: the sum.
            rest: what else the node must know of its clients.
        """
        deals = [self._deals[name] for name in sorted(self._deals)]
        header = {
            "secure": {
                "session": session_to_json(session),
                "deals": [deal_to_json(deal) for deal in deals],
                **rest,
            },
            **self.directory(),
        }
        return Message(header, {"shares": shares_to_tensor(deal.shares[node] for deal in deals)})


class SecureMap:
    """The groups of a call of `map`, and the sums in its results.

    Args:
        ids: the clients of the call.
        reduce: the sums.
        records: all clients.
    """

    def __init__(self, ids: Tensor, reduce: SegmentSum, records: Sequence[ClientRecord]) -> None:
        self._reduce, self._clients = reduce, len(ids)
        self._nodes = [records[client].node for client in ids.tolist()]
        self._weights = _one_weight(reduce)
        self._choice = reduce.segment_ids if isinstance(reduce.segment_ids, str) else None
        segments = reduce.segment_ids if isinstance(reduce.segment_ids, Tensor) else None
        if segments is None and self._choice is None:
            segments = reduce.weights.ne(0).int().argmax(1)
        self._segments = [] if segments is None else segments.tolist()

    @property
    def slots(self) -> int:
        """The largest number of groups in which a node can have clients."""
        number = self._reduce.num_segments
        if self._choice is not None:
            return number + 1
        return min(number, max(Counter(self._nodes).values()))

    @property
    def lengths(self) -> dict[str, int]:
        """The length of the vectors that are not outputs."""
        return {} if self._choice is None else {COUNTS: self._reduce.num_segments}

    def groups(self, ready: Collection[str]) -> Groups:
        """The groups with enough clients on these nodes. If clients choose theirs, every node may
        be in every group.
        """
        here = [place for place, node in enumerate(self._nodes) if node in ready]
        if self._choice is not None:
            everyone = dict(Counter(self._nodes[place] for place in here))
            if sum(everyone.values()) < self._reduce.min_clients:
                return {}
            names = [COUNTS, *map(str, range(self._reduce.num_segments))]
            return {name: dict(everyone) for name in names}
        groups: dict[str, Counter[str]] = {}
        for place in here:
            if self._weights[place]:
                groups.setdefault(str(self._segments[place]), Counter())[self._nodes[place]] += 1
        return {
            name: dict(members)
            for name, members in groups.items()
            if members.total() >= self._reduce.min_clients
        }

    def places(self, session: Session) -> dict[str, Tensor]:
        """The places of the clients that take part, by node."""
        places: dict[str, list[int]] = {}
        for place, node in enumerate(self._nodes):
            group = COUNTS if self._choice is not None else str(self._segments[place])
            if node in session.groups.get(group, {}) and (
                self._weights[place] or self._choice is not None
            ):
                places.setdefault(node, []).append(place)
        return {node: torch.tensor(each) for node, each in places.items()}

    def of_node(self, places: Tensor) -> dict[str, Any]:
        """What a node must know of the clients at these places."""
        keys = self._reduce.keys
        return {
            "segments": [self._segments[p] for p in places.tolist()] if self._segments else [],
            "weights": [self._weights[p] for p in places.tolist()],
            "choice": self._choice,
            "keys": None if keys is None else list(keys),
            "clients_of_all": self._clients,
            "num_segments": self._reduce.num_segments,
        }

    def unmasked(
        self, call: SecureCall, answered: Tensor, send: Send
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The sums, and the total weight of each group; 0 for groups with too few clients.

        Args:
            call: the call, with the masked vectors.
            answered: the places of the clients whose replies are in them.
            send: sends messages and returns the answers.
        """
        least, weights = self._reduce.min_clients, [0.0] * self._reduce.num_segments
        if self._choice is None:
            terms: dict[int, list[float]] = {}
            for place in answered.tolist():
                terms.setdefault(self._segments[place], []).append(self._weights[place])
            enough = {group: each for group, each in terms.items() if len(each) >= least}
            for group, each in enough.items():
                weights[group] = math.fsum(each)
            groups = [str(group) for group in enough]
        else:
            counts = decode(call.unmask([COUNTS], send)[COUNTS])
            groups = [str(group) for group, count in enumerate(counts) if count >= least]
        sums = call.unmask(groups, send) if groups else {}
        number, length = self._reduce.num_segments, call.length
        rows = torch.zeros(number, length).double()
        for name, words in sums.items():
            values = decode(words)
            rows[int(name)] = torch.from_numpy(values[:length])
            if self._choice is not None:
                weights[int(name)] = float(values[length])
        tree, start = {}, 0
        for output, shape in call.summed:
            tree[output] = rows[:, start : start + _size(shape)].reshape(number, *shape)
            start += _size(shape)
        return tree, torch.tensor(weights, dtype=torch.float64)


def _one_weight(reduce: SegmentSum) -> list[float]:
    """The weight of each client in its only segment."""
    weights = reduce.weights.double().cpu()
    result: list[float] = (weights if weights.ndim == 1 else weights.amax(1)).tolist()
    return result


class SecureCall:
    """One call of `map` with secure sums.

    Args:
        sums: the parties.
        session: the sum.
        lengths: the length of the vectors of groups whose length does not follow from the outputs.
    """

    def __init__(self, sums: SecureSums, session: Session, lengths: Mapping[str, int]) -> None:
        self.session, self._sums = session, sums
        self._deals = [sums._deals[name] for name in session.public_keys]
        self._parties, self._fixed = sorted(sums._identities), dict(lengths)
        self.summed: Summed = []
        self._aggregation: Aggregation | None = None
        self._confirmations: dict[str, str] = {}  # the signatures of who dropped out

    def collect(self, answers: Mapping[str, Message | NodeError]) -> dict[str, str]:
        """Take the masked vectors, and the next deals.

        Args:
            answers: the answer of each node whose replies are accepted.

        Returns:
            Why the answer of a node cannot be used.
        """
        readable = {node: each for node, each in answers.items() if isinstance(each, Message)}
        specs = {node: _summed(answer) for node, answer in readable.items()}
        votes = Counter(spec for spec in specs.values() if spec)
        self.summed = list(votes.most_common(1)[0][0]) if votes else []
        # If clients choose their group, its weight is the last number.
        length = self.length + (COUNTS in self.session.groups)
        lengths = {group: self._fixed.get(group, length) for group in self.session.groups}
        self._aggregation = Aggregation(self.session, self._deals, self._parties, lengths)
        refused = {}
        for node in self.session.public_keys:
            answer = answers.get(node, NodeError("no answer"))
            self._sums.take_deal(node, answer, self._parties)
            if not isinstance(answer, Message):
                continue
            try:
                masked = masked_from_tensors(answer.tensors)
                if specs[node] not in (tuple(self.summed), ()):
                    raise ProtocolError("its outputs differ from those of the other nodes")
                self._aggregation.add(node, masked)
            except (ProtocolError, ValueError) as error:
                refused[node] = one_line(error)
        return refused

    def unmask(self, groups: Sequence[str], send: Send) -> dict[str, Words]:
        """The sums of these groups. `ProtocolError` if too few nodes reveal their shares."""
        assert self._aggregation is not None
        total = self._aggregation
        lists = {
            "number": self.session.number,
            "answered": total.answered,
            "dropped": total.dropped,
        }
        if total.dropped and not self._confirmations:
            confirm = Message({"kind": "secure_confirm", **lists})
            for node, answer in send(dict.fromkeys(total.answered, confirm)).items():
                signature = _read(answer, lambda header, _: bytes.fromhex(header["confirmation"]))
                if signature is not None and len(signature) == _SIGNATURE_BYTES:
                    self._confirmations[node] = signature.hex()
        asked = {
            "kind": "secure_reveal",
            **lists,
            "groups": list(groups),
            "confirmations": self._confirmations,
        }
        reveals = {}
        for node, answer in send({node: Message(asked) for node in total.answered}).items():
            reveal = _read(answer, lambda header, _: reveal_from_json(header["reveal"]))
            if reveal is not None and total.is_complete(reveal, groups):
                reveals[node] = reveal
        return total.sums(reveals, groups)

    @property
    def length(self) -> int:
        """The number of all summed numbers."""
        return sum(_size(shape) for _, shape in self.summed)

    @property
    def answered(self) -> list[str]:
        return [] if self._aggregation is None else self._aggregation.answered


def _read(answer: Message | NodeError, parse: Callable[[dict[str, Any], Any], Any]) -> Any:
    """What a node answered, or None. It comes from another machine: whatever it causes is the fault
    of that machine.
    """
    if isinstance(answer, NodeError):
        return None
    try:
        return parse(answer.header, answer.tensors)
    except Exception:
        return None


def _summed(answer: Message) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Name and shape of the summed outputs, as a node says; empty if it has no clients."""
    try:
        return tuple(
            (str(name), tuple(int(side) for side in shape))
            for name, shape in answer.header["summed"]
        )
    except Exception:
        return ()


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size
