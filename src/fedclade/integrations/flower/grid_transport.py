"""Letters as Flower's messages, and the post that carries them through a Grid."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.serverapp import Grid

from fedclade.engines.remote.messages import Message
from fedclade.errors import FedcladeError

HEAD, TENSORS = "fedclade.head", "fedclade.tensors"
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 0.5  # seconds between two looks for answers


def records_from_message(message: Message) -> RecordDict:
    arrays = ArrayRecord(
        {
            name: Array(value.detach().cpu().contiguous().numpy())
            for name, value in message.tensors.items()
        }
    )
    return RecordDict({HEAD: ConfigRecord({"json": json.dumps(message.header)}), TENSORS: arrays})


def message_from_records(records: RecordDict) -> Message:
    """The letter in a message's content; numpy's own format, nothing is unpickled."""
    head = json.loads(str(records.config_records[HEAD]["json"]))
    tensors = {
        name: torch.from_numpy(array.numpy().copy())
        for name, array in records.array_records[TENSORS].items()
    }
    return Message(head, tensors)


class GridTransport:
    """deadline: seconds after which a round goes on without those who have not answered; least: so
    many sites must have answered, or it waits on; note: told what is waited for.

    A site goes by its Flower node id: with node authentication it belongs to the node's key, and no
    other node can have it.
    """

    def __init__(
        self,
        grid: Grid,
        deadline: float,
        least: int = 1,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.grid, self.deadline, self.least, self.note = grid, deadline, least, note
        self._well: dict[
            str, bool
        ] = {}  # whether each site answered the last letter that it was sent

    def nodes(self) -> list[str]:
        return sorted(str(node) for node in self.grid.get_node_ids())

    def send_and_receive(self, messages: Mapping[str, Message]) -> dict[str, Message | str]:
        asked = list(messages)
        # Not for ever: a node that comes back much later has no use for it.
        ttl = max(60.0, 2 * self.deadline)
        sent_messages = [
            FlowerMessage(
                records_from_message(messages[node]), int(node), MessageType.QUERY, ttl=ttl
            )
            for node in asked
        ]
        sent = list(self.grid.push_messages(sent_messages))
        waiting = {number: node for number, node in zip(sent, asked, strict=True) if number}
        answers: dict[str, Message | str] = {
            node: "its node is gone" for node in asked if node not in waiting.values()
        }
        # Sites that are not asked this time and were well at the last: for one newcomer that hangs
        # nobody waits.
        elsewhere = sum(well for node, well in self._well.items() if node not in messages)
        begin, wait, told = time.monotonic(), _FIRST_WAIT, False
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    answers[node] = self._read(reply)
            good = sum(isinstance(answer, Message) for answer in answers.values())
            if waiting and time.monotonic() - begin > self.deadline:
                if good >= min(self.least - elsewhere, len(asked)):
                    answers |= dict.fromkeys(
                        waiting.values(), f"no answer within {self.deadline:g} s"
                    )
                    break
                if not told:
                    self.note(
                        f"{good} of {len(asked)} sites have answered within {self.deadline:g} s,"
                        f" {self.least} must: waiting on"
                    )
                    told = True
            if waiting:
                time.sleep(wait)
                wait = min(_LONGEST_WAIT, 1.5 * wait)
        self._well |= {node: isinstance(answer, Message) for node, answer in answers.items()}
        first = all(
            message.header.get("kind") == "hello" for message in messages.values()
        )  # who has not come yet may still come
        if not first and sum(self._well.values()) < self.least:
            good = sum(isinstance(answer, Message) for answer in answers.values())
            reasons = "; ".join(
                sorted({str(answer) for answer in answers.values() if isinstance(answer, str)})
            )
            raise FedcladeError(
                f"federation: {good} of {len(asked)} sites answered, {self.least} must ({reasons});"
                " resume the run later."
            )
        return answers

    @staticmethod
    def _read(reply: FlowerMessage) -> Message | str:
        if reply.has_error():
            return (
                f"its node reports an error: {reply.error.reason or 'no reason given'} (code"
                f" {reply.error.code})"
            )
        try:
            return message_from_records(reply.content)
        except (KeyError, ValueError, TypeError) as error:
            return f"its answer cannot be read ({error})"
