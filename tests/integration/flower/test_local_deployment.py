"""A Flower federation on this machine: its keys, its supervisor, who is let in and who is not, and
that nothing is left of it.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from typer.testing import CliRunner, Result

from fedclade.cli import flower
from fedclade.cli.flower import flower_app
from fedclade.errors import FedcladeError, InvalidInputError
from fedclade.integrations.flower.local_deployment import certificates, deployment, supervisor
from fedclade.integrations.flower.local_deployment.deployment import Federation
from fedclade.integrations.flower.local_deployment.supervisor import (
    NEXT_WAIT,
    NODE_WAIT,
    SUPERLINK_WAIT,
    Plan,
    Service,
    State,
    Supervisor,
    free_port,
    log_text,
    processes,
)

PROJECT = """
[project]
name = "tiny"
version = "1.0.0"
description = "Requests the name of every node"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "fedclade"
[tool.flwr.app.components]
serverapp = "tiny.app:server"
clientapp = "tiny.app:client"
[tool.flwr.app.config]
fail = false
text = "none"
deep.number = 1
"""
APP = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@client.query()
def who(message, context):
    return Message(RecordDict({"who": ConfigRecord(dict(context.node_config))}), reply_to=message)


@server.main()
def main(grid, context):
    print("text", context.run_config["text"], "number", context.run_config["deep.number"])
    if context.run_config["fail"]:
        raise RuntimeError("requested failure")
    queries = [
        Message(RecordDict(), message_type="query", dst_node_id=node)
        for node in grid.get_node_ids()
    ]
    configs = [dict(reply.content["who"]) for reply in grid.send_and_receive(queries)]
    keys = ("partition-id", "num-partitions", "node-name", "ward")
    print("nodes", sorted(tuple(config[key] for key in keys) for config in configs))
"""


@pytest.fixture(scope="module")
def app_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny app")
    (folder / "tiny").mkdir()
    (folder / "tiny" / "__init__.py").touch()
    (folder / "tiny" / "app.py").write_text(APP)
    (folder / "pyproject.toml").write_text(PROJECT)
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_server_certificate_is_for_this_machine_only(tmp_path: Path) -> None:
    certificates.write_server_certificate(tmp_path / "tls")
    server = certificate(tmp_path / "tls" / "server.pem")
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.IPAddress) == [IPv4Address("127.0.0.1")]
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]


def test_the_ca_verifies_only_its_server(tmp_path: Path) -> None:
    for name in ("one", "two"):
        certificates.write_server_certificate(tmp_path / name)
    server, own, other = (
        certificate(tmp_path / path) for path in ("one/server.pem", "one/ca.crt", "two/ca.crt")
    )
    for subject in (x509.DNSName("localhost"), x509.IPAddress(IPv4Address("127.0.0.1"))):
        assert (
            PolicyBuilder().store(Store([own])).build_server_verifier(subject).verify(server, [])[0]
            == server
        )
        with pytest.raises(VerificationError):
            PolicyBuilder().store(Store([other])).build_server_verifier(subject).verify(server, [])
    with pytest.raises(VerificationError):
        PolicyBuilder().store(Store([own])).build_server_verifier(
            x509.DNSName("example.org")
        ).verify(server, [])


def test_only_the_owner_reads_private_keys_and_the_key_of_the_ca_is_discarded(
    tmp_path: Path,
) -> None:
    certificates.write_server_certificate(tmp_path / "tls")
    certificates.write_node_key(tmp_path / "keys" / "node-0")
    assert sorted(path.name for path in (tmp_path / "tls").iterdir()) == [
        "ca.crt",
        "server.key",
        "server.pem",
    ]
    assert [mode(tmp_path / path) for path in ("tls", "keys", "tls/server.key", "keys/node-0")] == [
        0o700,
        0o700,
        0o600,
        0o600,
    ]


