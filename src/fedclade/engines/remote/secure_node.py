"""The node's part of secure sums: it adds its clients' replies in fixed point and masks the sum."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedclade.core.federation import ClientResults, Failure
from fedclade.core.pytree import Tree, flatten
from fedclade.engines.remote.messages import Message, to_list
from fedclade.engines.remote.secure_messages import (
    COUNTS,
    NO_KEYS,
    confirmations_from_json,
    deal_from_json,
    deal_to_json,
    identity_from_json,
    identity_to_json,
    masked_to_tensors,
    reveal_to_json,
    session_from_json,
    shares_from_tensor,
    shares_to_tensor,
)
from fedclade.engines.reply_validation import UNSUMMABLE, out_of_range_segment
from fedclade.errors import InvalidInputError
from fedclade.privacy.secure_sum.fixed_point import Words, encode
from fedclade.privacy.secure_sum.protocol import Party, ProtocolError, Session

MAX_RUNS = 16  # runs whose keys a node keeps


class SecureNode:
    """The party that a node is in each run. Keys are in memory: after a restart they are new.

    Args:
        signing_key: the node's Ed25519 key; None for a random one.
        trusted: the Ed25519 keys of all nodes; None to trust those that the server sends first.
    """

    def __init__(
        self, signing_key: bytes | None = None, trusted: Collection[bytes] | None = None
    ) -> None:
        self._signing_key = signing_key or secrets.token_bytes(32)
        self._trusted = trusted
        self._parties: dict[str, Party] = {}

    @property
    def public_key(self) -> str:
        """The node's Ed25519 key, which other nodes may trust."""
        key = Ed25519PrivateKey.from_private_bytes(self._signing_key)
        return key.public_key().public_bytes_raw().hex()

    def keys(self, message: Message) -> Message:
        """The keys of this node in a run."""
        run, name = message.header["run"], str(message.header["party"])
        if run not in self._parties or self._parties[run].name != name:
            while len(self._parties) >= MAX_RUNS:
                del self._parties[next(iter(self._parties))]
            self._parties[run] = Party(name, run, self._signing_key, self._trusted)
        return Message({"identity": identity_to_json(self._parties[run].identity())})

    def deal(self, message: Message) -> Message:
        """A deal to these parties."""
        return self._dealt(self._party(message), message.header)

    def confirm(self, message: Message) -> Message:
        """The signature of who dropped out."""
        header = message.header
        signature = self._party(message).confirm(
            str(header["number"]), header["answered"], header["dropped"]
        )
        return Message({"confirmation": signature.hex()})

    def reveal(self, message: Message) -> Message:
        """The shares that unmask a sum."""
        header = message.header
        reveal = self._party(message).reveal(
            str(header["number"]),
            header["answered"],
            header["dropped"],
            header["groups"],
            confirmations_from_json(header["confirmations"]),
        )
        return Message({"reveal": reveal_to_json(reveal)})

    def masked(
        self, message: Message, results: Sequence[ClientResults]
    ) -> tuple[Message, list[ClientResults]]:
        """The masked sums and the deal of the next round, as a part of the answer.

        Args:
            message: the message that asked for the sums.
            results: the replies of the node's clients.

        Returns:
            The part, and the results without the outputs that were summed.
        """
        header, party = message.header, self._party(message)
        secure = header["secure"]
        names = [str(each[0]) for each in secure["deals"]]
        shares = shares_from_tensor(message.tensors.get("shares"), names)
        deals = [
            deal_from_json(each, {party.name: shares[name]})
            for each, name in zip(secure["deals"], names, strict=True)
        ]
        session = session_from_json(secure["session"], header["run"], deals)
        _check_own_counts(session, party.name, secure, len(header["clients"]))
        sums = _Sums(session, party.name, secure, header["clients"])
        rest = [sums.add(result) for result in results]
        masked = party.mask(session, deals, sums.vectors())
        deal = self._dealt(party, header)
        tensors = masked_to_tensors(masked) | deal.tensors
        return Message({**deal.header, "summed": sums.spec}, tensors), rest

    def _party(self, message: Message) -> Party:
        party = self._parties.get(message.header["run"])
        if party is None:
            raise ProtocolError(f"{NO_KEYS}; it gets new ones")
        return party

    def _dealt(self, party: Party, header: Mapping[str, Any]) -> Message:
        identities = [identity_from_json(each) for each in header["parties"]]
        deal = party.deal(identities, int(header["slots"]))
        order = sorted(deal.shares)
        tensors = {"shares": shares_to_tensor(deal.shares[name] for name in order)}
        return Message({"deal": deal_to_json(deal)}, tensors)


