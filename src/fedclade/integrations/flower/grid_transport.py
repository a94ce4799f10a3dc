"""Our messages as Flower's messages, and the transport that sends them through a Grid."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedclade.engines.remote.messages import Message, NodeError, decode, encode, one_line
from fedclade.errors import FedcladeError
from fedclade.integrations.flower.polling import shorten_pull_waits
from fedclade.integrations.flower.reply_reader import LOST, ReplyReader

HEADER, TENSORS = "fedclade.header", "fedclade.tensors"
# Tensors of up to this size travel in the record of the header. Each object of a Flower message
# costs six requests on its way, and an array is three objects; but objects that are the same for
# all nodes are stored once.
INLINE_BYTES = 1 << 18
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 0.25  # seconds between two polls for answers
CRASHED = NodeError("the process of its ClientApp ended during the computation")


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
        name_of: the name of a node in these lines.
    """

    def __init__(
        self,
        grid: Grid,
        deadline: float,
        min_nodes: int = 1,
        note: Callable[[str], None] = lambda text: None,
        name_of: Callable[[str], str] = str,
    ) -> None:
        self.grid, self.deadline, self.min_nodes = grid, deadline, min_nodes
        self.note, self.name_of = note, name_of
        self._reader = ReplyReader(grid)
        shorten_pull_waits()
        self._answered_last: dict[str, bool] = {}  # whether each node answered its last message
        self._hellos: dict[str, str] = {}  # the nodes whose first message has no answer, by its id

    def nodes(self) -> list[str]:
        return sorted(str(node) for node in self.grid.get_node_ids())

    def hello(self, messages: Mapping[str, Message], wait: bool) -> dict[str, Message | NodeError]:
        outstanding = self._hellos.values()
        new = {node: message for node, message in messages.items() if node not in outstanding}
        sent, answers = self._push(new)
        self._hellos |= sent
        start, seconds = time.monotonic(), _FIRST_WAIT
        while self._hellos:
            answers |= self._pull(self._hellos)
            if answers or not wait or time.monotonic() - start > self.deadline:
                break
            time.sleep(seconds)
            seconds = min(_LONGEST_WAIT, 1.5 * seconds)
        return answers

    def send_and_receive(self, messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        recipients, resent = list(messages), set[str]()
        waiting, answers = self._push(messages)
        # Nodes without a message in this call count too if they answered their last message: else
        # a call to a few nodes could wait for more nodes than it asks.
        others = sum(
            answered for node, answered in self._answered_last.items() if node not in messages
        )
        start, wait, progress = time.monotonic(), _FIRST_WAIT, Progress(self.note)
        while waiting:
            for node, answer in self._pull(waiting).items():
                if (answer is CRASHED or answer is LOST) and node not in resent:
                    what = "its ClientApp crashed" if answer is CRASHED else LOST.reason
                    self.note(f"{self.name_of(node)}: {what}; sending again")
                    resent.add(node)
                    again, failed = self._push({node: messages[node]})
                    waiting |= again
                    answers |= failed
                else:
                    answers[node] = answer
            if waiting and time.monotonic() - start > self.deadline:
                answered = _count_answers(answers)
                if answered >= min(self.min_nodes - others, len(recipients)):
                    late = NodeError(f"no answer within {self.deadline:g} s")
                    answers |= dict.fromkeys(waiting.values(), late)
                    break
                progress.note_once(
                    f"{answered} of {len(recipients)} nodes have answered within"
                    f" {self.deadline:g} s; still waiting, because at least {self.min_nodes}"
                    " must answer (federation.min_nodes)"
                )
            if waiting:
                names = ", ".join(sorted(self.name_of(node) for node in waiting.values()))
                progress.note_now_and_then(
                    f"{_count_answers(answers)} of {len(recipients)} nodes answered; waiting for"
                    f" {names}"
                )
                time.sleep(wait)
                wait = min(_LONGEST_WAIT, 1.5 * wait)
        self._answered_last |= {
            node: isinstance(answer, Message) for node, answer in answers.items()
        }
        if sum(self._answered_last.values()) < self.min_nodes:
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

    def _push(
        self, messages: Mapping[str, Message]
    ) -> tuple[dict[str, str], dict[str, Message | NodeError]]:
        """Send messages: the node of each message that was accepted, by the id of the message, and
        an error for each other node.
        """
        if not messages:
            return {}, {}
        # A node that returns much later does not need the message.
        ttl = max(60.0, 2 * self.deadline)
        pushed = self.grid.push_messages(
            [
                FlowerMessage(records_from_message(message), int(node), MessageType.QUERY, ttl=ttl)
                for node, message in messages.items()
            ]
        )
        sent = {
            message_id: node
            for message_id, node in zip(pushed, messages, strict=True)
            if message_id
        }
        gone = NodeError("its node is gone")
        return sent, {node: gone for node in messages if node not in sent.values()}

    def _pull(self, waiting: dict[str, str]) -> dict[str, Message | NodeError]:
        """The answers that have arrived; their messages are removed from `waiting`."""
        return {
            waiting.pop(message_id): self._read(reply)
            for message_id, reply in self._reader.read(waiting).items()
            if message_id in waiting
        }

    @staticmethod
    def _read(reply: FlowerMessage | NodeError) -> Message | NodeError:
        if isinstance(reply, NodeError):
            return reply
        if reply.has_error():
            if reply.error.code == ErrorCode.CLIENT_APP_CRASHED:
                return CRASHED
            reason = one_line(reply.error.reason) or "no reason given"
            return NodeError(f"its node reports an error: {reason} (code {reply.error.code})")
        try:
            return message_from_records(reply.content)
        # The content comes from another machine: whatever it causes is the fault of that one.
        except Exception as error:
            return NodeError(f"its answer cannot be read ({error})")


class Progress:
    """Writes lines about a call that takes long: at most one every `EVERY` seconds, and none that
    repeats the last one.
    """

    EVERY = 10.0

    def __init__(self, note: Callable[[str], None]) -> None:
        self.note, self._last, self._noted = note, time.monotonic(), set[str]()

    def note_once(self, text: str) -> None:
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def note_now_and_then(self, text: str) -> None:
        if time.monotonic() - self._last > self.EVERY and text not in self._noted:
            self._last = time.monotonic()
            self.note_once(text)


def _count_answers(answers: Mapping[str, Message | NodeError]) -> int:
    return sum(isinstance(answer, Message) for answer in answers.values())
