"""What the server knows of the client state that stays on the nodes."""

from __future__ import annotations

import json
import secrets

import torch

from fedclade.core.pytree import Tree
from fedclade.engines.remote.node import MAX_COMMITTED


class RemoteClientState:
    """Client state stays on the nodes. For each node the server keeps the list of the committed
    transactions that it may return to, and sends it with each message, so that the node discards
    all other state.

    A transaction is a round, or a call between rounds that is never committed. A round is committed
    on the nodes that answered all of its messages.
    """

    def __init__(self) -> None:
        self.version = 0
        self._committed: dict[str, list[str]] = {}
        # Whether the node answered all messages of this transaction.
        self._answered: dict[str, bool] = {}
        self._calls: dict[str, int] = {}  # the messages of this transaction to each node
        self._session, self._number = secrets.token_hex(4), 0
        # The last committed transaction of each node in the state that the server may return to.
        self._retained: dict[str, str] = {}

    @property
    def transaction_id(self) -> str:
        return f"{self._session}-{self._number}"

    def committed_at(self, state_key: str) -> list[str]:
        return self._committed.get(state_key, [])

    def retained_at(self, state_key: str) -> str:
        """The transaction whose state the node must keep; "" for none."""
        return self._retained.get(state_key, "")

    def next_call(self, state_key: str) -> int:
        """The number of the next message of this transaction to a node. A node that gets a message
        again, because its answer was lost, starts from the state before that message.
        """
        self._calls[state_key] = call = self._calls.get(state_key, -1) + 1
        return call

    def set_answered(self, state_key: str, answered: bool) -> None:
        """Record whether the node answered a message of this transaction that changes its clients'
        state. If one message has no answer, the node's state of this transaction is discarded.
        """
        self._answered[state_key] = self._answered.get(state_key, True) and answered

    def set_lost(self, state_key: str) -> None:
        """Record that the node has lost its client state."""
        self._committed.pop(state_key, None)

    def commit(self, version: int) -> None:
        for state_key, answered in sorted(self._answered.items()):
            if answered:
                committed = [*self.committed_at(state_key), self.transaction_id]
                retained = self.retained_at(state_key)
                # The node has a snapshot of each, and keeps no others.
                older = [each for each in committed[:-MAX_COMMITTED] if each == retained]
                self._committed[state_key] = older + committed[-MAX_COMMITTED:]
        self.version = version
        self.rollback()

    def rollback(self) -> None:
        self._answered, self._calls = {}, {}
        self._number += 1

    def tensors(self) -> Tree:
        return {
            "committed": torch.frombuffer(
                bytearray(json.dumps(self._committed).encode()), dtype=torch.uint8
            )
        }

    def retain(self, tensors: Tree) -> None:
        self._retained = {
            state_key: transactions[-1]
            for state_key, transactions in _committed_in(tensors).items()
            if transactions
        }

    def restore(self, tensors: Tree, version: int) -> None:
        if tensors:
            self._committed = _committed_in(tensors)
        self.version = version
        self.rollback()


def _committed_in(tensors: Tree) -> dict[str, list[str]]:
    """The committed transactions of each node that `RemoteClientState.tensors` returned."""
    committed: dict[str, list[str]] = json.loads(bytes(tensors["committed"].tolist()))
    return committed
