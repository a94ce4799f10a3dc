"""A Flower SuperNode whose ClientApp stays in one process: `fedclade flower node`.

It starts Flower's own SuperNode code with `--isolation process` and, in place of SuperExec, one
executor (`executor.py`). A lost executor is replaced, and its message is answered at once with
Flower's error "ClientApp crashed", so that the server can send it again. Nothing here imports
torch.
"""

from __future__ import annotations

import json
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from logging import ERROR, WARN
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import uvicorn
from flwr.common.constant import Status, SubStatus
from flwr.supercore import log
from flwr.supercore.exit import add_exit_handler
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode import start_client_internal as flower_loop
from flwr.supernode.cli.flower_supernode import _parse_supernode_lifespan_config
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.nodestate.in_memory_nodestate import (
    CLIENT_APP_CRASHED_ERROR,
    InMemoryNodeState,
)

from fedclade.integrations.flower.polling import shorten_pull_waits

# Seconds between two questions to the SuperLink whether a message waits. The longer ago the last
# message, the longer: a share of that time, so that a wait is short compared with a round.
SHORTEST_POLL, LONGEST_POLL, POLL_SHARE = 0.1, 1.0, 0.1
REPLY_POLL = 0.01  # whether the executor has answered; within this process
UNFINISHED = (Status.PENDING, Status.STARTING, Status.RUNNING)
LIVED = 10.0  # seconds; an executor that ran longer did not fail at its start
LONGEST_RESTART_WAIT = 30.0
# The SuperLink rejects a node whose clock is this far ahead of its own, or this far behind.
AHEAD, BEHIND = 5.0, 305.0


@dataclass(frozen=True)
class ExecutorLimits:
    """When the executor is replaced by a new one.

    Args:
        restart_after: after this number of messages.
        max_growth: if its memory has grown by this number of bytes since its first message.
    """

    restart_after: int = 1000
    max_growth: int = 2 << 30


