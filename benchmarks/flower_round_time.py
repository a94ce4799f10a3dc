"""Seconds per round in a real federation of three nodes on this machine: fedclade with 15 clients
on the nodes of `fedclade flower up`, and Flower's own FedAvg with three on Flower's SuperNodes.

    python benchmarks/flower_round_time.py

Both train the same small model on digits, in turn, and evaluate it each round: Flower's strategy is
its FedAvg with default settings, as in its example. A round is the time between two lines of the
server's log. Of CladeGroups and Clade it is the first round, which also finds the groups, and Clade
trains up to three candidates; it is compared with a round of FedAvg without evaluation. If the
machine has other work to do, only the ratios count, and the CPU seconds of all processes. Writes
results/speed/flower_round_time.json.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path

import psutil
import tomli_w

from fedclade.integrations.flower.app_template import new_app
from fedclade.integrations.flower.local_deployment.deployment import Federation
from fedclade.integrations.flower.local_deployment.supervisor import HOST, environment, free_port
from fedclade.io.compact_json import dumps, write_results
from fedclade.io.environment_info import environment_info

NODES, TURNS = 3, 2
ROUNDS, FLOWER_ROUNDS = 8, 3
OURS = "fedclade's FedAvg with evaluation, 15 clients on 3 nodes"
PLAIN = "fedclade's FedAvg without evaluation"
GROUPS, CLADE = "CladeGroups' first round", "Clade's first round"
THEIRS = "Flower's FedAvg with evaluation, 3 clients"
# Of each series: the method, the rounds between two evaluations, and the number of rounds.
SERIES = {
    OURS: ("fedavg", 1, ROUNDS),
    PLAIN: ("fedavg", 0, ROUNDS),
    GROUPS: ("clade_groups", 0, 2),
    CLADE: ("clade", 0, 2),
}
RESULT = Path(__file__).resolve().parents[1] / "results" / "speed" / "flower_round_time.json"

TASK = '''"""Digits, divided evenly among all clients."""

import fedclade as fc
from torch import nn

WARDS = {wards}


def load_data(node):
    number, nodes = int(node["partition-id"]), int(node["num-partitions"])
    clients = fc.data.partition(
        fc.data.load("digits"), fc.data.Iid(), clients=WARDS * nodes, seed=0, probe=None
    )
    return {{f"ward-{{ward}}": clients.arrays(WARDS * number + ward) for ward in range(WARDS)}}


def build_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
'''

FLOWER_SERVER = """import logging
import time

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from {package}.task import build_model

app = ServerApp()


@app.main()
def main(grid, context):
    while len(list(grid.get_node_ids())) < 3:
        time.sleep(1)
    begin = [time.monotonic()]

    def evaluate(number, arrays):
        with open({times!r}, "a") as file:
            print(time.monotonic() - begin[0], file=file)

    strategy = FedAvg(min_train_nodes=3, min_evaluate_nodes=3, min_available_nodes=3)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(build_model().state_dict()),
        num_rounds={rounds},
        evaluate_fn=evaluate,
    )
"""

FLOWER_CLIENT = """import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from {package}.task import build_model, load_data

app = ClientApp()


def ready(message, context):
    (x, y, x_test, y_test), = load_data(context.node_config).values()
    model = build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    return model, x.float(), y, x_test.float(), y_test


