"""`--engine flower`: the same groups and models as the simulator's, for methods of every kind."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedclade as fc
from fedclade.cli import main
from fedclade.conformance.in_process_federation import InProcessTransport
from fedclade.engines.remote.federation import RemoteFederation
from fedclade.engines.remote.membership import ClientRecord
from fedclade.errors import InvalidInputError
from fedclade.io.run_dir import StoredModels
from fedclade.methods import METHODS
from fedclade.programs.personal_layer import LAYER_FACTORIES
from fedclade.training import experiment_file

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fedclade[flower]'")
pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedclade[flower]'")

from fedclade.integrations.flower.simulation import experiment_node


def run(
    folder: Path, *options: str, experiment: str = "quickstart"
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "fedclade",
        "run",
        experiment,
        "--out",
        str(folder),
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def same_models_at_nodes(simulated: fc.Result, nodes: Path) -> None:
    """Whether each client of the nodes has the final model of the simulated one."""
    for client in range(len(simulated.clusters)):
        (file,) = nodes.glob(f"*/models/{client}.safetensors")
        model, actual = simulated.model_of(client), load_file(file)
        expected = dict(model.named_parameters()) | dict(model.named_buffers())
        assert actual.keys() <= expected.keys()
        assert actual
        for name, value in actual.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
# The example's model has no BatchNorm layer: of FedBN see tests/conformance/test_batch_norm.py.
@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"fedbn"}))
def test_every_method_gives_the_simulators_models_on_nodes(method: str, tmp_path: Path) -> None:
    """Without Ray: the nodes of the simulation, and messages that are encoded as on Flower."""
    settings = [f"method.name={method}", "run.rounds=3", "run.eval_every=1"]
    tables = experiment_file.apply(experiment_file.read("quickstart"), settings)
    experiment = experiment_file.experiment(tables)
    clients = experiment.clients(None)
    run = experiment.to_run(clients, "cpu")
    simulated = run.run(tmp_path / "simulated")
    spec = json.dumps({"tables": tables, "root": None, "imports": []})
    homes = tmp_path / "nodes"
    nodes = {str(node): experiment_node(spec, node, 4, str(homes)) for node in range(4)}
    fed = RemoteFederation(
        InProcessTransport(nodes),
        nodes["0"].compatibility_info,
        client_records=[
            ClientRecord("", -1, str(client), int(size), 0)
            for client, size in enumerate(clients.sizes)
        ],
        metadata=clients.metadata,
    )
    fed.refresh_membership()
    result = replace(run, federation=fed).run(tmp_path / "remote")
    assert torch.equal(simulated.clusters, result.clusters)
    for one, other in zip(simulated.history, result.history, strict=True):
        assert one["accuracy"] == pytest.approx(other["accuracy"], abs=1e-3)
    same_models_at_nodes(simulated, homes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["clade", "fedavg", "cfl", "flt", "ifca", "scaffold", "flis_hc", "local"]
)
def test_flower_and_simulator_give_the_same_results(method: str, tmp_path: Path) -> None:
    settings = ("--set", f"method.name={method}", "--set", "run.rounds=3")
    for engine, folder in (("simulator", "simulated"), ("flower", "flower")):
        done = run(tmp_path / folder, "--engine", engine, *settings)
        assert done.returncode == 0, done.stderr
    simulated, flower = (fc.load(tmp_path / folder) for folder in ("simulated", "flower"))
    assert flower.summary["engine"] == "flower"
    assert torch.equal(simulated.clusters, flower.clusters)
    assert flower.summary["accuracy"] == pytest.approx(simulated.summary["accuracy"], abs=0.5)
    if method in ("local", "clade"):  # personal models are only on the nodes' disks
        with pytest.raises(InvalidInputError) as caught:
            flower.model_of(0)
        assert caught.value.field == "client"
        same_models_at_nodes(simulated, tmp_path / "flower" / "nodes")
        return
    expected_models, models = (
        StoredModels(tmp_path / folder) for folder in ("simulated", "flower")
    )
    for row in range(int(simulated.clusters.max()) + 1):
        expected = expected_models.row(row)
        for name, value in models.row(row).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_names_of_a_table_stay(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow (fedclade[tables]) is not installed")
    settings = ("--set", "method.name=clade_groups", "--set", "run.rounds=2")
    for engine, folder in (("simulator", "simulated"), ("flower", "flower")):
        nodes = ("--nodes", "2") if engine == "flower" else ()
        done = run(tmp_path / folder, "--engine", engine, *nodes, *settings, experiment="hospitals")
        assert done.returncode == 0, done.stderr
        assert "cleveland" in done.stdout
    simulated, flower = (fc.load(tmp_path / folder) for folder in ("simulated", "flower"))
    assert flower.summary["engine"] == "flower"
    assert flower.clients["client"] == ["cleveland", "hungarian", "switzerland", "va"]
    assert flower.groups == simulated.groups
    assert flower.names == simulated.names
    assert flower.encoding == simulated.encoding
    x = torch.zeros(1, len(flower.names.features or ()))
    expected = simulated.predict(x, client="va", kind="output")
    actual = flower.predict(x, client="va", kind="output")
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_run_can_be_resumed(tmp_path: Path) -> None:
    settings = (
        "--engine",
        "flower",
        "--nodes",
        "2",
        "--set",
        "method.name=scaffold",
        "--set",
        "run.checkpoint_every=1",
    )
    assert run(tmp_path / "whole", *settings, "--set", "run.rounds=4").returncode == 0
    assert run(tmp_path / "parts", *settings, "--set", "run.rounds=2").returncode == 0
    assert run(tmp_path / "parts", *settings, "--set", "run.rounds=4", "--resume").returncode == 0
    whole, parts = (StoredModels(tmp_path / folder).row(0) for folder in ("whole", "parts"))
    for name, value in whole.items():
        assert torch.equal(value, parts[name])
    assert len((tmp_path / "parts" / "rounds.jsonl").read_text().splitlines()) == 4
    assert json.loads((tmp_path / "parts" / "summary.json").read_text())["rounds"] == 4


def test_a_node_runs_the_programs_of_the_personal_layer(tmp_path: Path) -> None:
    tables = experiment_file.apply(experiment_file.read("quickstart"), ["method.name=clade"])
    spec = {"tables": tables, "root": None, "imports": []}
    node = experiment_node(json.dumps(spec), 0, 20, str(tmp_path))
    assert node.context.factories is not None
    assert node.context.factories >= LAYER_FACTORIES


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--engine", "flour"), ("--engine flour: ", "simulator", "flower")),
        (("--nodes", "3"), ("--nodes 3: ", "--engine flower")),
        (("--engine", "flower", "--nodes", "1000"), ("--nodes = 1000: ", "40")),
    ],
)
def test_invalid_options_give_one_line(
    options: tuple[str, ...],
    parts: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "run")
    monkeypatch.setattr(sys, "argv", ["fedclade", "run", "quickstart", "--out", out, *options])
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"fedclade: {parts[0]}")
    for part in parts:
        assert part in line