def test_a_node_key_has_the_format_of_ssh_keygen(tmp_path: Path) -> None:
    certificates.write_node_key(tmp_path / "node-0")
    key = load_ssh_private_key((tmp_path / "node-0").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert isinstance(key.curve, ec.SECP384R1)
    public = (tmp_path / "node-0.pub").read_bytes()
    assert public == key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    assert public.startswith(b"ecdsa-sha2-nistp384 ")


class Fake(Plan):
    """A federation whose processes execute the test's code instead of Flower."""

    code = "print('waiting', flush=True); import time; time.sleep(60)"

    def superlink_command(self) -> list[str]:
        return [sys.executable, "-c", self.code]

    def node_command(self, config: str, authority: Path | None, key: Path | None) -> list[str]:
        return [sys.executable, "-c", self.code]


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """A supervisor whose clock the test controls."""
    monkeypatch.setattr(Fake, "code", Fake.code)  # restores it after the test
    (tmp_path / "logs").mkdir()
    plan = Fake(tmp_path, False, free_port(), ("partition-id=0",))
    yield Supervisor(plan, State(services=[Service("superlink"), Service("node-0")]))
    supervisor.end(process for some in processes(tmp_path).values() for process in some)


def ended(watched: Supervisor, service: Service, code: str | None) -> None:
    """Start the service and wait for its end; without `code`, kill it."""
    Fake.code = code or Fake.code
    watched.start(service)
    process = watched.running[service.name].process
    if code is None:
        process.kill()
    process.wait(timeout=20)


def test_the_supervisor_waits_longer_after_a_failure_at_the_start(watched: Supervisor) -> None:
    superlink, node = watched.state.services
    for service, first in ((superlink, SUPERLINK_WAIT), (node, NODE_WAIT)):
        for lived, wait in ((5.0, NEXT_WAIT), (3600.0, first)):
            ended(watched, service, None)
            running = watched.running[service.name]
            now = running.since + lived
            watched.watch(service, now)
            assert (running.due, service.pid, service.reason) == (
                now + wait,
                None,
                "killed by SIGKILL",
            )
            before = service.restarts
            watched.watch(service, now + wait - 0.1)
            assert (service.restarts, watched.running[service.name]) == (before, running)
            watched.watch(service, now + wait)
            assert service.restarts == before + 1
            assert service.pid == watched.running[service.name].process.pid != running.process.pid
            assert [
                one.pid
                for one in State.load(watched.plan.folder).services
                if one.name == service.name
            ] == [service.pid]


def test_the_reason_comes_from_the_log_since_the_last_start(watched: Supervisor) -> None:
    node = watched.state.services[1]
    ended(
        watched,
        node,
        "print('\\x1b[91mERROR\\x1b[0m\\n[code: 2004] Failed to activate.\\nFor more, visit');"
        " raise SystemExit(1)",
    )
    watched.watch(node, time.monotonic())
    assert node.reason == "exit code 1: [code: 2004] Failed to activate."
    ended(watched, node, "raise SystemExit(3)")
    watched.watch(node, time.monotonic())
    assert node.reason == "exit code 3: nothing in its log"


def test_a_node_is_connected_when_its_id_is_in_the_log(watched: Supervisor) -> None:
    Fake.code = "print('SuperNode ID: 77', flush=True); import time; time.sleep(60)"
    node = watched.state.services[1]
    watched.start(node)
    assert (node.node_id, node.connected) == ("", False)
    while not log_text(watched.plan.log("node-0")):
        time.sleep(0.02)
    watched.watch(node, time.monotonic())
    assert (node.node_id, node.connected) == ("77", True)
    assert State.load(watched.plan.folder).services[1] == node


def test_remaining_processes_of_a_service_are_ended_before_a_restart(
    watched: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave = (
        f"import subprocess; subprocess.Popen([{sys.executable!r}, '-c', 'import time;"
        " time.sleep(60)'], start_new_session=True)"
    )
    node = watched.state.services[1]
    ended(watched, node, leave)
    (left,) = processes(watched.plan.folder)["node-0"]
    watched.watch(node, 0.0)
    Fake.code = "import time; time.sleep(60)"
    watched.watch(node, NEXT_WAIT)
    assert not left.is_running() or left.status() == "zombie"
    assert [process.pid for process in processes(watched.plan.folder)["node-0"]] == [node.pid]


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"nodes": 0}, "nodes", "nodes = 0"),
        ({"nodes": 2, "node_config": ["a=1"]}, "node_config", "a=1"),
        ({"nodes": 1, "node_config": ["ward"]}, "node_config[0]", "'ward'"),
        ({"nodes": 1, "port": 70000}, "port", "70000"),
    ],
)
def test_invalid_arguments_leave_no_folder(
    tmp_path: Path, arguments: dict[str, int], field: str, value: str
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        Federation.up(tmp_path / "fed", secure=False, **arguments)
    assert caught.value.field == field
    assert value in str(caught.value)
    assert not (tmp_path / "fed").exists()


def test_a_port_in_use_is_rejected(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            InvalidInputError, match=rf"port = {port}: .*Address already in use"
        ) as caught:
            Federation.up(tmp_path / "fed", 1, False, port)
        assert caught.value.field == "port"


def test_an_unrelated_folder_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InvalidInputError, match="--dir") as caught:
        Federation.up(tmp_path, 1, False)
    assert caught.value.field == str(tmp_path)
    result = CliRunner().invoke(flower_app, ["down", "--purge", "--dir", str(tmp_path)])
    assert (result.exit_code, str(tmp_path) in result.stdout) == (0, True)
    assert (tmp_path / "thesis.tex").exists()


