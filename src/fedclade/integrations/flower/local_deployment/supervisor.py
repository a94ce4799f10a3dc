"""Keeps a federation on one machine alive: starts SuperLink and SuperNodes, restarts them when they
die, and writes their status to DIR/state.json.

`python -m fedclade.integrations.flower.local_deployment.supervisor DIR`. It imports nothing from
fedclade, so that `deployment.py` can start the file itself: importing the package would load torch,
300 MB in a process that only waits.
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
# Every process of a federation has these two environment variables, and so do its children. They
# identify a process even if its parent has ended.
FOLDER_MARK, SERVICE_MARK = "FEDCLADE_FEDERATION", "FEDCLADE_SERVICE"
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Otherwise every run installs the app's dependencies again.
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    # Seconds until the SuperLink's executor asks again whether a ServerApp waits; Flower: 1.
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
}
HEALTHY_WITHIN = 60.0
# For the SuperLink a dead node is online until two heartbeats of 30 s are missing. Until then it
# rejects the node's key (code 2004).
NODE_WAIT, SUPERLINK_WAIT, NEXT_WAIT = 5.0, 1.0, 15.0
LIVED = 30.0  # seconds; a service that ran longer did not fail at its start


class FlowerCommandError(RuntimeError):
    """A Flower command failed or did not answer."""


@dataclass(frozen=True)
class Plan:
    """What to start, and where its files are. `configs` has the `--node-config` of each node."""

    folder: Path
    secure: bool
    port: int
    configs: tuple[str, ...]

    @classmethod
    def load(cls, folder: Path) -> Plan:
        content = json.loads((folder / "plan.json").read_text())
        return cls(folder, content["secure"], content["port"], tuple(content["configs"]))

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
        security = [*secured, "--enable-supernode-auth"] if self.secure else ["--insecure"]
        return [
            "flower-superlink",
            "--host",
            HOST,
            "--port",
            str(self.port),
            "--database",
            str(self.folder / "superlink.db"),
            *security,
        ]

    def node_command(self, config: str, authority: Path | None, key: Path | None) -> list[str]:
        security = ["--root-certificates", str(authority)] if authority else ["--insecure"]
        security += ["--key", str(key)] if key else []
        address = ["--superlink", f"{HOST}:{self.port}"]
        command = [sys.executable, "-m", "fedclade", "flower", "node"]
        return [*command, *address, "--node-config", config, *security]


@dataclass
class Service:
    """The SuperLink or a SuperNode: its process, its number of restarts, and why it last ended."""

    name: str
    pid: int | None = None
    port: int | None = None
    restarts: int = 0
    reason: str = ""
    node_id: str = ""
    registered: bool = False
    # whether the log has the id from the SuperLink since the last start
    connected: bool = False


@dataclass
class State:
    """What the supervisor writes to disk. `phase` is starting, running or failed."""

    phase: str = "starting"
    message: str = "starting the SuperLink"
    services: list[Service] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path) -> State:
        content = json.loads((folder / "state.json").read_text())
        services = [Service(**service) for service in content["services"]]
        return cls(content["phase"], content["message"], services)

    def save(self, folder: Path) -> None:
        write_json(folder / "state.json", asdict(self))


@dataclass
class Running:
    """A started process: its start time, where its part of the log begins, and when to restart
    it.
    """

    process: subprocess.Popen[bytes]
    since: float
    offset: int
    due: float | None = None


class Supervisor:
    """Starts the services of a plan and restarts those that end."""

    def __init__(self, plan: Plan, state: State) -> None:
        self.plan, self.state = plan, state
        self.running: dict[str, Running] = {}
        self.superlink, *self.nodes = state.services

    def work(self) -> int:
        """Start all services, then watch them until a signal ends the process. The exit code is 1
        if the start fails.
        """
        try:
            self.start(self.superlink)
            self._wait_until_healthy()
            for node in self.nodes if self.plan.secure else ():
                self._register(node)
        except FlowerCommandError as error:
            self._set_phase("failed", str(error))
            return 1
        for node in self.nodes:
            self.start(node)
        self._set_phase("running", "")
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
            # Each node has its own home: if two nodes unpacked an app into one folder, one could
            # read an incomplete app.
            home, service.port = self.plan.folder / service.name, None
            command = self.plan.node_command(
                config,
                self.plan.authority,
                self.plan.key(service.name) if self.plan.secure else None,
            )
            limits = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(self.nodes)))}
        marks = {FOLDER_MARK: str(self.plan.folder), SERVICE_MARK: service.name}
        with log.open("ab") as out:
            # The caller's environment takes precedence over our number of threads.
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
        """Check a service: restart it if it is due, note whether it ended or a node connected."""
        running = self.running[service.name]
        if running.due is not None:
            if now >= running.due:
                # An app in a long computation may outlive the SuperLink or SuperNode that started
                # it.
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
            node_ids = re.findall(r"SuperNode ID: (\d+)", self._log(service))
            if not node_ids:
                return
            service.node_id, service.connected = node_ids[-1], True
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
                    f"the SuperLink ended at its start: {self._reason(self.superlink, code)}"
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
        self._set_phase("starting", f"registering {node.name}")
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

    def _set_phase(self, phase: str, message: str) -> None:
        self.state.phase, self.state.message = phase, message
        self.state.save(self.plan.folder)

    def _log(self, service: Service) -> str:
        return log_text(self.plan.log(service.name), self.running[service.name].offset)

    def _reason(self, service: Service, code: int) -> str:
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = [line for line in self._log(service).splitlines() if line.strip()]
        errors = [
            line
            for line in lines
            if re.search(r"\[code: \d+\]|CERTIFICATE_VERIFY_FAILED|Error", line)
        ] or lines
        return f"exit code {code}: {errors[-1].strip() if errors else 'nothing in its log'}"


def processes(folder: Path) -> dict[str, list[psutil.Process]]:
    """The processes of the federation in `folder`, by service. Includes processes whose parent has
    ended.
    """
    by_service: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            marks = process.environ()
        except (psutil.Error, OSError):  # it has just ended, or belongs to another user
            continue
        if marks.get(FOLDER_MARK) == str(folder):
            by_service.setdefault(marks.get(SERVICE_MARK, ""), []).append(process)
    return by_service


def end(running: Iterable[psutil.Process], grace_seconds: float = 10.0) -> None:
    """Send TERM, and after `grace_seconds` KILL."""
    left = list(running)
    for send_signal, wait in (
        (psutil.Process.terminate, grace_seconds),
        (psutil.Process.kill, 10.0),
    ):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                send_signal(process)
        until = time.monotonic() + wait
        while left and time.monotonic() < until:
            psutil.wait_procs(left, timeout=0.1)
            left = [process for process in left if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie does not: a container without an init process keeps it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def log_text(path: Path, offset: int = 0) -> str:
    """The log from `offset` on, without colors; only the end of a long log."""
    with path.open("rb") as file:
        file.seek(max(offset, path.stat().st_size - 20_000))
        return re.sub(r"\x1b\[[0-9;]*m", "", file.read().decode(errors="replace"))


def environment(home: Path) -> dict[str, str]:
    """The environment for Flower's commands: quiet, with its own home, with the commands that
    Flower starts on the path, and without a proxy for loopback.
    """
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    direct = dict.fromkeys(("no_proxy", "NO_PROXY"), f"{HOST},localhost")
    return os.environ | QUIET | direct | {"FLWR_HOME": str(home), "PATH": path}


def ask(home: Path, *words: str) -> dict[str, Any]:
    """`flwr WORDS --format json`."""
    command = f"flwr {' '.join(words)}"
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
        raise FlowerCommandError(f"{command}: no answer within 60 s") from None
    except ValueError:
        raise FlowerCommandError(f"{command}: {(done.stderr or done.stdout).strip()}") from None
    if not answer.get("success"):
        raise FlowerCommandError(f"{command}: {answer.get('error-message', answer)}")
    return answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def write_json(path: Path, value: Any) -> None:
    """Write atomically: a concurrent reader gets the old file."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=2))
    new.replace(path)


def main() -> int:
    plan = Plan.load(Path(sys.argv[1]).resolve())
    return Supervisor(plan, State.load(plan.folder)).work()


if __name__ == "__main__":
    raise SystemExit(main())
