"""Keeps a federation on one machine alive: starts SuperLink and SuperNodes, restarts what dies,
says how they are in DIR/state.json.

`python -m fedclade.integrations.flower.local_deployment.supervisor DIR`. Nothing of fedclade is
imported, so that `local.py` can start the file itself: the package would bring torch and 300 MB
into a process that waits.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil

HOST = "127.0.0.1"
CONNECTION = "fed"  # the name of this federation in Flower's config.toml
SUPERLINK = "superlink"
# Every process of a federation carries these two, its children too: so they are found again whoever
# their parent is by then.
FOLDER_MARK, SERVICE_MARK = "FEDCLADE_FEDERATION", "FEDCLADE_SERVICE"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": (
        "1"
    ),  # else every run installs the app's dependencies anew
}
HEALTHY_WITHIN = 60.0
# The SuperLink takes a node that died for online until two heartbeats of 30 s are missing, and
# refuses its key so long (code 2004).
NODE_WAIT, SUPERLINK_WAIT, NEXT_WAIT = 5.0, 1.0, 15.0
LIVED = 30.0  # who lived longer did not fail at the start


class FlowerCommandError(RuntimeError):
    """A Flower command failed or did not answer."""


@dataclass(frozen=True)
class Plan:
    """What to start, and where everything lies. `configs` has the `--node-config` of each node."""

    folder: Path
    secure: bool
    port: int
    configs: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path) -> Plan:
        given = json.loads((folder / "plan.json").read_text())
        return cls(folder, given["secure"], given["port"], tuple(given["configs"]))

    def save(self) -> None:
        write_json(
            self.folder / "plan.json",
            {"secure": self.secure, "port": self.port, "configs": self.configs},
        )

    @property
    def nodes(self) -> list[str]:
        return [f"node-{index}" for index in range(len(self.configs))]

    @property
    def home(self) -> Path:
        """FLWR_HOME of the SuperLink and of `flwr`."""
        return self.folder / "flwr"

    @property
    def authority(self) -> Path | None:
        return self.folder / "tls" / "ca.crt" if self.secure else None

    def key(self, node: str) -> Path:
        return self.folder / "keys" / node

    def log(self, service: str) -> Path:
        return self.folder / "logs" / f"{service}.log"

    def superlink_command(self) -> list[str]:
        tls = self.folder / "tls"
        secured = [
            "--ssl-ca-certfile",
            f"{tls}/ca.crt",
            "--ssl-certfile",
            f"{tls}/server.pem",
            "--ssl-keyfile",
            f"{tls}/server.key",
        ]
        how = [*secured, "--enable-supernode-auth"] if self.secure else ["--insecure"]
        return [
            "flower-superlink",
            "--host",
            HOST,
            "--port",
            str(self.port),
            "--database",
            str(self.folder / "superlink.db"),
            *how,
        ]

    def node_command(
        self, port: int, config: str, authority: Path | None, key: Path | None
    ) -> list[str]:
        how = ["--root-certificates", str(authority)] if authority else ["--insecure"]
        how += ["--auth-supernode-private-key", str(key)] if key else []
        where = ["--superlink", f"{HOST}:{self.port}", "--host", HOST, "--port", str(port)]
        return ["flower-supernode", *where, "--node-config", config, *how]


@dataclass
class Service:
    """The SuperLink or a SuperNode: its process, how often it was restarted and why it ended
    last.
    """

    name: str
    pid: int | None = None
    port: int | None = None
    restarts: int = 0
    reason: str = ""
    node_id: str = ""
    registered: bool = False
    # since its last start it has told its log the id that the SuperLink gave it
    connected: bool = False


@dataclass
class State:
    """What the supervisor writes down. `phase` is starting, running or failed."""

    phase: str = "starting"
    message: str = "starting the SuperLink"
    services: list[Service] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path) -> State:
        given = json.loads((folder / "state.json").read_text())
        return cls(
            given["phase"], given["message"], [Service(**service) for service in given["services"]]
        )

    def save(self, folder: Path) -> None:
        write_json(folder / "state.json", asdict(self))


@dataclass
class Running:
    """A process that was started: since when, where its part of the log begins, and when to start
    the next one in its place.
    """

    process: subprocess.Popen[bytes]
    since: float
    offset: int
    due: float | None = None


class Supervisor:
    def __init__(self, plan: Plan, state: State) -> None:
        self.plan, self.state = plan, state
        self.running: dict[str, Running] = {}
        self.superlink, *self.nodes = state.services

    def work(self) -> int:
        """Start everything, then watch for ever; what ends it is a signal. The exit code is 1 where
        the start fails.
        """
        try:
            self.start(self.superlink)
            self._wait_until_healthy()
            for node in self.nodes if self.plan.secure else ():
                self._register(node)
        except FlowerCommandError as error:
            self._tell("failed", str(error))
            return 1
        for node in self.nodes:
            self.start(node)
        self._tell("running", "")
        while True:
            for service in self.state.services:
                self.watch(service, time.monotonic())
            time.sleep(0.5)

    def start(self, service: Service) -> None:
        log = self.plan.log(service.name)
        home, command = self.plan.home, self.plan.superlink_command()
        service.port, limits = self.plan.port, {}
        if service is not self.superlink:
            config = self.plan.configs[self.nodes.index(service)]
            # A home of its own: two nodes that unpack the same app into one folder may read half of
            # it.
            home, service.port = self.plan.folder / service.name, free_port()
            command = self.plan.node_command(
                service.port,
                config,
                self.plan.authority,
                self.plan.key(service.name) if self.plan.secure else None,
            )
            limits = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(self.nodes)))}
        marks = {FOLDER_MARK: str(self.plan.folder), SERVICE_MARK: service.name}
        with log.open("ab") as out:
            # What the caller has set goes before our own choice of threads.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=limits | environment(home) | marks,
            )
            self.running[service.name] = Running(process, time.monotonic(), out.tell())
        service.pid, service.connected = process.pid, False
        self.state.save(self.plan.folder)

    def watch(self, service: Service, now: float) -> None:
        """One look: has it died, is it time to start it again, has a node told its id?"""
        running = self.running[service.name]
        if running.due is not None:
            if now >= running.due:
                # An app in the middle of a long computation outlives the SuperLink or SuperNode
                # that started it.
                end(processes(self.plan.folder).get(service.name, []), grace_seconds=0.0)
                service.restarts += 1
                self.start(service)
            return
        code = running.process.poll()
        if code is not None:
            first = SUPERLINK_WAIT if service is self.superlink else NODE_WAIT
            running.due = now + (first if now - running.since > LIVED else NEXT_WAIT)
            service.pid, service.connected, service.reason = (
                None,
                False,
                self._reason(service, code),
            )
        elif service is not self.superlink and not service.connected:
            told = re.findall(r"SuperNode ID: (\d+)", self._log(service))
            if not told:
                return
            service.node_id, service.connected = told[-1], True
        else:
            return
        self.state.save(self.plan.folder)

    def _wait_until_healthy(self) -> None:
        process = self.running[SUPERLINK].process
        context = (
            ssl.create_default_context(cafile=str(self.plan.authority))
            if self.plan.authority
            else None
        )
        address = f"{'https' if context else 'http'}://{HOST}:{self.plan.port}/health"
        until = time.monotonic() + HEALTHY_WITHIN
        while time.monotonic() < until:
            if (code := process.poll()) is not None:
                self.superlink.pid = None
                raise FlowerCommandError(
                    f"the SuperLink ended at once. {self._reason(self.superlink, code)}"
                )
            try:
                with urlopen(address, timeout=5, context=context):
                    return
            except OSError:
                time.sleep(0.2)
        raise FlowerCommandError(f"the SuperLink did not answer within {HEALTHY_WITHIN:.0f} s")

    def _register(self, node: Service) -> None:
        if node.registered:  # in the SuperLink's database, from an earlier start
            return
        self._tell("starting", f"registering {node.name}")
        key = self.plan.key(node.name)
        node.node_id = str(
            ask(
                self.plan.home,
                "supernode",
                "register",
                f"{key}.pub",
                CONNECTION,
                "--name",
                node.name,
            )["node-id"]
        )
        node.registered = True

    def _tell(self, phase: str, message: str) -> None:
        self.state.phase, self.state.message = phase, message
        self.state.save(self.plan.folder)

    def _log(self, service: Service) -> str:
        return log_text(self.plan.log(service.name), self.running[service.name].offset)

    def _reason(self, service: Service, code: int) -> str:
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = [line for line in self._log(service).splitlines() if line.strip()]
        said = [
            line
            for line in lines
            if re.search(r"\[code: \d+\]|CERTIFICATE_VERIFY_FAILED|Error", line)
        ] or lines
        return f"exit code {code}: {said[-1].strip() if said else 'nothing in its log'}"


def processes(folder: Path) -> dict[str, list[psutil.Process]]:
    """The living processes of the federation in `folder`, by service; also those whose parent is
    gone.
    """
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            marks = process.environ()
        except (psutil.Error, OSError):  # it has just ended, or is another user's
            continue
        if marks.get(FOLDER_MARK) == str(folder):
            found.setdefault(marks.get(SERVICE_MARK, ""), []).append(process)
    return found


def end(found: Iterable[psutil.Process], grace_seconds: float = 10.0) -> None:
    """Send TERM, and after `grace_seconds` KILL."""
    left = list(found)
    for signalled, wait in ((psutil.Process.terminate, grace_seconds), (psutil.Process.kill, 10.0)):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                signalled(process)
        until = time.monotonic() + wait
        while left and time.monotonic() < until:
            psutil.wait_procs(left, timeout=0.1)
            left = [process for process in left if _lives(process)]


def _lives(process: psutil.Process) -> bool:
    """A process that has ended but that no parent asks after (a container without an init) counts
    as gone.
    """
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def log_text(path: Path, offset: int = 0) -> str:
    """The log from there on (of a long one only the end), without colours."""
    with path.open("rb") as file:
        file.seek(max(offset, path.stat().st_size - 20_000))
        return re.sub(r"\x1b\[[0-9;]*m", "", file.read().decode(errors="replace"))


def environment(home: Path) -> dict[str, str]:
    """For Flower's commands: quiet, its own home, the commands that Flower starts by name on the
    path, loopback past any proxy.
    """
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    direct = dict.fromkeys(("no_proxy", "NO_PROXY"), f"{HOST},localhost")
    return os.environ | QUIET | direct | {"FLWR_HOME": str(home), "PATH": path}


def ask(home: Path, *words: str) -> dict[str, Any]:
    """`flwr WORDS --format json`."""
    asked = f"flwr {' '.join(words)}"
    try:
        done = subprocess.run(
            ["flwr", *words, "--format", "json"],
            env=environment(home),
            capture_output=True,
            text=True,
            timeout=60,
        )
        answer: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise FlowerCommandError(f"{asked}: no answer within 60 s") from None
    except ValueError:
        raise FlowerCommandError(f"{asked}: {(done.stderr or done.stdout).strip()}") from None
    if not answer.get("success"):
        raise FlowerCommandError(f"{asked}: {answer.get('error-message', answer)}")
    return answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def write_json(path: Path, value: Any) -> None:
    """All or nothing: who reads meanwhile gets the old file."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=2))
    new.replace(path)


def main() -> int:
    plan = Plan.load(Path(sys.argv[1]).resolve())
    return Supervisor(plan, State.load(plan.folder)).work()


if __name__ == "__main__":
    raise SystemExit(main())