@app.train()
def train(message, context):
    model, x, y, _, _ = ready(message, context)
    for rows in torch.randperm(len(x)).split(10):
        loss = torch.nn.functional.cross_entropy(model(x[rows]), y[rows])
        weights = list(model.parameters())
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights)):
            weight.data -= 0.1 * gradient
    metrics = MetricRecord({{"num-examples": len(x)}})
    content = RecordDict({{"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}})
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message, context):
    model, _, _, x, y = ready(message, context)
    right = float((model(x).argmax(1) == y).float().mean())
    metrics = MetricRecord({{"accuracy": right, "num-examples": len(x)}})
    return Message(RecordDict({{"metrics": metrics}}), reply_to=message)
"""


PR_SET_CHILD_SUBREAPER = 36


class RoundCpu(threading.Thread):
    """The CPU seconds of all descendants of this process between two lines of a file.

    Args:
        file: gets a line after each round.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(daemon=True)
        self.file, self.ended = file, threading.Event()
        self.marks: list[tuple[int, float]] = []

    def run(self) -> None:
        seen = 0
        while not self.ended.wait(0.1):
            lines = self.file.read_text().count("\n") if self.file.exists() else 0
            if lines > seen:
                self.marks.append((lines, descendants_cpu()))
                seen = lines

    def __enter__(self) -> RoundCpu:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        time.sleep(0.3)  # the last line
        self.ended.set()
        self.join()

    @property
    def seconds(self) -> list[float]:
        """The CPU seconds between two lines."""
        return [
            (later - earlier) / (after - before)
            for (before, earlier), (after, later) in pairwise(self.marks)
            for _ in range(after - before)
        ]


def descendants_cpu() -> float:
    """The CPU seconds of all processes that this one has started, also of those that have ended."""
    own = os.times()
    total = own.children_user + own.children_system
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


def write_app(folder: Path, wards: int, times: Path | None = None) -> Path:
    new_app(folder)
    package = folder / folder.name
    (package / "task.py").write_text(TASK.format(wards=wards))
    if times is not None:
        (package / "server_app.py").write_text(
            FLOWER_SERVER.format(package=folder.name, rounds=FLOWER_ROUNDS, times=str(times))
        )
        (package / "client_app.py").write_text(FLOWER_CLIENT.format(package=folder.name))
    return folder


@contextmanager
def plain_flower(folder: Path) -> Iterator[dict[str, str]]:
    """A SuperLink and SuperNodes with Flower's defaults; the value is the environment in which
    `flwr run APP fed` reaches them.
    """
    home, address = folder / "home", f"{HOST}:{free_port()}"
    home.mkdir(parents=True)
    link = {"default": "fed", "fed": {"address": address, "insecure": True}}
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": link}))
    # One thread in each process, as on fedclade's nodes: with more, three processes are slower.
    settings = environment(home) | {"OMP_NUM_THREADS": "1"}
    del settings["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"]
    port = address.split(":")[1]
    database = ["--database", str(folder / "superlink.db")]
    commands = [["flower-superlink", "--insecure", "--host", HOST, "--port", port, *database]]
    for node in range(NODES):
        config = f"partition-id={node} num-partitions={NODES}"
        own = ["--host", HOST, "--port", str(free_port()), "--node-config", config]
        commands.append(["flower-supernode", "--insecure", "--superlink", address, *own])
    log = folder / "log"
    running = []
    try:
        for number, command in enumerate(commands):
            # Each node has its own home, as in `fedclade flower up`.
            own_home = settings | ({"FLWR_HOME": str(folder / f"node-{number}")} if number else {})
            with log.open("ab") as out:
                running.append(
                    subprocess.Popen(
                        command, env=own_home, stdout=out, stderr=out, start_new_session=True
                    )
                )
        until = time.monotonic() + 120
        while len(re.findall(r"SuperNode ID", log.read_text())) < NODES:
            if time.monotonic() > until:
                raise SystemExit(f"Flower's nodes are not online: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        yield settings
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            process.wait(60)


Series = dict[str, list[float]]


def measure_ours(root: Path, app: Path, turn: int, seconds: Series, cpu: Series) -> None:
    federation = Federation.up(root / f"fed-{turn}", NODES, secure=False)
    try:
        for number, (name, (method, eval_every, rounds)) in enumerate(SERIES.items()):
            out = root / f"out-{turn}" / str(number)
            config = {
                "method.name": method,
                "run.rounds": rounds,
                "run.eval_every": eval_every,
                "federation.nodes": NODES,
                "federation.out": str(out),
            }
            file = out / "run-1" / "rounds.jsonl"
            with RoundCpu(file) as clock:
                if federation.run(app, config):
                    raise SystemExit("the run with fedclade failed")
            times = [json.loads(line)["seconds"] for line in file.read_text().splitlines()]
            if method == "fedavg":
                cpu[name] += clock.seconds[:-1]
            # The first of FedAvg builds the model, and the last delivers it.
            seconds[name] += times[1:-1] if method == "fedavg" else times[:1]
    finally:
        federation.down()


def measure_theirs(
    root: Path, app: Path, turn: int, times: Path, seconds: Series, cpu: Series
) -> None:
    times.unlink(missing_ok=True)
    with plain_flower(root / f"plain-{turn}") as settings, RoundCpu(times) as clock:
        command = ["flwr", "run", str(app), "fed", "--stream"]
        subprocess.run(command, env=settings, check=True)
    # The times before the first round, and after each.
    ends = [float(line) for line in times.read_text().splitlines()]
    seconds[THEIRS] += [after - before for before, after in pairwise(ends)]
    cpu[THEIRS] += clock.seconds


def main() -> None:
    # Orphans become children of this process, so that their CPU time counts.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        times = root / "times"
        ours, theirs = write_app(root / "ours", 5), write_app(root / "theirs", 1, times)
        seconds: Series = {name: [] for name in (*SERIES, THEIRS)}
        cpu: Series = {name: [] for name in (OURS, PLAIN, THEIRS)}
        for turn in range(TURNS):
            measure_ours(root, ours, turn, seconds, cpu)
            measure_theirs(root, theirs, turn, times, seconds, cpu)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    cpu_medians = {name: statistics.median(values) for name, values in cpu.items()}
    rounds = {name: [round(value, 2) for value in values] for name, values in seconds.items()}
    results = {
        "about": environment_info("cpu")
        | {"load average before and after": [round(load_before, 1), round(os.getloadavg()[0], 1)]},
        "seconds a round": {name: round(value, 2) for name, value in medians.items()},
        "CPU seconds a round": {name: round(value, 2) for name, value in cpu_medians.items()},
        "Flower's round in rounds of fedclade": round(medians[THEIRS] / medians[OURS], 1),
        "the same in CPU seconds": round(cpu_medians[THEIRS] / cpu_medians[OURS], 1),
        f"{GROUPS} in rounds of FedAvg": round(medians[GROUPS] / medians[PLAIN], 1),
        f"{CLADE} in rounds of FedAvg": round(medians[CLADE] / medians[PLAIN], 1),
        "all": rounds,
    }
    write_results(RESULT, results)
    print(dumps(results))


if __name__ == "__main__":
    main()
