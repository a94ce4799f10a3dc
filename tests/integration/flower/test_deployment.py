"""A real federation: SuperLink and SuperNodes with TLS and keys on loopback, and what happens when
parts of it die.
"""

from __future__ import annotations

import csv
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedclade[flower]'")

from tests.integration.flower.conftest import Start

import fedclade as fc
from fedclade.errors import FedcladeError
from fedclade.integrations.flower.app_template import new_app
from fedclade.integrations.flower.local_deployment.deployment import Federation
from fedclade.integrations.flower.local_deployment.supervisor import processes
from fedclade.io.run_dir import StoredModels

pytestmark = pytest.mark.slow
NODES = 4


@pytest.fixture(scope="module")
def federation(start_federation: Start) -> Federation:
    found: Federation = start_federation(NODES, secure=True)
    return found


def settings(out: Path, method: str, rounds: int, **more: Any) -> dict[str, Any]:
    given = {
        "method.name": method,
        "run.rounds": rounds,
        "run.eval_every": 1,  # the evaluation travels with the next training
        "federation.nodes": NODES,
        "federation.out": str(out),
        "federation.bind_clients_to_nodes": True,
    }
    return given | {name.replace("__", "."): value for name, value in more.items()}


def history(run: Path) -> list[dict[str, Any]]:
    file = run / "rounds.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(true: Callable[[], bool], seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)


class Background:
    """`flower run` in the background."""

    def __init__(self, federation: Federation, app: Path, given: dict[str, Any]) -> None:
        self.codes: list[int] = []
        self.thread = threading.Thread(target=lambda: self.codes.append(federation.run(app, given)))
        self.thread.start()

    def end(self) -> int:
        self.thread.join(600)
        return self.codes[0]


def test_each_client_ends_with_its_own_groups_model(
    federation: Federation, app: Path, tmp_path: Path
) -> None:
    assert federation.run(app, settings(tmp_path, "clade_groups", 3)) == 0
    run = tmp_path / "run-1"
    assert json.loads((run / "summary.json").read_text())["clients"] == 2 * NODES
    assert [row["failures"] for row in history(run)] == [[], [], []]
    clusters = {
        row["client"]: int(row["cluster"]) for row in csv.DictReader((run / "clients.csv").open())
    }
    assert list(clusters) == [
        f"node-{node}/ward-{ward}" for node in range(NODES) for ward in range(2)
    ]
    owners = {
        client["site"]: client["owner"]
        for client in json.loads((run / "federation.json").read_text())["clients"]
    }
    assert owners == {one.name: one.node_id for one in federation.status()[1:]}
    stored = StoredModels(run)
    digits = fc.data.partition(
        fc.data.load("digits"),
        fc.data.LabelClusters(clusters=2, classes=5),
        clients=2 * NODES,
        seed=0,
    )
    truth = digits.groups  # as the template deals them out
    assert truth is not None
    kinds: dict[int, set[int]] = {}
    for number, (name, cluster) in enumerate(clusters.items()):
        node, ward = name.split("/")
        kinds.setdefault(cluster, set()).add(int(truth[number]))
        file = federation.plan.folder / node / "nodes" / node / "models" / f"{ward}.safetensors"
        assert oct(file.stat().st_mode & 0o777) == "0o600"
        expected = stored.row(int(stored.model_ids[number]))
        for key, value in load_file(file).items():
            assert torch.equal(value, expected[key])
    assert sorted(kinds.values(), key=min) == [{0}, {1}]


def server_app(federation: Federation) -> Iterator[int]:
    for found in processes(federation.plan.folder).values():
        for process in found:
            if any("flwr-serverapp" in word for word in process.cmdline()):
                yield process.pid


def same_models(one: Path, other: Path) -> None:
    for name, value in StoredModels(one).row(0).items():
        assert torch.equal(value, StoredModels(other).row(0)[name])


def test_two_deployments_with_one_seed_give_the_same_bytes(
    start_federation: Start, app: Path, tmp_path: Path
) -> None:
    """Each deployment draws its own node ids; the second one also lists its sites in another
    order.
    """
    sites = ["north", "east", "west"]
    node_ids, outcomes = [], []
    for number, order in enumerate((sites, sites[::-1])):
        config = [f'node-name="{site}" partition-id={sites.index(site)}' for site in order]
        federation = start_federation(len(sites), secure=False, node_config=config)
        node_ids.append([one.node_id for one in federation.status()[1:]])
        out = tmp_path / str(number)
        chosen = settings(
            out,
            "clade",
            3,
            federation__nodes=len(sites),
            federation__bind_clients_to_nodes=False,
            run__clients_per_round=0.5,
        )
        assert federation.run(app, chosen) == 0
        federation.down()
        outcomes.append(out / "run-1")
    assert set(node_ids[0]).isdisjoint(node_ids[1])
    for name in ("models/models.safetensors", "clients.csv", "names.json"):
        one, other = ((outcome / name).read_bytes() for outcome in outcomes)
        assert one == other, name
    with (outcomes[0] / "clients.csv").open() as file:
        names = [row["client"] for row in csv.DictReader(file)]
    assert names == [f"{site}/ward-{ward}" for site in sorted(sites) for ward in range(2)]


