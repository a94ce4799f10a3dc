"""The process that runs a node's ClientApp. It stays between messages, so that torch, the app and
the data are loaded once.

`supernode.py` starts it and writes to its standard input: first a line of JSON (the address and
the secret of the SuperNode's API), then for each message a line with the hash of its app. The end
of the input ends the process. It takes the place of Flower's SuperExec, which starts a process for
every message.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from typing import Any

import httpx
import psutil
from flwr.app import Context, Error, Message
from flwr.app.user_config import UserConfig
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import LoadClientAppError
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TASK_TOKEN_HEADER, TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedclade.engines.remote.node_policy import RefusedError
from fedclade.integrations.flower.policy_file import check_app
from fedclade.integrations.flower.polling import shorten_pull_waits

ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
HEARTBEAT_SECONDS = 10.0  # the SuperNode gives a task up after 60 s without one
_log = logging.getLogger("flwr")


class TaskToken:
    """Adds the token of the current task to requests; one connection serves all tasks."""

    def __init__(self) -> None:
        self.token = ""

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        if self.token and context.rpc_method != ACQUIRE:
            context.request.headers[TASK_TOKEN_HEADER] = self.token
        return call_next(context)


class Executor:
    """Answers the messages of one SuperNode with its ClientApp.

    Args:
        socket: the path of the Unix socket of the SuperNode's API.
        secret: the secret that signs requests for tasks.
        restart_after: the number of messages after which the process ends.
        max_growth: the bytes by which its memory may grow after its first message.
    """

    def __init__(self, socket: str, secret: bytes, restart_after: int, max_growth: int) -> None:
        self.restart_after, self.max_growth = restart_after, max_growth
        self.token = TaskToken()
        self.client = RuntimeHttpClient(
            "http://supernode",
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
                SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE}),
                self.token,
            ],
        )
        self.client._client = httpx.Client(transport=httpx.HTTPTransport(uds=socket), timeout=300.0)
        self.app_hash, self.app = "", ClientApp()
        self.answered, self.first_memory = 0, 0

    def must_restart_for(self, app_hash: str) -> bool:
        """Whether a process that has imported another app must not import this one too."""
        return self.app_hash not in ("", app_hash)

    @property
    def is_spent(self) -> bool:
        """Whether the process has answered enough messages, or uses too much memory."""
        grown = _memory() - self.first_memory if self.answered else 0
        return self.answered >= self.restart_after or grown > self.max_growth

    def answer(self) -> bool:
        """Answer the message that waits at the SuperNode. Returns False if the app did not load:
        then a part of it may be imported, and only a new process can try again.
        """
        response = self.client.AcquireTask(
            AcquireTaskRequest(supported_task_types={TaskType.CLIENT_APP})
        )
        if not (response.HasField("task") and response.token):
            return True
        start, self.token.token = time.monotonic(), response.token
        message: Message | None = None
        context: Context | None = None
        reply: Message | None = None
        status, details, loaded = SubStatus.FAILED, "", True
        try:
            message, context, run, fab = pull_task_input(self.client)
            self._load(run, fab, context.node_config)
            reply = self.app(message=message, context=context)
            status = SubStatus.COMPLETED
        # User code may raise anything; the text of the error stays in the node's log.
        except Exception as error:
            _log.exception("fedclade: the ClientApp failed")
            loaded = not isinstance(error, LoadClientAppError)
            details = str(error) if isinstance(error, RefusedError) else type(error).__name__
            if context is not None and "node-name" in context.node_config:
                details = f"{context.node_config['node-name']}: {details}"
            code = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
            if not loaded:
                code = ErrorCode.LOAD_CLIENT_APP_EXCEPTION
            if message is not None:
                reply = Message(Error(code=code, reason=details), reply_to=message)
        if reply is not None and context is not None:
            push_message(self.client, reply, context)
        push_task_output(self.client, context, status, details)
        self.token.token = ""
        self.answered += 1
        self.first_memory = self.first_memory or _memory()
        _log.info("fedclade: answered in %.2f s %s", time.monotonic() - start, details)
        return loaded

    def _load(self, run: Run, fab: Fab, node_config: UserConfig) -> None:
        if self.app_hash == fab.hash_str:
            return
        own = check_app(node_config, fab.content)
        if own is None:
            install_from_fab(fab.content, skip_prompt=True)
        load = get_load_client_app_fn(
            default_app_ref="", app_path=None if own is None else str(own), multi_app=True
        )
        self.app = load(run.fab_id, run.fab_version, fab.hash_str)
        self.app_hash = fab.hash_str

    def send_heartbeats(self) -> None:
        """Tell the SuperNode that the task goes on. If the run has been stopped, the process ends,
        so that its computation ends too.
        """
        while True:
            time.sleep(HEARTBEAT_SECONDS)
            token = self.token.token
            if not token:
                continue
            try:
                alive = self.client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
            except httpx.HTTPError:
                alive = True  # the end of the input tells whether the SuperNode has ended
            if not alive and self.token.token == token:
                os._exit(0)


def _memory() -> int:
    return int(psutil.Process().memory_info().rss)


def _read_input(lines: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        lines.put(line.strip())
    os._exit(0)  # the SuperNode has ended


def main() -> int:
    settings: dict[str, Any] = json.loads(sys.stdin.readline())
    executor = Executor(
        settings["socket"],
        bytes.fromhex(settings["secret"]),
        settings["restart_after"],
        settings["max_growth"],
    )
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_input, args=(lines,), daemon=True).start()
    # Imported while no message waits. What a run needs in addition comes with its first message.
    import fedclade.integrations.flower.apps  # noqa: F401

    shorten_pull_waits()
    threading.Thread(target=executor.send_heartbeats, daemon=True).start()
    _log.info("fedclade: the executor is ready")
    while True:
        app_hash = lines.get()
        if executor.must_restart_for(app_hash) or not executor.answer() or executor.is_spent:
            return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of the app or of a library must not keep the process
