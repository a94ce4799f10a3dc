"""Letters as Flower's messages, and the post that carries them through a Grid."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedclade.engines.remote.messages import Letter
from fedclade.errors import FedcladeError

HEAD, TENSORS = "fedclade.head", "fedclade.tensors"
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 0.5  # seconds between two looks for answers


def records_of(letter: Letter) -> RecordDict:
    arrays = ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in letter.tensors.items()})
    return RecordDict({HEAD: ConfigRecord({"json": json.dumps(letter.head)}), TENSORS: arrays})


def letter_of(records: RecordDict) -> Letter:
    """The letter in a message's content; numpy's own format, nothing is unpickled."""
    head = json.loads(str(records.config_records[HEAD]["json"]))
    tensors = {name: torch.from_numpy(array.numpy().copy()) for name, array in records.array_records[TENSORS].items()}
    return Letter(head, tensors)


class GridPost:
    """deadline: seconds after which a round goes on without those who have not answered; least: so many sites must have answered,
    or it waits on; note: told what is waited for.

    A site goes by its Flower node id: with node authentication it belongs to the node's key, and no other node can have it.
    """

    def __init__(self, grid: Grid, deadline: float, least: int = 1, note: Callable[[str], None] = lambda text: None) -> None:
        self.grid, self.deadline, self.least, self.note = grid, deadline, least, note
        self._well: dict[str, bool] = {}  # whether each site answered the last letter that it was sent

    def sites(self) -> list[str]:
        return sorted(str(node) for node in self.grid.get_node_ids())

    def exchange(self, letters: Mapping[str, Letter]) -> dict[str, Letter | str]:
        asked = list(letters)
        # Not for ever: a node that comes back much later has no use for it.
        ttl = max(60.0, 2 * self.deadline)
        messages = [Message(records_of(letters[site]), int(site), MessageType.QUERY, ttl=ttl) for site in asked]
        sent = list(self.grid.push_messages(messages))
        waiting = {number: site for number, site in zip(sent, asked, strict=True) if number}
        answers: dict[str, Letter | str] = {site: "its node is gone" for site in asked if site not in waiting.values()}
        # Sites that are not asked this time and were well at the last: for one newcomer that hangs nobody waits.
        elsewhere = sum(well for site, well in self._well.items() if site not in letters)
        begin, wait, told = time.monotonic(), _FIRST_WAIT, False
        while waiting:
            for reply in self.grid.pull_messages(list(waiting)):
                site = waiting.pop(reply.metadata.reply_to_message_id, None)
                if site is not None:
                    answers[site] = self._read(reply)
            good = sum(isinstance(answer, Letter) for answer in answers.values())
            if waiting and time.monotonic() - begin > self.deadline:
                if good >= min(self.least - elsewhere, len(asked)):
                    answers |= dict.fromkeys(waiting.values(), f"no answer within {self.deadline:g} s")
                    break
                if not told:
                    self.note(f"{good} of {len(asked)} sites have answered within {self.deadline:g} s, {self.least} must: waiting on")
                    told = True
            if waiting:
                time.sleep(wait)
                wait = min(_LONGEST_WAIT, 1.5 * wait)
        self._well |= {site: isinstance(answer, Letter) for site, answer in answers.items()}
        first = all(letter.head.get("kind") == "hello" for letter in letters.values())  # who has not come yet may still come
        if not first and sum(self._well.values()) < self.least:
            good = sum(isinstance(answer, Letter) for answer in answers.values())
            reasons = "; ".join(sorted({str(answer) for answer in answers.values() if isinstance(answer, str)}))
            raise FedcladeError(f"federation: {good} of {len(asked)} sites answered, {self.least} must ({reasons}); resume the run later.")
        return answers

    @staticmethod
    def _read(reply: Message) -> Letter | str:
        if reply.has_error():
            return f"its node reports an error: {reply.error.reason or 'no reason given'} (code {reply.error.code})"
        try:
            return letter_of(reply.content)
        except (KeyError, ValueError, TypeError) as error:
            return f"its answer cannot be read ({error})"