def test_a_server_that_dies_is_gone_on_with_as_if_it_had_not(
    federation: Federation, app: Path, tmp_path: Path
) -> None:
    """SCAFFOLD, whose clients remember: what they did in the round that was lost must not count."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert federation.run(app, settings(whole, "scaffold", 12)) == 0
    going = Background(federation, app, settings(parts, "scaffold", 12))
    wait_until(lambda: len(history(parts / "run-1")) >= 2)
    for pid in list(server_app(federation)):
        os.kill(pid, signal.SIGKILL)
    assert going.end() != 0
    assert len(history(parts / "run-1")) < 12
    assert "No heartbeat" in str(federation.last_run())
    assert federation.run(app, settings(parts, "scaffold", 12)) == 0
    assert [row["round"] for row in history(parts / "run-1")] == list(range(1, 13))
    same_models(whole / "run-1", parts / "run-1")


def executors(federation: Federation) -> list[int]:
    return [
        process.pid
        for found in processes(federation.plan.folder).values()
        for process in found
        if "fedclade.integrations.flower.executor" in process.cmdline()
    ]


def test_a_killed_client_app_costs_no_client(
    federation: Federation, app: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """SCAFFOLD, whose clients remember. The messages of the killed processes are sent again."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert federation.run(app, settings(whole, "scaffold", 12)) == 0
    before = executors(federation)
    assert len(before) == NODES
    going = Background(federation, app, settings(parts, "scaffold", 12))
    # At several moments of a round: a process without a message has nothing to send again.
    for number, delay in ((2, 0.0), (4, 0.2), (6, 0.4), (8, 0.6)):
        wait_until(lambda number=number: len(history(parts / "run-1")) >= number)
        time.sleep(delay)
        for pid in executors(federation):
            os.kill(pid, signal.SIGKILL)
    assert going.end() == 0
    assert [row["failures"] for row in history(parts / "run-1")] == [[]] * 12
    same_models(whole / "run-1", parts / "run-1")
    assert set(executors(federation)).isdisjoint(before)
    assert "sending again" in capfd.readouterr().out


def test_two_runs_at_once_have_different_folders(
    federation: Federation, app: Path, tmp_path: Path
) -> None:
    both = [Background(federation, app, settings(tmp_path, "fedavg", 6)) for _ in range(2)]
    assert [going.end() for going in both] == [0, 0]
    assert [len(history(tmp_path / name)) for name in ("run-1", "run-2")] == [6, 6]
    same_models(tmp_path / "run-1", tmp_path / "run-2")


