"""Our messages as Flower's messages, and the transport that sends them through a Grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedclade.engines.remote.messages import Message, NodeError, decode, encode
from fedclade.errors import FedcladeError
from fedclade.integrations.flower.polling import shorten_pull_waits

HEADER, TENSORS = "fedclade.header", "fedclade.tensors"
# Tensors of up to this size travel in the record of the header. Each object of a Flower message
# costs six requests on its way, and an array is three objects; but objects that are the same for
# all nodes are stored once.
INLINE_BYTES = 1 << 18
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 0.25  # seconds between two polls for answers


def records_from_message(message: Message) -> RecordDict:
    """The content of a Flower message: the header as JSON, and all tensors as one array."""
    header, tensors = encode(message)
    if len(tensors) <= INLINE_BYTES:
        return RecordDict({HEADER: ConfigRecord({"json": header, "tensors": tensors})})
    array = Array(dtype="uint8", shape=(len(tensors),), stype="safetensors", data=tensors)
    arrays = ArrayRecord({"tensors": array})
    return RecordDict({HEADER: ConfigRecord({"json": header}), TENSORS: arrays})


def message_from_records(records: RecordDict) -> Message:
    """The message in the content of a Flower message. Nothing is unpickled."""
    record = records.config_records[HEADER]
    header, tensors = record["json"], record.get("tensors")
    if tensors is None:
        tensors = records.array_records[TENSORS]["tensors"].data
    if not (isinstance(header, str) and isinstance(tensors, bytes)):
        raise TypeError("its header is not text, or its tensors are not bytes")
    return decode(header, tensors)


class GridTransport:
    """Sends messages to the SuperNodes of a Grid.

    The name of a node is its Flower node id: with node authentication it belongs to the node's key,
    and no other node can have it.

    Args:
        grid: Flower's connection to the nodes.
        deadline: the seconds after which a call continues without the nodes that have not answered.
        min_nodes: the number of nodes that must have answered; otherwise the call keeps waiting.
        note: called with a line about what the call waits for.
    """

    def __init__(
        self,
        grid: Grid,
        deadline: float,
        min_nodes: int = 1,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.grid, self.deadline, self.min_nodes, self.note = grid, deadline, min_nodes, note
        shorten_pull_waits()
        self._answered_last: dict[str, bool] = {}  # whether each node answered its last message

    def nodes(self) -> list[str]:
        return sorted(str(node) for node in self.grid.get_node_ids())

    def send_and_receive(self, messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        recipients = list(messages)
        # A node that returns much later does not need the message.
        ttl = max(60.0, 2 * self.deadline)
        message_ids = self.grid.push_messages(
            [
                FlowerMessage(
                    records_from_message(messages[node]), int(node), MessageType.QUERY, ttl=ttl
                )
                for node in recipients
            ]
        )
        waiting = {
            message_id: node
            for message_id, node in zip(message_ids, recipients, strict=True)
            if message_id
        }
        answers: dict[str, Message | NodeError] = {
            node: NodeError("its node is gone")
            for node in recipients
            if node not in waiting.values()
        }
        # Nodes without a message in this call count too if they answered their last message: one
        # new node that hangs must not block the call.
        others = sum(
            answered for node, answered in self._answered_last.items() if node not in messages
        )
        start, wait, noted = time.monotonic(), _FIRST_WAIT, False
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    answers[node] = self._read(reply)
            if waiting and time.monotonic() - start > self.deadline:
                answered = _count_answers(answers)
                if answered >= min(self.min_nodes - others, len(recipients)):
                    late = NodeError(f"no answer within {self.deadline:g} s")
                    answers |= dict.fromkeys(waiting.values(), late)
                    break
                if not noted:
                    self.note(
                        f"{answered} of {len(recipients)} nodes have answered within"
                        f" {self.deadline:g} s; still waiting, because at least {self.min_nodes}"
                        " must answer (federation.min_nodes)"
                    )
                    noted = True
            if waiting:
                time.sleep(wait)
                wait = min(_LONGEST_WAIT, 1.5 * wait)
        self._answered_last |= {
            node: isinstance(answer, Message) for node, answer in answers.items()
        }
        # Registration may fail for all nodes: others may join later.
        registering = all(message.header.get("kind") == "register" for message in messages.values())
        if not registering and sum(self._answered_last.values()) < self.min_nodes:
            reasons = {
                answer.reason for answer in answers.values() if isinstance(answer, NodeError)
            }
            raise FedcladeError(
                f"federation.min_nodes = {self.min_nodes}: only {_count_answers(answers)} of"
                f" {len(recipients)} nodes answered ({'; '.join(sorted(reasons))}). Resume the run"
                " later.",
                "federation.min_nodes",
            )
        return answers

    @staticmethod
    def _read(reply: FlowerMessage) -> Message | NodeError:
        if reply.has_error():
            return NodeError(
                f"its node reports an error: {reply.error.reason or 'no reason given'} (code"
                f" {reply.error.code})"
            )
        try:
            return message_from_records(reply.content)
        except (KeyError, ValueError, TypeError) as error:
            return NodeError(f"its answer cannot be read ({error})")


def _count_answers(answers: Mapping[str, Message | NodeError]) -> int:
    return sum(isinstance(answer, Message) for answer in answers.values())
