"""Reads the nodes' answers from the SuperLink, each on its own: an answer that is never sent whole,
is too large or cannot be read costs only its own node.

Flower's own `pull_messages` reads all answers that have arrived together. It waits up to two hours
for the content of each, and raises an error for all if one of them is malformed.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from flwr.app import Array
from flwr.app import Message as FlowerMessage
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import (
    get_object_body,
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.superlink.grid.http_grid import HttpGrid

from fedclade.engines.remote.messages import MAX_HEADER_DEPTH, NodeError
from fedclade.io.safe_read import memory, parse_json

MEMORY_SHARE = 4  # an answer has at most this part of the machine's memory
MAX_OBJECTS = 20_000  # of an answer; Flower divides an array into objects of some MiB
_REQUESTS_AT_ONCE = 4


LOST = NodeError("its answer was lost on the way")


class LostAnswerError(Exception):
    """An answer whose content the SuperLink no longer has, or never got whole."""


class OversizedAnswerError(ValueError):
    """An answer with too many objects or bytes."""


@dataclass
class _Incomplete:
    """An answer whose content has not arrived completely."""

    message_id: str
    missing: set[str]
    contents: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


class ReplyReader:
    """Reads the answers to messages.

    Args:
        grid: Flower's connection to the nodes.
        max_bytes: the most bytes of an answer; None for a part of the machine's memory.
    """

    def __init__(self, grid: Grid, max_bytes: int | None = None) -> None:
        self.grid, self.max_bytes = grid, max_bytes or memory() // MEMORY_SHARE
        self._incomplete: dict[str, _Incomplete] = {}  # by the id of the message that it answers

    def read(self, message_ids: Iterable[str]) -> dict[str, FlowerMessage | NodeError]:
        """The answers that have arrived completely, by the id of the message that they answer, and
        an error in the place of an answer that cannot be read; `LOST` for one whose node ended
        while it sent the answer.
        """
        asked = list(message_ids)
        if not isinstance(self.grid, HttpGrid):  # in a simulation all nodes are of one program
            pulled = self.grid.pull_messages(asked)
            return {reply.metadata.reply_to_message_id: reply for reply in pulled}
        # Answers that came after the deadline of their message.
        self._incomplete = {key: self._incomplete[key] for key in self._incomplete if key in asked}
        answers: dict[str, FlowerMessage | NodeError] = {}
        self._find_new(self.grid, [key for key in asked if key not in self._incomplete], answers)
        for asked_id, incomplete in list(self._incomplete.items()):
            # The content comes from another machine: whatever it causes is the fault of that one.
            try:
                self._pull_missing(self.grid, incomplete)
                if incomplete.missing:
                    continue
                answers[asked_id] = self._inflated(incomplete)
            except LostAnswerError:
                answers[asked_id] = LOST
            except Exception as error:
                answers[asked_id] = _unreadable(error)
            del self._incomplete[asked_id]
        return answers

    def _find_new(
        self, grid: HttpGrid, asked: list[str], answers: dict[str, FlowerMessage | NodeError]
    ) -> None:
        if not asked:
            return
        response = grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=asked))
        for reply, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            asked_id = reply.metadata.reply_to_message_id
            objects = {part.object_id for part in iterate_object_tree(tree)}
            if len(objects) > MAX_OBJECTS:
                answers[asked_id] = _unreadable(OversizedAnswerError(f"{len(objects):,} objects"))
            else:
                self._incomplete[asked_id] = _Incomplete(reply.metadata.message_id, objects)

    def _pull_missing(self, grid: HttpGrid, answer: _Incomplete) -> None:
        """Pull the objects of an answer that have arrived; confirm the answer when it has all."""
        assert grid._run is not None
        client, run_id = grid._runtime_client, grid._run.run_id

        def pull(object_id: str) -> None:
            if answer.size > self.max_bytes:
                return
            response = client.PullObject(
                PullObjectRequest(node=grid.node, run_id=run_id, object_id=object_id)
            )
            if not response.object_found:
                raise LostAnswerError
            if response.object_available:
                answer.contents[object_id] = response.object_content
                answer.size += len(response.object_content)

        with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as pool:
            list(pool.map(pull, answer.missing))
        answer.missing -= answer.contents.keys()
        if answer.size > self.max_bytes:
            raise OversizedAnswerError(f"more than {self.max_bytes:,} bytes")
        if not answer.missing:
            client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(
                    node=grid.node, run_id=run_id, message_object_id=answer.message_id
                )
            )

    def _inflated(self, answer: _Incomplete) -> FlowerMessage:
        for content in answer.contents.values():
            self._check_array(content, answer.contents)
        message = inflate_object_from_contents(answer.message_id, answer.contents)
        if not isinstance(message, FlowerMessage):
            raise TypeError(f"it is a {type(message).__name__}, not a message")
        return message

    def _check_array(self, content: bytes, contents: dict[str, bytes]) -> None:
        """An array names its parts, and may name one of them a million times."""
        kind, parts, _ = get_object_head_values_from_object_content(content)
        if kind != "Array":
            return
        body = parse_json(get_object_body(content, Array).decode(), MAX_HEADER_DEPTH)
        sizes = [len(contents[part]) for part in parts]
        size = sum(sizes[place] for place in body["arraychunk_ids"])
        if size > self.max_bytes:
            raise OversizedAnswerError(f"an array of {size:,} bytes")


def _unreadable(error: Exception) -> NodeError:
    return NodeError(f"its answer cannot be read ({type(error).__name__}: {error})")