def test_a_different_federation_is_not_overwritten(tmp_path: Path) -> None:
    Plan(tmp_path, True, 1, ("", "")).save()
    State(services=[Service("superlink")]).save(tmp_path)
    with pytest.raises(InvalidInputError, match=r"2 nodes, secure.*--purge") as caught:
        Federation.up(tmp_path, 3, True)
    assert caught.value.field == str(tmp_path)


def test_the_configuration_of_a_node_can_be_extended_and_replaced() -> None:
    assert (
        deployment._config(1, 4, "", Path("/fed/node-1"))
        == 'partition-id=1 num-partitions=4 node-name="node-1" home="/fed/node-1" any-app=true'
    )
    config = deployment._config(1, 4, 'node-name="St Mary" ward=7', Path("/fed/node-1"))
    expected = 'partition-id=1 num-partitions=4 node-name="St Mary" home="/fed/node-1"'
    assert config == f"{expected} any-app=true ward=7"


@pytest.mark.parametrize("command", [["status"], ["run", "app"]])
def test_commands_without_a_federation(tmp_path: Path, command: list[str]) -> None:
    result = CliRunner().invoke(flower_app, [*command, "--dir", str(tmp_path / "none")])
    assert isinstance(result.exception, InvalidInputError)
    assert result.exception.field == str(tmp_path / "none")
    assert "'fedclade flower up'" in str(result.exception)


def test_commands_without_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(flower_app, ["up"])
    assert isinstance(result.exception, InvalidInputError)
    assert result.exception.field == "flwr"
    assert "pip install 'fedclade[flower]'" in str(result.exception)


def test_settings_are_toml_or_text() -> None:
    assert flower._settings(["a=1", "b=0.5", "c=true", "d=clade", 'e="7"', "f=x=y"]) == {
        **{"a": 1, "b": 0.5, "c": True, "d": "clade", "e": "7", "f": "x=y"}
    }
    with pytest.raises(InvalidInputError, match=r"--set rounds: .*KEY=VALUE") as caught:
        flower._settings(["rounds"])
    assert caught.value.field == "--set"
    with pytest.raises(InvalidInputError, match=r"--set a=\[1, 2\]: ") as caught:
        flower._settings(["a=[1, 2]"])
    assert caught.value.field == "--set"


def test_an_unknown_setting_of_the_app_is_rejected(app_dir: Path) -> None:
    deployment._check_settings(app_dir / "pyproject.toml", {"text": "x", "deep.number": 2})
    with pytest.raises(InvalidInputError, match=r"\[tool.flwr.app.config\].*'text'") as caught:
        deployment._check_settings(app_dir / "pyproject.toml", {"txt": "x"})
    assert caught.value.field == "txt"


# The tests below start processes.

Messages = list[str]
REFUSALS = (
    "[code: 2004] Failed to activate SuperNode",
    "[code: 2001]",
    "CERTIFICATE_VERIFY_FAILED",
)


