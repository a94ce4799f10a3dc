"""The personal layer of a run: what is measured, delivered, sent and refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedclade as fc
from fedclade.conformance.example_clients import small_digits
from fedclade.conformance.in_process_federation import InProcessFederation
from fedclade.core.functional_model import Objective
from fedclade.core.program_serialization import NodeContext
from fedclade.errors import InvalidInputError
from fedclade.methods import METHODS
from fedclade.training.config import EngineConfig
from fedclade.training.personal_layer import FEWEST_POOLED, _pools, layer_of
from fedclade.training.runner import TrainingRun

LAYERS = ("finetune", "interpolate", "knn", "auto")
GUARDED = LAYERS[1:]
SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "clients_per_round": 0.5,
    "lr": 0.1,
    "device": "cpu",
    "eval_every": 2,
}


def do(layer: str = "none", method: fc.Method | None = None, **changed: Any) -> fc.Result:
    every = changed.pop("every", 0)
    personal = fc.PersonalConfig(layer, epochs=2, every=every)  # type: ignore[arg-type]
    clients = changed.pop("clients", None) or two_classes()
    model = changed.pop("model", fc.models.MLP(8))
    return fc.run(
        method or fc.FedAvg(), clients, model, personal=personal, **{**SETTINGS, **changed}
    )


def two_classes() -> fc.data.Clients:
    return fc.data.partition(
        fc.data.load("digits"), fc.data.Pathological(classes_per_client=2), clients=10, seed=0
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_changes_what_clients_use_and_nothing_else(layer: str, tmp_path: Path) -> None:
    plain, result = do(), do(layer, out=tmp_path / "run")
    assert plain.summary["accuracy"] is not None
    assert result.summary["accuracy"] is not None
    assert result.summary["accuracy_shared"] == plain.summary["accuracy"]
    assert result.summary["loss_shared"] == plain.summary["loss"]
    assert result.summary["train_loss"] == plain.summary["train_loss"]
    assert result.clients["accuracy_shared"] == plain.clients["accuracy"]
    assert result.summary["accuracy"] > plain.summary["accuracy"] + 5
    first, last = result.history[1], result.history[3]
    assert first["accuracy"] == plain.history[1]["accuracy"]
    assert "accuracy_shared" not in first
    assert last["accuracy"] == result.summary["accuracy"]

    loaded, clients = fc.load(tmp_path / "run"), two_classes()
    for client in (0, 7):
        part = int(clients.test_part_id[client])
        x, y = clients.x_test[clients.test[part]], clients.y_test[clients.test[part]]
        p = result.predict(x, client, kind="probability")
        assert torch.equal(loaded.predict(x, client, kind="probability"), p)
        right = (p.argmax(1) == y).float().mean()
        assert 100 * float(right) == pytest.approx(result.clients["accuracy"][client], abs=1e-3)
        loss = -p.gather(1, y[:, None]).log().mean()
        assert float(loss) == pytest.approx(result.clients["loss"][client], rel=1e-4)


@pytest.mark.parametrize("method", [fc.FedAvg, fc.SCAFFOLD, fc.FedPer])
def test_a_layer_in_every_round_changes_no_training(method: type[fc.Method]) -> None:
    plain = do(method=method(), eval_every=1)
    result = do("auto", method=method(), eval_every=1, every=1)
    for name in ("accuracy", "loss"):
        shared = [row[f"{name}_shared"] for row in result.history]  # type: ignore[literal-required]
        expected = [row[name] for row in plain.history]  # type: ignore[literal-required]
        assert shared == pytest.approx(expected, rel=1e-12)
    assert [row["accuracy"] for row in result.history] != [row["accuracy"] for row in plain.history]


@pytest.mark.parametrize("layer", GUARDED)
def test_the_choice_sends_sums_and_is_counted(layer: str) -> None:
    plain, result = do(), do(layer)
    count = {"interpolate": 5, "knn": 11, "auto": 15}[layer]
    slots = 0 if layer == "interpolate" else int(two_classes().sizes.max())
    weights = sum(weight.nbytes for weight in do().model_of(0).parameters())
    before, after = plain.history[3], result.history[3]
    assert after["bytes_up"] - before["bytes_up"] == 10 * 4 * (1 + 2 * count)
    assert after["bytes_down"] - before["bytes_down"] == 10 * (weights + slots)
    for early, row in zip(plain.history[:3], result.history[:3], strict=True):
        assert (early["bytes_up"], early["bytes_down"]) == (row["bytes_up"], row["bytes_down"])
    difference = result.summary["bytes_up"] - plain.summary["bytes_up"]
    assert difference == after["bytes_up"] - before["bytes_up"]


@pytest.mark.parametrize("layer", LAYERS)
def test_nodes_make_the_models_of_the_simulator(layer: str) -> None:
    clients = two_classes()
    module = fc.models.MLP(8).build(clients.shape, 10)
    objective = Objective(module, x=clients.metadata.x)
    personal = fc.PersonalConfig(layer, epochs=2)  # type: ignore[arg-type]
    made = layer_of(personal, fc.FedAvg(), module, objective, clients.metadata)
    assert made is not None
    served = made.served_objective(module, objective, clients.metadata.x)
    simulator = fc.Simulator(clients)
    nodes = InProcessFederation(clients, NodeContext(objective, served=served))
    for node in nodes.in_process.connected.values():
        node.metrics = {"accuracy": fc.core.accuracy}
    simulated, remote = (
        TrainingRun(
            fc.FedAvg(),
            clients,
            module,
            fc.LocalConfig(lr=0.1),
            fc.TrainingConfig(rounds=2, clients_per_round=1.0),
            EngineConfig(),
            "cpu",
            federation=engine,
            personal=personal,
        ).run()
        for engine in (simulator, nodes)
    )
    for name in ("accuracy", "loss", "accuracy_shared", "loss_shared"):
        assert remote.summary[name] == pytest.approx(simulated.summary[name], rel=1e-5)  # type: ignore[literal-required]
    steps = [node.simulator.clock.asked for node in nodes.in_process.connected.values()]
    assert sum(steps) == simulator.clock.asked  # nodes make the models once too
    saved = {
        name: model
        for node in nodes.in_process.connected.values()
        for name, model in node.state_store.models.items()  # type: ignore[attr-defined]
    }
    for client in range(10):
        state = simulated.model_of(client).state_dict()
        for name, value in state.items():
            torch.testing.assert_close(saved[str(client)][name], value, atol=1e-5, rtol=1e-5)
    with pytest.raises(InvalidInputError):
        remote.model_of(0)


def test_a_resumed_run_gives_the_same_bytes(tmp_path: Path) -> None:
    whole = do("auto", out=tmp_path / "whole", checkpoint_every=1)

    def stop(row: Any) -> None:
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        do("auto", out=tmp_path / "parts", checkpoint_every=1, on_round=stop)
    resumed = do("auto", out=tmp_path / "parts", checkpoint_every=1, resume=True)
    assert resumed.summary["accuracy"] == whole.summary["accuracy"]
    for name in ("clients.csv", "models/models.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "parts" / name).read_bytes()


def test_a_run_that_stops_early_has_the_layer() -> None:
    result = do("finetune", on_round=lambda row: row["round"] == 2)
    assert result.summary["stopped"] == "on_round"
    assert result.summary["accuracy_shared"] == result.history[-1]["accuracy_shared"]
    assert result.summary["accuracy"] == result.history[-1]["accuracy"]
    assert result.summary["accuracy"] != result.summary["accuracy_shared"]


def test_the_best_round_has_the_layer() -> None:
    clients = two_classes().with_validation(0.2)
    result = do("auto", clients=clients, select="best", eval_every=1, lr=0.5)
    assert "accuracy_shared" in result.summary
    row = result.history[result.summary["selected_round"] - 1]
    shared = row.get("accuracy_shared", row.get("accuracy"))
    assert result.summary["accuracy_shared"] == shared
    # Rounds are compared without the layer.
    assert result.summary["validation_loss"] == row["validation_loss"]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_layer_or_a_reason(name: str) -> None:
    method = METHODS[name]()
    names = {field.name for field in method.__dataclass_fields__.values()}
    if method.groups == "given" and "clusters" in names:
        method = replace(method, clusters=2)  # type: ignore[call-arg]
    layers = [nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)]
    if name != "fedbn":
        layers.pop(1)
    settings = {"clients": small_digits(), "model": nn.Sequential(nn.Flatten(), *layers)}
    is_mixture = method.served_module(settings["model"]) is not settings["model"]
    for layer in ("finetune", "auto"):
        if is_mixture or (layer == "auto" and method.no_guarded_layer):
            with pytest.raises(InvalidInputError) as caught:
                do(layer, method, rounds=1, **settings)
            assert caught.value.field == "personal.layer"
        else:
            result = do(layer, method, rounds=1, **settings)
            assert result.summary["accuracy_shared"] is not None
            assert torch.isfinite(result.predict(small_digits().x_test[:4], 3, kind="output")).all()
    own_models = ("local", "ditto", "apfl", "pfedgraph")
    use_held_out = ("fedavg_finetune", "fedbabu", "per_fedavg", "feddbe")
    assert bool(method.no_guarded_layer) == (name in (*own_models, *use_held_out))


def test_absent_clients_and_rejected_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that do not answer get a layer too, by the scores of the others."""
    map_ = fc.Simulator.map
    asked = []

    def only_the_first(self: fc.Simulator, program: Any, ids: Any, **arguments: Any) -> Any:
        if "score_candidates" not in program.name:
            return map_(self, program, ids, **arguments)
        asked.append(len(ids))
        self.faults = lambda key, client, reply: (  # type: ignore[assignment]
            reply
            if client < 3
            else None
            if client < 6
            else {n: v * torch.nan for n, v in reply.items()}
        )
        try:
            return map_(self, program, ids, **arguments)
        finally:
            self.faults = None  # type: ignore[assignment]

    monkeypatch.setattr(fc.Simulator, "map", only_the_first)
    result = do("auto")
    assert asked == [10]
    failures = result.history[-1]["failures"]
    assert {each["client"] for each in failures} == set(range(3, 10))
    assert result.summary["accuracy"] is not None
    assert result.summary["accuracy_shared"] is not None
    assert result.summary["accuracy"] > result.summary["accuracy_shared"]