class ExecutorProcess:
    """Starts the executor and replaces it when it ends.

    Args:
        state: the state of the SuperNode, with its messages and tasks.
        socket_path: the Unix socket of the SuperNode's API.
        secret: the secret that signs the executor's requests for tasks.
        limits: when the executor is replaced.
    """

    def __init__(
        self, state: InMemoryNodeState, socket_path: Path, secret: bytes, limits: ExecutorLimits
    ) -> None:
        self.state = state
        self._settings = {
            "socket": str(socket_path),
            "secret": secret.hex(),
            "restart_after": limits.restart_after,
            "max_growth": limits.max_growth,
        }
        self._lock = threading.Lock()
        self._stopped = False
        self._process = self._start()
        threading.Thread(target=self._watch, daemon=True).start()

    def notify(self) -> None:
        """Write to the executor that a message waits."""
        with self._lock:
            for task in self.state.get_tasks(statuses=[Status.PENDING], limit=1):
                self._write(self._process, task.fab_hash)

    def stop(self) -> None:
        self._stopped = True
        self._process.kill()

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedclade.integrations.flower.executor"],
            stdin=subprocess.PIPE,
            text=True,
        )
        self._write(process, json.dumps(self._settings))
        return process

    @staticmethod
    def _write(process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        with suppress(OSError):  # it has just ended; the next one gets the line
            print(line, file=process.stdin, flush=True)

    def _watch(self) -> None:
        wait = 0.0
        while True:
            begin = time.monotonic()
            code = self._process.wait()
            if self._stopped:
                return
            if code:
                log(WARN, "fedclade: the executor ended with code %s; a new one starts", code)
                fail_unfinished_tasks(self.state, f"the executor ended with code {code}")
                lived = time.monotonic() - begin > LIVED
                wait = 0.0 if lived else min(LONGEST_RESTART_WAIT, 2 * wait + 1)
                time.sleep(wait)
            with self._lock:
                self._process = self._start()
            self.notify()


def fail_unfinished_tasks(state: InMemoryNodeState, reason: str) -> None:
    """Answer the messages of all unfinished tasks with an error, as Flower does after 60 s."""
    for task in state.get_tasks(statuses=UNFINISHED):
        _drop_incomplete_replies(state, task.run_id)
        # Flower answers only messages that an executor has fetched.
        state.get_messages_legacy(run_ids=[task.run_id], is_reply=False)
        state._store_error_replies({task.run_id}, CLIENT_APP_CRASHED_ERROR)
        state.finish_task(task.task_id, SubStatus.FAILED, reason)


def _drop_incomplete_replies(state: InMemoryNodeState, run_id: int) -> None:
    """Drop replies that the executor has announced but not pushed: the SuperNode would wait for
    their content forever.
    """
    for message_id, entry in list(state.msg_store.items()):
        metadata = entry.message.metadata
        if metadata.run_id == run_id and metadata.reply_to_message_id:
            contents = [
                state.object_store.get(tree.object_id)
                for tree in iterate_object_tree(state.object_store.get_object_tree(message_id))
            ]
            if b"" in contents:
                state.object_store.delete(message_id)


@dataclass(frozen=True)
class Received:
    """The tasks and messages of a SuperNode at one time.

    Args:
        tasks: the ids of unfinished tasks.
        messages: the ids of messages, without replies.
    """

    tasks: frozenset[int]
    messages: frozenset[str]

    @staticmethod
    def by(state: InMemoryNodeState) -> Received:
        """What a SuperNode has now."""
        return Received(
            frozenset(task.task_id for task in state.get_tasks(statuses=UNFINISHED)),
            frozenset(
                name
                for name, entry in list(state.msg_store.items())
                if not entry.message.metadata.reply_to_message_id
            ),
        )


def drop_unreceived(state: InMemoryNodeState, before: Received) -> None:
    """Drop a message whose run ended while its content was received. Flower keeps it and its task,
    and the executor would wait for the content, and later messages for the executor.

    Args:
        state: the state of the SuperNode.
        before: what it had before the message came.
    """
    now = Received.by(state)
    for task in now.tasks - before.tasks:
        state.finish_task(task, SubStatus.FAILED, "the run ended")
    for message in now.messages - before.messages:
        state.delete_messages(message_ids=[message])
        state.object_store.delete(message)


class Polling:
    """The waits of Flower's loop, which are fixed there: `sleep(3)` while no message waits, and
    `sleep(0.5)` for the answer of the executor. Flower's loop calls `time.sleep`, and this object
    takes the place of its `time`.
    """

    def __init__(self) -> None:
        self.last_message = time.monotonic()

    def sleep(self, seconds: float) -> None:
        if seconds < 1:
            time.sleep(REPLY_POLL)
            return
        share = POLL_SHARE * (time.monotonic() - self.last_message)
        time.sleep(min(LONGEST_POLL, max(SHORTEST_POLL, share)))


def run_node(arguments: Sequence[str], limits: ExecutorLimits) -> None:
    """Run a SuperNode until a signal ends it.

    Args:
        arguments: options of `flower-supernode`.
        limits: when the executor is replaced.
    """
    # Flower checks the options, and reads the certificates and keys that they name.
    sys.argv = ["flower-supernode", *arguments, "--isolation", "process"]
    config = _parse_supernode_lifespan_config()
    store = ObjectStoreFactory()
    factory = NodeStateFactory(objectstore_factory=store)
    state = cast(InMemoryNodeState, factory.state())
    secret = secrets.token_bytes(32)
    with tempfile.TemporaryDirectory(prefix="fedclade-node-") as folder:  # only the owner can enter
        path = Path(folder) / "api"
        server = _serve(create_app(factory, secret), path)
        executor = ExecutorProcess(state, path, secret, limits)
        add_exit_handler(executor.stop)
        add_exit_handler(lambda: setattr(server, "should_exit", True))
        shorten_pull_waits()
        _patch_loop(executor)
        warn_of_clock(config.server_address, config.insecure, config.root_certificates)
        flower_loop.start_client_internal(
            state_factory=factory,
            server_address=config.server_address,
            root_certificates=config.root_certificates,
            insecure=config.insecure,
            authentication_keys=config.authentication_keys,
            max_retries=config.max_retries,
            max_wait_time=config.max_wait_time,
            node_config=config.node_config,
            isolation=config.isolation,
            trusted_entities=config.trusted_entities,
            superexec_auth_secret=secret,
        )


def warn_of_clock(superlink: str, insecure: bool, root_certificates: bytes | str | None) -> None:
    """Log an error if the clock of this machine is so far off that the SuperLink rejects the node.

    Args:
        superlink: the address of the SuperLink or of its proxy.
        insecure: whether the connection has no TLS.
        root_certificates: the certificate of the CA.
    """
    verify: ssl.SSLContext | bool = not insecure
    if isinstance(root_certificates, bytes):
        verify = ssl.create_default_context(cadata=root_certificates.decode())
    try:
        scheme = "http" if insecure else "https"
        answer = httpx.get(f"{scheme}://{superlink}/v1/fleet/", verify=verify, timeout=10.0)
        off = clock_offset(answer.headers["date"], time.time())
    except (httpx.HTTPError, KeyError, ValueError):  # Flower's own connection reports what is wrong
        return
    if not -BEHIND < off < AHEAD:
        log(
            ERROR,
            "fedclade: the clock of this machine is %.0f s %s that of the server, which rejects the"
            " node. Set the clock, for example with NTP.",
            abs(off),
            "ahead of" if off > 0 else "behind",
        )


def clock_offset(date: str, now: float) -> float:
    """The seconds by which a clock is ahead of the `Date` of an HTTP answer.

    Args:
        date: the header, which has whole seconds.
        now: the time of the clock.
    """
    return now - parsedate_to_datetime(date).timestamp()


def _patch_loop(executor: ExecutorProcess) -> None:
    """Change what Flower's loop has no option for: its waits, and who learns of a message."""
    polling, pull = Polling(), flower_loop._pull_and_store_message

    def pull_and_notify(**arguments: Any) -> int | None:
        before = Received.by(executor.state)
        run_id = pull(**arguments)
        if run_id is None:
            drop_unreceived(executor.state, before)
        else:
            polling.last_message = time.monotonic()
            executor.notify()
        return run_id

    for name, value in (
        ("time", SimpleNamespace(sleep=polling.sleep)),
        ("_pull_and_store_message", pull_and_notify),
    ):
        setattr(flower_loop, name, value)


def _serve(app: Any, path: Path) -> uvicorn.Server:
    """Serve the SuperNode's API on a Unix socket. Other users of the machine cannot reach it."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    server = uvicorn.Server(uvicorn.Config(app=app, access_log=False, log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return server