def _check_own_counts(
    session: Session, party: str, secure: Mapping[str, Any], clients: int
) -> None:
    """Refuse a session with other numbers of the node's clients than are in its vectors: a group
    would seem larger than it is.
    """
    counts = {group: each[party] for group, each in session.groups.items() if party in each}
    if secure["choice"] is None:
        own: Mapping[str, int] = Counter(map(str, secure["segments"]))
    else:
        own = dict.fromkeys(session.groups, clients) if clients else {}
    if counts != own:
        raise ProtocolError("other numbers of this node's clients than it was asked for")


class _Sums:
    """The sums over the node's clients, one vector for each group.

    Args:
        session: the sum.
        party: the name of the node in it.
        secure: the sum as the server described it.
        clients: the clients of the message.
    """

    def __init__(
        self, session: Session, party: str, secure: Mapping[str, Any], clients: Sequence[int]
    ) -> None:
        self._groups = [name for name, members in session.groups.items() if party in members]
        self._place = {client: place for place, client in enumerate(clients)}
        self._segments, self._weights = secure["segments"], secure["weights"]
        self._choice, self._keys = secure["choice"], secure["keys"]
        self._clients = int(secure["clients_of_all"])
        self._number = int(secure["num_segments"])
        self._totals: dict[str, Words] = {}
        self.spec: list[Any] = []  # name and shape of what is summed

    def add(self, result: ClientResults) -> ClientResults:
        """Add these replies. Returns what is left of the results."""
        outputs = result.outputs
        keys = [name for name in (self._keys or outputs) if name != self._choice]
        rest = {
            name: value
            for name, value in outputs.items()
            if name not in keys and name != self._choice
        }
        failures, kept = list(result.failures), []
        if len(result.ids):
            self.spec = [[name, list(outputs[name].shape[1:])] for name in keys]
            rows = flatten({name: outputs[name].double().cpu() for name in keys}).numpy()
            for row, client in enumerate(to_list(result.ids)):
                reason = self._add_client(client, row, rows[row], outputs)
                if reason is None:
                    kept.append(row)
                else:
                    failures.append(Failure(client, reason, rejected=True))
        places = torch.tensor(kept, dtype=torch.int64)
        return ClientResults(
            result.ids[places],
            {name: value[places] for name, value in rest.items()},
            failures=failures,
        )

    def _add_client(self, client: int, row: int, values: Any, outputs: Tree) -> str | None:
        """Add the reply of a client, or return why it cannot be added."""
        place = self._place[client]
        weight = float(self._weights[place])
        if self._choice is None:
            group = str(self._segments[place])
        else:
            chosen = int(outputs[self._choice][row])
            reason = out_of_range_segment(chosen, self._number)
            if reason is not None:
                return reason
            group = str(chosen)
        try:
            # Where clients choose, the server learns the weight of a group with its sum only.
            numbers = [] if self._choice is None else [weight]
            words = encode(np.append(values * weight, numbers), self._clients)
            one = encode(np.ones(1), self._clients)
        except InvalidInputError:
            return UNSUMMABLE
        self._plus(group, words, slice(0, len(words)), len(words))
        if self._choice is not None:
            number = int(group)
            self._plus(COUNTS, one, slice(number, number + 1), self._number)
        return None

    def _plus(self, group: str, words: Words, places: slice, length: int) -> None:
        total = self._totals.setdefault(group, np.zeros(length, np.uint64))
        total[places] += words

    def vectors(self) -> dict[str, Words]:
        """The vector of each group in which the node takes part; zeros where no client replied."""
        lengths = {len(words) for group, words in self._totals.items() if group != COUNTS}
        if self._groups and not lengths:
            raise ProtocolError("no client of the node has a reply to add")
        length = lengths.pop() if lengths else 0
        vectors = {}
        for group in self._groups:
            size = self._number if group == COUNTS else length
            vectors[group] = self._totals.get(group, np.zeros(size, np.uint64))
        return vectors