def test_an_error_of_the_user_is_one_line_and_the_status_shows_it(
    federation: Federation, app: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert federation.run(app, settings(tmp_path, "no-such-method", 1)) != 0
    output = capfd.readouterr()
    assert "Traceback" not in output.out
    assert "method.name" in output.out
    assert "finished:failed" in output.err
    last = federation.last_run()
    assert last is not None
    assert not last.ok


def test_a_superlink_that_dies_comes_back_and_a_new_run_goes_on(
    federation: Federation, app: Path, tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert federation.run(app, settings(whole, "fedavg", 12)) == 0
    going = Background(federation, app, settings(parts, "fedavg", 12))
    wait_until(lambda: len(history(parts / "run-1")) >= 1)
    before = federation.superlink_pid
    os.kill(before, signal.SIGKILL)
    assert going.end() != 0

    def back() -> bool:
        try:
            return (
                federation.superlink_pid != before
                and sum(bool(one.online) for one in federation.status()) == NODES
            )
        except FedcladeError:  # it has no process just now, or does not answer yet
            return False

    wait_until(back)
    assert federation.run(app, settings(parts, "fedavg", 12)) == 0
    assert [row["round"] for row in history(parts / "run-1")] == list(range(1, 13))
    same_models(whole / "run-1", parts / "run-1")


def changed(app: Path, folder: Path, code: str) -> Path:
    """The app with this put before what its load_data does."""
    new_app(folder)
    task = next(folder.glob("*/task.py"))
    text = task.read_text()
    line = '    number, nodes = int(node["partition-id"]), int(node["num-partitions"])\n'
    assert line in text
    task.write_text(text.replace(line, line + code))
    return folder


def test_a_client_that_is_ill_costs_only_itself(
    federation: Federation, app: Path, tmp_path: Path
) -> None:
    """Node 1 cannot load its data; one client of node 2 has numbers that no training survives."""
    code = """    if number == 1:
        raise RuntimeError("the disk of this clinic is broken")
    if number == 2:
        digits = fc.data.load("digits")
        everyone = fc.data.partition(digits, fc.data.Iid(), clients=nodes, seed=0)
        x, y, x_test, y_test = everyone.arrays(2)
        return {"ward-0": (x, y, x_test, y_test), "ill": (x * 0 + 1e30, y, x_test, y_test)}
"""
    ill = changed(app, tmp_path / "ill", code)
    assert (
        federation.run(ill, settings(tmp_path / "out", "fedavg", 2, federation__nodes=NODES - 1))
        == 0
    )
    run = tmp_path / "out" / "run-1"
    names = [
        client["name"] for client in json.loads((run / "federation.json").read_text())["clients"]
    ]
    assert len(names) == 2 * (NODES - 1)
    sick = names.index("ill")
    for row in history(run):
        # In the last round it fails twice: in training and in the evaluation.
        assert {failure["client"] for failure in row["failures"]} == {sick}
        assert "finite" in row["failures"][0]["reason"]


def test_a_node_that_comes_late_is_admitted_and_gets_its_groups_model(
    federation: Federation, app: Path, tmp_path: Path
) -> None:
    """Node 3 stands still when the run begins: the others do not wait for it."""
    late = federation.node_pid(3)
    os.kill(late, signal.SIGSTOP)
    try:
        given = settings(
            tmp_path, "clade_groups", 25, federation__nodes=NODES - 1, federation__deadline=60.0
        )
        going = Background(federation, app, given)
        run = tmp_path / "run-1"
        wait_until(lambda: len(history(run)) >= 1)
        assert len(json.loads((run / "federation.json").read_text())["clients"]) == 2 * (NODES - 1)
    finally:
        os.kill(late, signal.SIGCONT)
    assert going.end() == 0
    assert history(run)[0]["clients"] < history(run)[-1]["clients"]
    rows = list(csv.DictReader((run / "clients.csv").open()))
    names = [row["client"] for row in rows]
    assert len(names) == 2 * NODES
    newcomers = [number for number, name in enumerate(names) if name.startswith("node-3/")]
    assert newcomers == [2 * NODES - 2, 2 * NODES - 1]
    clusters = [int(row["cluster"]) for row in rows]
    assert len(set(clusters)) == 2
    assert {clusters[number] for number in newcomers} <= set(clusters[: -len(newcomers)])
    stored = StoredModels(run)
    for number in newcomers:
        (file,) = federation.plan.folder.glob(
            f"node-3/nodes/*/models/{names[number].split('/')[1]}.safetensors"
        )
        for key, value in load_file(file).items():
            assert torch.equal(value, stored.row(int(stored.model_ids[number]))[key])


def test_a_node_that_dies_in_a_round_is_used_again_when_it_is_back(
    federation: Federation, app: Path, tmp_path: Path
) -> None:
    """Node 0 hangs in a round and is killed; the round ends at the deadline without it."""
    run = tmp_path / "out" / "run-1"
    going = Background(
        federation, app, settings(tmp_path / "out", "fedavg", 100, federation__deadline=25.0)
    )
    wait_until(lambda: len(history(run)) >= 1)
    node = federation.node_pid(0)
    os.kill(node, signal.SIGSTOP)
    time.sleep(3)
    os.kill(node, signal.SIGKILL)
    assert going.end() == 0
    failed = [len(row["failures"]) for row in history(run)]
    assert failed[0] == 0
    assert 2 in failed
    assert failed[-1] == 0, [row["failures"] for row in history(run)]
    assert all(
        len({failure["client"] for failure in row["failures"]} - {0, 1, 2, 3, 4, 5, 6, 7}) == 0
        for row in history(run)
    )


@pytest.mark.skipif(
    psutil.virtual_memory().total < 16 << 30, reason="twenty nodes need 16 GiB of memory"
)
def test_twenty_nodes_run_on_one_machine(
    start_federation: Start, app: Path, tmp_path: Path
) -> None:
    federation = start_federation(20, secure=False)
    chosen = settings(tmp_path, "clade_groups", 3, federation__nodes=20)
    assert federation.run(app, chosen) == 0
    federation.down()
    rows = history(tmp_path / "run-1")
    assert [(row["clients"], row["failures"]) for row in rows] == [(40, [])] * 3
