"""Answers on the SuperLink: one that is incomplete, too large or malformed costs only its node."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from flwr.app import Message as FlowerMessage
from flwr.app import Metadata
from flwr.app.message import make_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.superlink.grid.http_grid import HttpGrid

from fedclade.engines.remote.messages import Message, NodeError
from fedclade.integrations.flower.grid_transport import (
    INLINE_BYTES,
    message_from_records,
    records_from_message,
)
from fedclade.integrations.flower.reply_reader import LOST, ReplyReader

LARGE = INLINE_BYTES // 4 + 1  # float32 numbers that travel as an array


class SuperLink:
    """Has the objects of answers. `contents` without an entry has not arrived."""

    def __init__(self) -> None:
        self.answers: list[tuple[Any, ObjectTree]] = []
        self.contents: dict[str, bytes] = {}
        self.announced: set[str] = set()
        self.pulled = 0

    def add(self, asked: str, message: Message) -> FlowerMessage:
        reply = make_message(
            metadata=Metadata(7, "", 1, 1, asked, "", 60.0, 60.0, "query"),
            content=records_from_message(message),
        )
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.answers.append((message_to_proto(reply), get_object_tree(reply)))
        objects = get_all_nested_objects(reply)
        self.contents |= {name: value.deflate() for name, value in objects.items()}
        self.announced |= objects.keys()
        return reply

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        found = [
            one
            for one in self.answers
            if one[0].metadata.reply_to_message_id in request.message_ids
        ]
        self.answers = [one for one in self.answers if one not in found]  # claimed once
        return SimpleNamespace(
            messages_list=[one for one, _ in found],
            message_object_trees=[tree for _, tree in found],
        )

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        content = self.contents.get(request.object_id)
        self.pulled += len(content or b"")
        return SimpleNamespace(
            object_found=request.object_id in self.announced,
            object_available=content is not None,
            object_content=content,
        )

    def ConfirmMessageReceived(self, request: Any) -> None: ...  # noqa: N802


@pytest.fixture
def superlink() -> SuperLink:
    return SuperLink()


def reader(superlink: SuperLink, max_bytes: int | None = None) -> ReplyReader:
    grid = HttpGrid("127.0.0.1:1", True, None, token="token")
    grid._client = superlink  # type: ignore[assignment]
    grid._run = SimpleNamespace(run_id=7)  # type: ignore[assignment]
    return ReplyReader(grid, max_bytes)


def honest(superlink: SuperLink, asked: str = "honest") -> None:
    superlink.add(asked, Message({"n": 1}, {"w": torch.arange(LARGE, dtype=torch.float32)}))


def is_honest(answer: object) -> bool:
    assert isinstance(answer, FlowerMessage)
    message = message_from_records(answer.content)
    return message.header == {"n": 1} and bool(
        (message.tensors["w"] == torch.arange(LARGE, dtype=torch.float32)).all()
    )


def test_answers_are_read_as_they_were_sent(superlink: SuperLink) -> None:
    honest(superlink)
    answers = reader(superlink).read(["honest", "silent"])
    assert list(answers) == ["honest"]
    assert is_honest(answers["honest"])


def test_an_answer_that_is_never_sent_whole_delays_no_other(superlink: SuperLink) -> None:
    honest(superlink)
    slow = superlink.add("slow", Message({}, {"w": torch.ones(LARGE)}))
    last = superlink.contents.pop(next(iter(get_all_nested_objects(slow))))
    read = reader(superlink)
    first = read.read(["honest", "slow"])
    assert list(first) == ["honest"]
    assert is_honest(first["honest"])
    assert read.read(["slow"]) == {}
    superlink.contents[next(iter(get_all_nested_objects(slow)))] = last  # it arrives after all
    assert list(read.read(["slow"])) == ["slow"]


def tamper(superlink: SuperLink, change: Any) -> None:
    """Change the body of the array of the answer "bad", and the names of what has it as a part."""
    reply = superlink.add("bad", Message({}, {"w": torch.zeros(LARGE)}))
    old = {name: value.deflate() for name, value in get_all_nested_objects(reply).items()}
    array = next(name for name, content in old.items() if content.startswith(b"Array "))
    head, _, body = old[array].partition(b"\0")
    new = change(json.loads(body))
    kind, parts, _ = head.decode().split(" ")
    superlink.contents[array] = f"{kind} {parts} {len(new)}".encode() + b"\0" + new


@pytest.mark.parametrize(
    "change",
    [
        lambda body: json.dumps(body | {"arraychunk_ids": [0] * 100_000}).encode(),
        lambda body: json.dumps(body | {"arraychunk_ids": [99]}).encode(),
        lambda body: json.dumps({}).encode(),
        lambda body: b"[" * 100_000,
        lambda body: b"\xff\xfe",
        lambda body: json.dumps(body | {"shape": "x"}).encode(),
    ],
    ids=[
        "one part a hundred thousand times",
        "no such part",
        "no body",
        "deep",
        "no text",
        "shape",
    ],
)
def test_a_malformed_array_costs_only_its_node(superlink: SuperLink, change: Any) -> None:
    tamper(superlink, change)
    honest(superlink)
    answers = reader(superlink, max_bytes=1 << 24).read(["bad", "honest"])
    assert is_honest(answers["honest"])
    bad = answers["bad"]
    assert isinstance(bad, NodeError) or not _readable(bad)


def _readable(reply: FlowerMessage) -> bool:
    try:
        message_from_records(reply.content)
    except Exception:
        return False
    return True


def test_an_answer_above_the_limit_is_not_pulled_whole(superlink: SuperLink) -> None:
    superlink.add("huge", Message({}, {"w": torch.arange(20.0 * LARGE)}))
    answers = reader(superlink, max_bytes=LARGE).read(["huge"])
    assert isinstance(answers["huge"], NodeError)
    assert "bytes" in answers["huge"].reason


def test_content_that_the_superlink_has_dropped_is_a_lost_answer(superlink: SuperLink) -> None:
    superlink.add("gone", Message({}, {"w": torch.zeros(LARGE)}))
    superlink.announced.pop()
    assert reader(superlink).read(["gone"])["gone"] is LOST