@pytest.fixture(scope="module")
def messages() -> Messages:
    return []


@pytest.fixture(scope="module")
def secure(start_federation: Callable[..., Federation], messages: Messages) -> Federation:
    return start_federation(2, True, node_config=['ward="a b"', "ward=2"], progress=messages.append)


def ids(federation: Federation) -> list[str]:
    return [service.node_id for service in federation.state.services[1:]]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 150.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.5)


@pytest.mark.slow
def test_every_service_is_alive_and_every_node_online(
    secure: Federation, messages: Messages
) -> None:
    superlink, *nodes = secure.status()
    assert messages == [
        "starting the SuperLink",
        "registering node-0",
        "registering node-1",
        *messages[3:-1],
        "2 of 2 nodes online",
    ]
    assert (superlink.pid, superlink.alive, superlink.port, superlink.online) == (
        secure.superlink_pid,
        True,
        secure.plan.port,
        None,
    )
    assert [(node.name, node.pid, node.alive, node.restarts, node.online) for node in nodes] == [
        (f"node-{index}", secure.node_pid(index), True, 0, True) for index in (0, 1)
    ]
    assert [node.port for node in nodes] == [None, None]  # their API is a Unix socket
    assert mode(secure.plan.folder) == 0o700
    assert all(service.log.stat().st_size for service in (superlink, *nodes))


