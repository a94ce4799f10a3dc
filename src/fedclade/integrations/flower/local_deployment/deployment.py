"""A Flower federation on one machine: SuperLink and SuperNodes on loopback, in their own folder,
under a supervisor.

federation = Federation.up(Path(".fedclade-federation"), nodes=3, secure=True)
code = federation.run(Path("my-app"), {"rounds": 3})
federation.down()
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w

from fedclade.errors import FedcladeError, InvalidInputError, nearest, require
from fedclade.integrations.flower.local_deployment import certificates, supervisor
from fedclade.integrations.flower.local_deployment.database import forget_messages
from fedclade.integrations.flower.local_deployment.supervisor import (
    CONNECTION,
    HOST,
    SUPERLINK,
    FlowerCommandError,
    Plan,
    Service,
    State,
    ask,
    end,
    environment,
    log_text,
    processes,
)

# Seconds; the SuperLink accepts a killed node again after over a minute. Many nodes on one machine
# start one after the other.
ONLINE_WITHIN, ONLINE_EACH = 180.0, 15.0
SUPERVISOR = "supervisor"
Value = str | int | float | bool
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ServiceStatus:
    """The status of the SuperLink or a node. `online` is the SuperLink's view of a node, None if
    the SuperLink does not answer.
    """

    name: str
    pid: int | None
    alive: bool
    port: int | None
    restarts: int
    reason: str
    node_id: str
    online: bool | None
    log: Path


@dataclass(frozen=True)
class RunStatus:
    """The status of a run at the SuperLink, such as finished:completed, and its reason."""

    status: str
    details: str

    @classmethod
    def of(cls, run: Mapping[str, Any]) -> RunStatus:
        """The status in an answer of `flwr list`."""
        return cls(str(run["status"]), str(run["status-details"]))

    @property
    def is_finished(self) -> bool:
        return self.status.startswith("finished")

    @property
    def ok(self) -> bool:
        """Whether the run succeeded."""
        return self.status == "finished:completed"

    def __str__(self) -> str:
        has_details = self.details not in ("", "N/A")
        return f"{self.status} ({self.details})" if has_details else self.status


class Federation:
    """A federation in a folder, up or down."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    @classmethod
    def up(
        cls,
        folder: Path,
        nodes: int,
        secure: bool,
        port: int | None = None,
        node_config: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> Federation:
        """Start a federation and wait until every node is online.

        In the folder of an earlier federation the nodes keep their keys and ids, and the SuperLink
        keeps its database.

        Args:
            folder: the folder of the federation: keys, database, logs.
            nodes: the number of nodes.
            secure: use TLS, and a key per node that the SuperLink checks.
            port: the port of the SuperLink on 127.0.0.1; None or 0 for a free one.
            node_config: for each node text that is added to its configuration, such as
                `'key=value key="text"'`; its keys take precedence.
            progress: called with a line about each step.
        """
        folder = folder.expanduser().resolve()
        require(nodes >= 1, "nodes", nodes, "must be at least 1")
        require(
            node_config is None or len(node_config) == nodes,
            "node_config",
            node_config,
            f"must have one text for each of {nodes} nodes",
        )
        own = node_config or [""] * nodes
        configs = tuple(
            _config(index, nodes, own[index], folder / f"node-{index}") for index in range(nodes)
        )
        services = _services(folder, nodes, secure)
        plan = Plan(folder, secure, _port(port), configs)
        _prepare(plan)
        State(services=services).save(folder)
        plan.save()
        federation = cls(plan)
        federation._start_supervisor()
        try:
            federation._wait_until_online(progress or (lambda message: None))
        except BaseException:
            federation.down()
            raise
        return federation

    @classmethod
    def open(cls, folder: Path) -> Federation:
        """The federation in `folder`, up or down."""
        folder = folder.expanduser().resolve()
        if not (folder / "plan.json").is_file():
            raise InvalidInputError(
                f"{folder}: contains no federation. Start one with 'fedclade flower up', or give"
                " its folder with --dir.",
                str(folder),
            )
        return cls(Plan.load(folder))

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which `flwr` reaches this federation as the connection `fed`."""
        return environment(self.plan.home)

    @property
    def superlink_pid(self) -> int:
        return self._pid(self.state.services[0])

    def node_pid(self, index: int) -> int:
        return self._pid(self.state.services[1 + index])

    @property
    def state(self) -> State:
        return State.load(self.plan.folder)

    @property
    def running(self) -> bool:
        """Whether the SuperLink or its supervisor is alive."""
        return not processes(self.plan.folder).keys().isdisjoint({SUPERVISOR, SUPERLINK})

    @property
    def supervised(self) -> bool:
        return SUPERVISOR in processes(self.plan.folder)

    def status(self) -> list[ServiceStatus]:
        """The SuperLink, then the nodes."""
        alive = {process.pid for group in processes(self.plan.folder).values() for process in group}
        try:
            online = self._online() if alive else None
        except FedcladeError:
            online = None

        def status_of(service: Service) -> ServiceStatus:
            fields = {
                key: value
                for key, value in asdict(service).items()
                if key in ("name", "pid", "port", "restarts", "reason", "node_id")
            }
            is_online = (
                None if online is None or service.name == SUPERLINK else service.node_id in online
            )
            return ServiceStatus(
                alive=service.pid in alive,
                online=is_online,
                log=self.plan.log(service.name),
                **fields,
            )

        return [status_of(service) for service in self.state.services]

    def run(
        self, app_dir: Path, settings: Mapping[str, Value] | None = None, stream: bool = True
    ) -> int:
        """Execute `flwr run APP_DIR`. The output of the run goes to stdout.

        `flwr run --stream` returns 0 even if the ServerApp failed, so the status of the run comes
        from the SuperLink.

        Args:
            app_dir: the folder of a Flower app.
            settings: settings of the app to change.
            stream: show the log until the run ends.

        Returns:
            0 if the run succeeded; without `stream`, 0 if it started.
        """
        require(
            (app_dir / "pyproject.toml").is_file(),
            "app",
            str(app_dir),
            "must be the folder of a Flower app, with a pyproject.toml",
        )
        if not self.running:
            raise FedcladeError(
                f"{self.plan.folder}: the federation is down. Start it with 'fedclade flower up'.",
                str(self.plan.folder),
            )
        _check_settings(app_dir / "pyproject.toml", settings or {})
        command = ["flwr", "run", str(app_dir), CONNECTION, *(["--stream"] if stream else [])]
        if settings:
            # A file, because values on the command line cannot contain every text.
            config_file = self.plan.folder / "run-config.toml"
            config_file.write_text(tomli_w.dumps(dict(settings)))
            command += ["--run-config", str(config_file)]
        run_id = None
        with subprocess.Popen(
            command,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            for line in process.stdout or ():
                print(line, end="", flush=True)
                if started := re.search(r"Successfully started run (\d+)", line):
                    run_id = started[1]
        if not stream or run_id is None:
            return process.returncode
        status = self._final_status(run_id)
        if status.ok:
            return process.returncode
        print(f"The run did not succeed: {status}", file=sys.stderr)
        return 1

    def last_run(self) -> RunStatus | None:
        """The status of the run that was started last; None before the first run."""
        runs = self._ask("list", CONNECTION)["runs"]
        if not runs:
            return None
        return RunStatus.of(max(runs, key=lambda run: str(run["pending-at"])))

    def down(self, purge: bool = False) -> int:
        """End every process of the federation and of its apps; returns their number. The messages
        in the SuperLink's database are removed; `purge` removes the whole folder.
        """
        count = 0
        # The supervisor first, or it restarts the others; nodes before the SuperLink, so that they
        # can sign off.
        for selected in (
            lambda name: name == SUPERVISOR,
            lambda name: name.startswith("node-"),
            lambda name: True,
        ):
            ending = [
                process
                for name, group in processes(self.plan.folder).items()
                if selected(name)
                for process in group
            ]
            end(ending)
            count += len(ending)
        if purge:
            shutil.rmtree(self.plan.folder)
        else:
            forget_messages(self.plan.folder / "superlink.db")
        return count

    def _start_supervisor(self) -> None:
        marks = {supervisor.FOLDER_MARK: str(self.plan.folder), supervisor.SERVICE_MARK: SUPERVISOR}
        with self.plan.log(SUPERVISOR).open("ab") as log:
            subprocess.Popen(
                [sys.executable, "-I", supervisor.__file__, str(self.plan.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment | marks,
                start_new_session=True,
            )

    def _wait_until_online(self, progress: Progress) -> None:
        seconds = ONLINE_WITHIN + ONLINE_EACH * len(self.plan.configs)
        until, last_message = time.monotonic() + seconds, ""
        while time.monotonic() < until:
            supervised, state = self.supervised, self.state
            nodes, online = state.services[1:], set[str]()
            if state.phase == "failed" or not supervised:
                raise FedcladeError(
                    f"{self.plan.folder}: the federation did not start: {self._reason(state)}",
                    str(self.plan.folder),
                )
            if nodes and all(node.connected for node in nodes):
                with suppress(FedcladeError):
                    online = self._online() & {node.node_id for node in nodes}
            counted = max(len(online), sum(node.connected for node in nodes))
            message = state.message or f"{counted} of {len(nodes)} nodes online"
            if message != last_message:
                progress(message)
                last_message = message
            if len(online) == len(nodes):
                return
            time.sleep(0.5)
        absent = "; ".join(
            f"{node.name}: {node.reason or self._end_of_log(node.name)}"
            for node in state.services[1:]
            if not node.connected
        )
        raise FedcladeError(
            f"{self.plan.folder}: some nodes are not online after {seconds:.0f} s ({absent})."
            f" Logs: {self.plan.folder}/logs.",
            str(self.plan.folder),
        )

    def _reason(self, state: State) -> str:
        name = SUPERLINK if state.phase == "failed" else SUPERVISOR
        return (
            f"{state.message or 'the supervisor stopped'}. Last lines of {self.plan.log(name)}:"
            f" {self._end_of_log(name)}"
        )

    def _end_of_log(self, name: str) -> str:
        log = self.plan.log(name)
        text = log_text(log) if log.exists() else ""  # a node that was not started has none
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-3:]) or "(empty)"

    def _online(self) -> set[str]:
        return {
            node["node-id"]
            for node in self._ask("supernode", "list", CONNECTION)["nodes"]
            if node["status"] == "online"
        }

    def _final_status(self, run_id: str) -> RunStatus:
        """The status of a run whose log has ended. It may change shortly after that, and a
        SuperLink that has died is restarted by the supervisor.
        """
        status = RunStatus("unknown", "the SuperLink does not answer")
        for _ in range(10):
            with suppress(FedcladeError):
                status = RunStatus.of(self._ask("list", CONNECTION, "--run-id", run_id)["runs"][0])
                if status.is_finished:
                    break
            time.sleep(1)
        return status

    def _ask(self, *words: str) -> dict[str, Any]:
        try:
            return ask(self.plan.home, *words)
        except FlowerCommandError as error:
            raise FedcladeError(
                f"{self.plan.folder}: the SuperLink did not answer: {error}", str(self.plan.folder)
            ) from None

    def _pid(self, service: Service) -> int:
        if service.pid is None:
            raise FedcladeError(
                f"{service.name}: is not running ({service.reason or 'it was not started'}).",
                service.name,
            )
        return service.pid


def _services(folder: Path, nodes: int, secure: bool) -> list[Service]:
    """The SuperLink and the nodes, with their ids from an earlier federation in this folder."""
    names = [SUPERLINK, *(f"node-{index}" for index in range(nodes))]
    if not (folder / "plan.json").is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidInputError(
                f"{folder}: exists, but is not the folder of a federation. Choose another --dir.",
                str(folder),
            )
        return [Service(name) for name in names]
    if processes(folder):
        raise InvalidInputError(
            f"{folder}: a federation is already up in this folder. Stop it with 'fedclade flower"
            " down', or choose another --dir.",
            str(folder),
        )
    earlier, before = (
        Plan.load(folder),
        {service.name: service for service in State.load(folder).services},
    )
    if (len(earlier.nodes), earlier.secure) != (nodes, secure):
        size = f"{len(earlier.nodes)} nodes, {'secure' if earlier.secure else 'not secure'}"
        raise InvalidInputError(
            f"{folder}: contains a different federation ({size}). Remove it with 'fedclade flower"
            " down --purge', or choose another --dir.",
            str(folder),
        )
    return [
        Service(name, node_id=before[name].node_id, registered=before[name].registered)
        for name in names
    ]


def _prepare(plan: Plan) -> None:
    """Create the folder with everything that Flower needs."""
    plan.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    plan.folder.chmod(0o700)
    for part in (plan.home, plan.folder / "logs"):
        part.mkdir(exist_ok=True)
    link: dict[str, Value] = {"address": f"{HOST}:{plan.port}"}
    if plan.authority:
        certificates.write_server_certificate(plan.authority.parent)
        link["root-certificates"] = str(plan.authority)
        for node in plan.nodes:
            if not plan.key(node).exists():
                certificates.write_node_key(plan.key(node))
    else:
        link["insecure"] = True
    (plan.home / "config.toml").write_text(
        tomli_w.dumps({"superlink": {"default": CONNECTION, CONNECTION: link}})
    )


def _check_settings(project: Path, settings: Mapping[str, Value]) -> None:
    """Check the names: Flower rejects unknown settings without saying which one."""
    try:
        app = tomllib.loads(project.read_text()).get("tool", {}).get("flwr", {}).get("app", {})
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{project}: not valid TOML ({error}).", str(project)) from error
    known = _flat(app.get("config", {}))
    for key in settings:
        if key not in known:
            raise InvalidInputError(
                f"{key}: {project} has no such setting in"
                f" [tool.flwr.app.config].{nearest(key, known)}",
                key,
            )


def _flat(table: Mapping[str, Any], prefix: str = "") -> set[str]:
    """The names of settings as in Flower: nested tables are joined with dots."""
    parts = (
        _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}"}
        for key, value in table.items()
    )
    return set().union(*parts)


def _port(port: int | None) -> int:
    if not port:
        return supervisor.free_port()
    require(0 < port < 65536, "port", port, "must be between 1 and 65535, or 0 for a free one")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the SuperLink does
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise InvalidInputError(
                f"port = {port}: cannot be used on {HOST} ({os.strerror(error.errno or 0)})."
                " Omit it for a free one.",
                "port",
            ) from None
    return port


def _config(index: int, nodes: int, own: str, home: Path) -> str:
    """The `--node-config` of a node; the pairs in `own` take precedence."""
    pairs_of = {
        "partition-id": str(index),
        "num-partitions": str(nodes),
        "node-name": f'"node-{index}"',
        "home": f'"{home}"',
        "any-app": "true",  # on one machine the apps are the user's own
    }
    pairs = re.findall(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)", own)
    require(
        bool(pairs) or not own.strip(),
        f"node_config[{index}]",
        own,
        "must be key=value pairs separated by spaces, with text in quotes",
    )
    pairs_of |= dict(pairs)
    return " ".join(f"{key}={value}" for key, value in pairs_of.items())
