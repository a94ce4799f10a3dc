"""Seconds per round in a real federation of four nodes on this machine: fedclade with 20 clients,
and Flower's own FedAvg with four.

    python benchmarks/flower_round_time.py

Both train the same small model on digits. Flower's strategy is its FedAvg with default settings and
an evaluation each round, as in its example. A round is the time between two lines of the server's
log. Writes results/speed/flower_round_time.json.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from fedclade.integrations.flower.app_template import new_app
from fedclade.integrations.flower.local_deployment.deployment import Federation
from fedclade.io.compact_json import dumps, write_results
from fedclade.io.environment_info import environment_info

NODES, ROUNDS = 4, 4
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
    while len(list(grid.get_node_ids())) < 4:
        time.sleep(1)
    begin = [time.monotonic()]

    def evaluate(number, arrays):
        with open({times!r}, "a") as file:
            print(time.monotonic() - begin[0], file=file)

    strategy = FedAvg(min_train_nodes=4, min_evaluate_nodes=4, min_available_nodes=4)
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


def write_app(folder: Path, wards: int, times: Path | None = None) -> Path:
    new_app(folder)
    package = folder / folder.name
    (package / "task.py").write_text(TASK.format(wards=wards))
    if times is not None:
        (package / "server_app.py").write_text(
            FLOWER_SERVER.format(package=folder.name, rounds=ROUNDS, times=str(times))
        )
        (package / "client_app.py").write_text(FLOWER_CLIENT.format(package=folder.name))
    return folder


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        times = Path(root) / "times"
        ours, theirs = (
            write_app(Path(root) / "ours", 5),
            write_app(Path(root) / "theirs", 1, times),
        )
        federation = Federation.up(Path(root) / "fed", NODES, secure=False)
        try:
            seconds: dict[str, list[float]] = {
                "fedclade, 20 clients on 4 nodes": [],
                "Flower's FedAvg, 4 clients": [],
            }
            for turn in range(2):  # one after the other, twice
                out = Path(root) / f"out-{turn}"
                config = {
                    "method.name": "fedavg",
                    "run.rounds": ROUNDS,
                    "federation.nodes": NODES,
                    "federation.out": str(out),
                }
                if federation.run(ours, config):
                    raise SystemExit("the run with fedclade failed")
                rows = [
                    json.loads(line)
                    for line in (out / "run-1" / "rounds.jsonl").read_text().splitlines()
                ]
                seconds["fedclade, 20 clients on 4 nodes"] += [
                    row["seconds"] for row in rows[1:-1]
                ]  # the last has the evaluation
                times.unlink(missing_ok=True)
                if federation.run(theirs, {}):
                    raise SystemExit("the run with Flower's FedAvg failed")
                ends = [
                    float(line) for line in times.read_text().splitlines()
                ]  # before the first round, and after each
                seconds["Flower's FedAvg, 4 clients"] += [
                    after - before for before, after in pairwise(ends[1:])
                ]
        finally:
            federation.down()
    medians = {name: round(statistics.median(values), 2) for name, values in seconds.items()}
    ratio = medians["fedclade, 20 clients on 4 nodes"] / medians["Flower's FedAvg, 4 clients"]
    rounds = {name: [round(value, 2) for value in values] for name, values in seconds.items()}
    results = {
        "about": environment_info("cpu"),
        "seconds a round": medians,
        "ratio": round(ratio, 2),
        "all": rounds,
    }
    write_results(RESULT, results)
    print(dumps(results))


if __name__ == "__main__":
    main()
