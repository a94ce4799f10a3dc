"""docs/hospitals_federation.md on one machine: a server and three hospitals, each in its own
network namespace, with TLS, node keys and nginx. It needs root, `ip` and nginx.
"""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from fedclade.integrations.flower.app_template import new_app
from fedclade.integrations.flower.local_deployment.supervisor import environment, log_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.name != "posix" or os.geteuid() != 0 or not all(map(shutil.which, ("ip", "nginx"))),
        reason="network namespaces need root, ip and nginx",
    ),
]
SITES = ("north", "east", "west")
SERVER = "10.77.0.1"

# As in the page. Only `user root` is added: the folders of a test are closed to other users.
OPENSSL = """
set -e
openssl ecparam -name secp384r1 -genkey -noout -out ca.key
openssl req -x509 -new -key ca.key -sha384 -days 825 -subj "/CN=our federation" -out ca.crt
openssl ecparam -name secp384r1 -genkey -noout -out server.key
openssl req -new -key server.key -subj "/CN=server" -out server.csr
printf "subjectAltName=IP:{server},IP:127.0.0.1,DNS:localhost" > server.ext
openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -sha384 -days 825 \
    -extfile server.ext -out server.pem
"""
NGINX = """
user root;  daemon off;  pid nginx.pid;  error_log nginx.log;
events {{}}
http {{
  access_log off;  client_body_temp_path body;  proxy_temp_path proxy;
  fastcgi_temp_path fastcgi;  uwsgi_temp_path uwsgi;  scgi_temp_path scgi;
  server {{
    listen {server}:8443 ssl;  ssl_certificate server.pem;  ssl_certificate_key server.key;
    client_max_body_size 0;
    location /v1/fleet/ {{ proxy_pass https://127.0.0.1:8300;  proxy_ssl_verify on;
                          proxy_ssl_trusted_certificate ca.crt;  proxy_ssl_name localhost; }}
    location / {{ return 404; }}
  }}
}}
"""