@pytest.mark.slow
def test_a_second_federation_in_the_same_folder_is_rejected(secure: Federation) -> None:
    with pytest.raises(InvalidInputError, match="'fedclade flower down'") as caught:
        Federation.up(secure.plan.folder, 2, True, secure.plan.port)
    assert caught.value.field == str(secure.plan.folder)
    assert secure.supervised


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "authority", "reason"),
    [
        ("unregistered", "own", REFUSALS[0]),
        (None, "own", REFUSALS[1]),
        ("registered", "other", REFUSALS[2]),
    ],
)
def test_an_unauthorized_node_is_rejected(
    secure: Federation, tmp_path: Path, key: str | None, authority: str, reason: str
) -> None:
    plan = secure.plan
    certificates.write_server_certificate(tmp_path / "other")
    certificates.write_node_key(tmp_path / "unregistered")
    # The key of node-0 is already online, so with the right CA the reason would be a different one.
    keys = {"unregistered": tmp_path / "unregistered", "registered": plan.key("node-0"), None: None}
    roots = {"own": plan.authority, "other": tmp_path / "other" / "ca.crt"}
    command = plan.node_command('node-name="stranger" any-app=true', roots[authority], keys[key])
    # Not a pipe: a helper process of the node keeps it open after the node has ended.
    with (tmp_path / "log").open("wb") as log:
        node = subprocess.Popen(
            command,
            env=supervisor.environment(tmp_path / "home"),
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            until = time.monotonic() + 90
            while not any(entry in log_text(tmp_path / "log") for entry in REFUSALS):
                assert time.monotonic() < until
                time.sleep(0.2)
        finally:
            node.kill()
            node.wait()
    text = log_text(tmp_path / "log")
    assert [entry for entry in REFUSALS if entry in text] == [reason]
    assert sum(node.online is True for node in secure.status()) == 2


@pytest.mark.slow
def test_an_app_runs_with_its_settings_and_the_exit_code_shows_its_status(
    secure: Federation, app_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert secure.run(app_dir, {"text": 'it\'s "quoted" = so', "deep.number": 5}) == 0
    out = capfd.readouterr().out
    assert 'text it\'s "quoted" = so number 5' in out
    assert "nodes [(0, 2, 'node-0', 'a b'), (1, 2, 'node-1', 2)]" in out
    result = CliRunner().invoke(
        flower_app, ["run", str(app_dir), "--dir", str(secure.plan.folder), "--set", "fail=true"]
    )
    shown = result.output + capfd.readouterr().out
    assert (result.exit_code, "requested failure" in shown) == (1, True)


@pytest.mark.slow
def test_a_killed_node_and_superlink_restart_with_the_same_identity(
    secure: Federation,
) -> None:
    before, node, superlink = ids(secure), secure.node_pid(0), secure.superlink_pid
    os.kill(node, signal.SIGKILL)
    wait_for(
        lambda: secure.state.services[1].reason != "", "the supervisor sees that the node is dead"
    )
    assert secure.state.services[1].reason == "killed by SIGKILL"
    os.kill(superlink, signal.SIGKILL)
    wait_for(
        lambda: (each := secure.state.services)[1].connected and each[0].restarts == 1,
        "the node is let in again",
    )
    assert ids(secure) == before
    assert secure.node_pid(0) != node
    assert secure.superlink_pid != superlink
    wait_for(
        lambda: [each.online for each in secure.status()[1:]] == [True, True],
        "both nodes are online",
    )


@pytest.mark.slow
def test_down_leaves_no_process_and_up_again_keeps_the_nodes(secure: Federation) -> None:
    folder, before = secure.plan.folder, ids(secure)
    key = secure.plan.key("node-0").read_bytes()
    assert (
        len([process for some in processes(folder).values() for process in some]) >= 7
    )  # supervisor, three services, each with a helper
    assert secure.down() >= 7
    assert processes(folder) == {}
    assert secure.down() == 0
    assert not secure.running
    assert [each.alive for each in secure.status()] == [False, False, False]
    again = Federation.up(folder, 2, True)
    assert ids(again) == before
    assert secure.plan.key("node-0").read_bytes() == key
    again.down(purge=True)
    assert not folder.exists()
    assert processes(folder) == {}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """`fedclade flower …` in an empty folder; stops its federation afterwards."""
    monkeypatch.chdir(tmp_path)
    yield lambda *words: CliRunner().invoke(flower_app, list(words))
    CliRunner().invoke(flower_app, ["down"])
    assert processes(tmp_path / flower.FOLDER) == {}


@pytest.mark.slow
def test_the_commands_from_up_to_down(commands: Callable[..., Result]) -> None:
    up = commands("up", "--nodes", "1")
    assert up.exit_code == 0, up
    assert "1 of 1 nodes online" in up.stdout
    assert "Next steps: fedclade flower run APP_DIR\n" in up.stdout
    rows = [line.split() for line in commands("status").stdout.splitlines()]
    assert [(row[0], row[2]) for row in rows if row and row[0] in ("superlink", "node-0")] == [
        ("superlink", "yes"),
        ("node-0", "yes"),
    ]
    assert (
        "5 processes ended." in commands("down").stdout
    )  # the supervisor, and two services with a helper each
    status = commands("status")
    assert (status.exit_code, "is down. 'fedclade flower up' starts it again" in status.stdout) == (
        1,
        True,
    )
    assert "Nothing was running." in commands("down").stdout
    assert f"{flower.FOLDER} removed." in commands("down", "--purge").stdout
    assert "nothing to do" in commands("down", "--purge").stdout


@pytest.mark.slow
def test_a_database_that_is_none_is_named(
    commands: Callable[..., Result],
) -> None:
    flower.FOLDER.mkdir()
    Plan(flower.FOLDER.resolve(), False, 1, ("",)).save()
    State(services=[Service("superlink"), Service("node-0")]).save(flower.FOLDER)
    (flower.FOLDER / "superlink.db").write_bytes(b"this is not a database" * 100)
    failed = commands("up", "--nodes", "1")
    assert isinstance(failed.exception, FedcladeError)
    assert failed.exception.field == str(flower.FOLDER.resolve() / "superlink.db")
    assert "file is not a database" in str(failed.exception)


@pytest.mark.slow
def test_nodes_that_are_not_online_in_time_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "ONLINE_WITHIN", 5.0)
    monkeypatch.setattr(deployment, "ONLINE_EACH", 15.0)
    with pytest.raises(FedcladeError, match=r"20 s \(node-0: .+\).*/fed/logs\.") as caught:
        Federation.up(tmp_path / "fed", 1, False, node_config=["ward=text without quotes"])
    assert caught.value.field == str(tmp_path / "fed")
    assert processes(tmp_path / "fed") == {}