def test_other_tasks() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for slope in (1.0, 1.0, 1.0, -3.0):
        x = torch.randn(60, 2, generator=generator)
        y = slope * x[:, :1]
        pairs.append((x[:40], y[:40], x[40:], y[40:]))
    settings = {"clients": fc.data.from_arrays(pairs), "model": nn.Linear(2, 1), "loss": "mse"}
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "personal.layer"):
        do("knn", **settings)
    result = do("auto", **settings, clients_per_round=1.0)
    assert result.summary["loss"] < result.summary["loss_shared"] / 2  # type: ignore[operator]
    assert list(result.model_of(3).state_dict()) == ["weight", "bias"]


def test_clients_without_held_out_samples_use_the_shared_model() -> None:
    pairs = [(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(3)]
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    for layer in GUARDED:
        result = do(layer, clients=fc.data.from_arrays(pairs), model=model)
        plain = do(clients=fc.data.from_arrays(pairs), model=model)
        torch.testing.assert_close(
            result.predict(x, 1, kind="probability"), plain.predict(x, 1, kind="probability")
        )


def test_small_groups_share_a_sum() -> None:
    ids = torch.tensor([0] * 7 + [1] * 2 + [2] * 9 + [3] * 3)
    group, pools = _pools(ids, 4)
    assert (group.tolist(), pools) == ([0, 2, 1, 2], 3)
    group, pools = _pools(ids[:9], 4)  # too few for a pool of their own
    assert (group.tolist()[:2], pools) == ([0, 0], 1)
    group, pools = _pools(torch.arange(3), 3)
    assert (group.tolist(), pools) == ([0, 0, 0], 1)
    assert FEWEST_POOLED == 5


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"layer": "some"}, "personal.layer"),
        ({"epochs": 0}, "personal.epochs"),
        ({"every": -1}, "personal.every"),
    ],
)
def test_invalid_settings(changed: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        fc.PersonalConfig(**changed)
    assert caught.value.field == field


def test_an_exported_group_with_neighbors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = do("knn", out=tmp_path / "run")
    fc.export(tmp_path / "run", tmp_path / "out", ["safetensors"])
    folder = tmp_path / "out" / "model-3"
    code = json.loads((folder / "card.json").read_text())["load"]["safetensors"]
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(code, names)
    x, client = two_classes().x_test[:4], int((result.models.model_ids == 3).nonzero())
    assert torch.equal(names["model"](x), result.model_of(client)(x))
