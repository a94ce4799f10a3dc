"""What secure sums cost in a round of a real federation on this machine: 10⁶ weights, 20 clients
behind four warm nodes.

    python benchmarks/secure_round_time.py [--turns 3]

Runs with plain and with secure sums take turns on the same `fedclade flower up`, six rounds each;
the first round (keys, the first compilation) and the last (evaluation) do not count. The clients
have few samples, so that a round is mostly messages. If the machine has other work to do, only
the ratio and the CPU time of the nodes count. Writes results/speed/secure_round_time.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from fedclade.integrations.flower.app_template import new_app
from fedclade.integrations.flower.local_deployment.deployment import Federation
from fedclade.integrations.flower.local_deployment.supervisor import processes
from fedclade.io.compact_json import dumps, write_results
from fedclade.io.environment_info import environment_info

NODES, CLIENTS, ROUNDS = 4, 20, 6
RESULT = Path(__file__).resolve().parents[1] / "results" / "speed" / "secure_round_time.json"
TASK = f'''"""Digits, divided evenly among all clients."""

import fedclade as fc
from torch import nn

WARDS = {CLIENTS // NODES}


def load_data(node):
    number, nodes = int(node["partition-id"]), int(node["num-partitions"])
    clients = fc.data.partition(
        fc.data.load("digits"), fc.data.Iid(), clients=WARDS * nodes, seed=0, probe=None
    )
    return {{f"ward-{{ward}}": clients.arrays(WARDS * number + ward) for ward in range(WARDS)}}


def build_model():
    layers = nn.Linear(64, 965), nn.ReLU(), nn.Linear(965, 965), nn.ReLU(), nn.Linear(965, 10)
    return nn.Sequential(nn.Flatten(), *layers)
'''


def cpu_seconds(federation: Federation) -> float:
    """The CPU time of all processes of the nodes so far."""
    found = processes(federation.plan.folder)
    times = [
        process.cpu_times()
        for service, members in found.items()
        if service.startswith("node-")
        for process in members
    ]
    return sum(time.user + time.system for time in times)


def measured(federation: Federation, app: Path, out: Path, is_secure: bool) -> dict[str, Any]:
    """The seconds of each round that counts, and CPU time and bytes of a round."""
    settings = {
        "method.name": "fedavg",
        "run.rounds": ROUNDS,
        "local.batch_size": 100,
        "federation.nodes": NODES,
        "federation.out": str(out),
        "privacy.secure_sum": is_secure,
    }
    before = cpu_seconds(federation)
    if federation.run(app, settings):
        raise SystemExit("the run failed")
    spent = cpu_seconds(federation) - before
    lines = (out / "run-1" / "rounds.jsonl").read_text().splitlines()
    rounds = [json.loads(line) for line in lines]
    if any(row["failures"] for row in rounds):
        raise SystemExit("clients failed")
    return {
        "seconds": [row["seconds"] for row in rounds[1:-1]],
        "cpu": spent / ROUNDS,
        "up": rounds[2]["bytes_up"],
        "down": rounds[2]["bytes_down"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    load_before = os.getloadavg()[0]
    parts: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        new_app(root / "wards")
        (root / "wards" / "wards" / "task.py").write_text(TASK)
        federation = Federation.up(root / "federation", NODES, secure=False)
        try:
            measured(federation, root / "wards", root / "warm", False)
            for turn in range(turns):
                for is_secure in parts:
                    out = root / f"{turn}-{is_secure}"
                    parts[is_secure].append(measured(federation, root / "wards", out, is_secure))
        finally:
            federation.down()
    rows = {
        "secure sums" if is_secure else "plain": {
            "seconds a round": round(statistics.median(_all(runs)), 2),
            "CPU seconds of all nodes a round": round(
                statistics.median(run["cpu"] for run in runs), 2
            ),
            "MB up": round(runs[0]["up"] / 1e6, 1),
            "MB down": round(runs[0]["down"] / 1e6, 1),
            "all seconds": [round(value, 2) for value in _all(runs)],
        }
        for is_secure, runs in parts.items()
    }
    ratio = rows["secure sums"]["seconds a round"] / rows["plain"]["seconds a round"]
    results = {
        "about": environment_info("cpu")
        | {"load average before and after": [round(load_before, 1), round(os.getloadavg()[0], 1)]},
        "rounds": rows,
        "ratio": round(ratio, 2),
    }
    write_results(RESULT, results)
    print(dumps(results))


def _all(runs: list[dict[str, Any]]) -> list[float]:
    return [value for run in runs for value in run["seconds"]]


if __name__ == "__main__":
    main()
