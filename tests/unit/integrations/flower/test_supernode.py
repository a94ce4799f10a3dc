"""The node's own part of a SuperNode, without processes."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedclade.integrations.flower import supernode
from fedclade.integrations.flower.supernode import (
    LONGEST_POLL,
    SHORTEST_POLL,
    Polling,
    Received,
    clock_offset,
    drop_unreceived,
    fail_unfinished_tasks,
)

RUN = 7


def test_the_offset_of_a_clock_is_positive_ahead_of_the_server() -> None:
    date = "Wed, 18 Nov 2026 20:00:00 GMT"
    server = 1795032000.0
    assert clock_offset(date, server + 37) == 37
    assert clock_offset(date, server - 400) == -400


def test_a_wait_is_a_share_of_the_time_since_the_last_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    clock = SimpleNamespace(now=100.0)
    fake = SimpleNamespace(monotonic=lambda: clock.now, sleep=waits.append)
    monkeypatch.setattr(supernode, "time", fake)
    polling = Polling()
    for since in (0.0, 5.0, 3600.0):
        clock.now = 100.0 + since
        polling.sleep(3)
    polling.sleep(0.5)  # for the answer of the executor
    assert waits == [SHORTEST_POLL, 0.5, LONGEST_POLL, supernode.REPLY_POLL]


@pytest.fixture
def state() -> InMemoryNodeState:
    return InMemoryNodeState(ObjectStoreFactory().store())


def message(**given: Any) -> Message:
    """A message as a SuperNode stores it."""
    from flwr.app.message import make_message
    from flwr.app.metadata import Metadata

    metadata = Metadata(RUN, "", 1, 2, given.get("to", ""), "", time.time(), 3600.0, "query")
    content = RecordDict({"note": ConfigRecord({"text": given.get("text", "")})})
    found = make_message(metadata=metadata, content=content)
    found.metadata.__dict__["_message_id"] = found.object_id
    return found


def contents_of(stored: Message) -> dict[str, bytes]:
    """The objects of a message, as they are transferred."""
    return {name: value.deflate() for name, value in get_all_nested_objects(stored).items()}


def test_the_message_of_a_lost_executor_is_answered_at_once(state: InMemoryNodeState) -> None:
    asked = message()
    task = state.create_task("flwr-clientapp", RUN, "hash")
    assert task is not None
    state.store_message(asked)
    assert state.claim_task(task)
    assert state.activate_task(task)
    state.get_messages_legacy(run_ids=[RUN], is_reply=False)
    fail_unfinished_tasks(state, "killed")
    (reply,) = state.get_messages_legacy(is_reply=True)
    assert reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    assert reply.metadata.reply_to_message_id == asked.metadata.message_id
    (finished,) = state.get_tasks(task_ids=[task])
    assert (finished.status.status, finished.status.sub_status) == (
        Status.FINISHED,
        SubStatus.FAILED,
    )
    # Flower would answer the next message of the run when the token of the task expires.
    assert state.task_token_store == {}


def test_a_reply_that_was_announced_but_not_pushed_is_dropped(state: InMemoryNodeState) -> None:
    """Else the SuperNode would wait for its content forever."""
    asked = message()
    task = state.create_task("flwr-clientapp", RUN, "hash")
    assert task is not None
    state.store_message(asked)
    state.get_messages_legacy(run_ids=[RUN], is_reply=False)
    reply = message(to=asked.metadata.message_id)
    state.store_message_and_object_tree(reply, get_object_tree(reply), state.start_session(RUN))
    assert state.object_store.get(reply.object_id) == b""
    fail_unfinished_tasks(state, "killed")
    assert state.object_store.get(reply.object_id) is None


def test_a_message_whose_run_ended_while_it_came_is_dropped(state: InMemoryNodeState) -> None:
    """Else the executor would wait for its content forever, and the next run for the executor."""
    whole = message()
    state.store_message(whole)
    state.object_store.preregister(RUN, get_object_tree(whole))
    for name, value in contents_of(whole).items():
        state.object_store.put(name, value)
    task = state.create_task("flwr-clientapp", RUN, "hash")
    assert task is not None
    before = Received.by(state)
    assert before == Received(frozenset({task}), frozenset({whole.metadata.message_id}))

    partial = message(text="only announced")
    late = state.create_task("flwr-clientapp", RUN, "hash")
    assert late is not None
    state.object_store.preregister(RUN, get_object_tree(partial))
    state.store_message(partial)
    drop_unreceived(state, before)

    assert Received.by(state) == before
    (finished,) = state.get_tasks(task_ids=[late])
    assert finished.status.sub_status == SubStatus.FAILED
    assert state.object_store.get(partial.object_id) is None
    assert state.object_store.get(whole.object_id) == contents_of(whole)[whole.object_id]