def shell(command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(["sh", "-c", command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def namespaces() -> Iterator[dict[str, str]]:
    """A network of four machines: the namespace of each by its name."""
    names = {name: f"fc-{os.getpid()}-{name}" for name in ("server", *SITES)}
    bridge = f"fc{os.getpid()}"
    try:
        shell(f"ip link add {bridge} type bridge && ip link set {bridge} up")
        for number, (name, space) in enumerate(names.items(), start=1):
            end = f"v{os.getpid()}{number}"
            shell(
                f"ip netns add {space} && ip link add {end} type veth peer name eth0 netns {space}"
                f" && ip link set {end} master {bridge} up && ip -n {space} link set lo up"
                f" && ip -n {space} addr add 10.77.0.{number}/24 dev eth0"
                f" && ip -n {space} link set eth0 up"
            )
            assert name
        yield names
    finally:
        for space in names.values():
            subprocess.run(["ip", "netns", "del", space], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False)


class Machines:
    """Processes in network namespaces, which end with the test."""

    def __init__(self, namespaces: dict[str, str], folder: Path) -> None:
        self.namespaces, self.folder = namespaces, folder
        self.running: list[subprocess.Popen[bytes]] = []

    def command(self, machine: str, words: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespaces[machine], *words]

    def environment(self, machine: str) -> dict[str, str]:
        return environment(self.folder / machine / "flwr")

    def start(self, machine: str, words: list[str]) -> Path:
        """Start a command on a machine; returns its log."""
        log = self.folder / machine / f"{Path(words[0]).name}.log"
        with log.open("wb") as out:
            self.running.append(
                subprocess.Popen(
                    self.command(machine, words),
                    cwd=self.folder / machine,
                    env=self.environment(machine),
                    stdout=out,
                    stderr=out,
                )
            )
        return log

    def run(self, machine: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(machine, words),
            cwd=self.folder / machine,
            env=self.environment(machine),
            capture_output=True,
            text=True,
            timeout=400,
        )

    def end(self) -> None:
        for process in reversed(self.running):
            process.send_signal(signal.SIGTERM)
        for process in self.running:
            process.wait(60)


@pytest.fixture
def machines(namespaces: dict[str, str], tmp_path: Path) -> Iterator[Machines]:
    for name in namespaces:
        (tmp_path / name / "flwr").mkdir(parents=True)
        new_app(tmp_path / name / "clinics")
    found = Machines(namespaces, tmp_path)
    yield found
    found.end()


def wait_for(log: Path, text: str, seconds: float = 180) -> None:
    until = time.monotonic() + seconds
    while text not in log_text(log):
        assert time.monotonic() < until, log_text(log)
        time.sleep(0.5)


def test_a_federation_of_three_hospitals(machines: Machines, tmp_path: Path) -> None:
    server = tmp_path / "server"
    shell(OPENSSL.format(server=SERVER), server)
    (server / "nginx.conf").write_text(NGINX.format(server=SERVER))
    (server / "flwr" / "config.toml").write_text(
        '[superlink]\ndefault = "fed"\n[superlink.fed]\naddress = "127.0.0.1:8300"\n'
        f'root-certificates = "{server}/ca.crt"\n'
    )
    tls = "--ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key"
    options = f"--host 127.0.0.1 --port 8300 {tls} --enable-supernode-auth --database superlink.db"
    link = machines.start("server", ["flower-superlink", *options.split()])
    machines.start("server", ["nginx", "-p", str(server), "-c", str(server / "nginx.conf")])
    wait_for(link, "8300")
    logs = []
    for number, site in enumerate(SITES):
        own = tmp_path / site
        shell('ssh-keygen -q -t ecdsa -b 384 -N "" -f node.key', own)
        shutil.copy(own / "node.key.pub", server / f"{site}.pub")
        shutil.copy(server / "ca.crt", own)
        registered = machines.run(
            "server", ["flwr", "supernode", "register", f"{site}.pub", "fed", "--name", site]
        )
        assert registered.returncode == 0, registered.stderr
        config = f'partition-id={number} num-partitions=3 home="{own}/home"'
        options = ["--superlink", f"{SERVER}:8443", "--root-certificates", "ca.crt"]
        options += ["--key", "node.key", "--name", site, "--app", "clinics"]
        node = [sys.executable, "-m", "fedclade", "flower", "node", "--node-config", config]
        logs.append(machines.start(site, [*node, *options]))
    for log in logs:
        wait_for(log, "SuperNode ID")
    # Only the nodes' part of the SuperLink can be reached from a hospital.
    for path, expected in (("/v1/control/list-runs", "404"), ("/v1/runtime/get-nodes", "404")):
        url = f"https://{SERVER}:8443{path}"
        code = "import sys, httpx, ssl; print(httpx.post(sys.argv[1],"
        code += " verify=ssl.create_default_context(cafile='ca.crt')).status_code)"
        assert machines.run("north", [sys.executable, "-c", code, url]).stdout.strip() == expected
    settings = f"federation.nodes=3 federation.out='{server}/runs'"
    done = machines.run(
        "server", ["flwr", "run", "clinics", "fed", "--stream", "--run-config", settings]
    )
    assert "accuracy" in done.stdout, done.stdout + done.stderr
    with (server / "runs" / "run-1" / "clients.csv").open() as file:
        names = [row["client"] for row in csv.DictReader(file)]
    assert names == [f"{site}/ward-{ward}" for site in sorted(SITES) for ward in range(2)]
    for site in SITES:
        models = list((tmp_path / site / "home" / "nodes" / site / "models").iterdir())
        assert len(models) == 2
    # A node runs no app but its own.
    task = server / "clinics" / "clinics" / "task.py"
    task.write_text(task.read_text() + "\nprint('changed by the server')\n")
    more = f"{settings} federation.wait_seconds=8.0 run.seed=1"
    other = machines.run(
        "server", ["flwr", "run", "clinics", "fed", "--stream", "--run-config", more]
    )
    assert "does not run the app" in other.stdout
