"""Methods whose clients predict with more than one plain model: runs, folders and nodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fedclade as fc
from fedclade.conformance.example_clients import ragged_clients, small_digits
from fedclade.conformance.in_process_federation import InProcessFederation
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.program_serialization import NodeContext
from fedclade.engines.base import EvalRequest
from fedclade.methods.base import Method

METHODS = {
    "fedem": fc.FedEM(),
    "fedem, FedRC": fc.FedEM(components=2, fedrc=True),
    "knn_per": fc.KNNPer(),
    "apfl, outputs": fc.APFL(mix="outputs"),
}
SETTINGS = {"rounds": 2, "clients_per_round": 0.75, "lr": 0.1, "device": "cpu", "eval_every": 0}


@pytest.mark.parametrize("name", METHODS)
def test_predictions_are_what_was_evaluated(name: str, tmp_path: Path) -> None:
    clients = small_digits()
    result = fc.run(METHODS[name], clients, fc.models.MLP(8), out=tmp_path / "run", **SETTINGS)
    loaded = fc.load(tmp_path / "run")
    for client in (0, 7):
        part = int(clients.test_part_id[client])
        rows = clients.test.index[clients.test.offsets[part] : clients.test.offsets[part + 1]]
        x, y = clients.x_test[rows], clients.y_test[rows]
        p = result.predict(x, client, kind="probability")
        torch.testing.assert_close(p.sum(1), torch.ones(len(x)))
        assert torch.equal(loaded.predict(x, client, kind="probability"), p)
        right = (result.predict(x, client) == y).float().mean()
        assert 100 * float(right) == pytest.approx(result.clients["accuracy"][client], abs=1e-3)
        loss = -p.gather(1, y[:, None]).log().mean()
        assert float(loss) == pytest.approx(result.clients["loss"][client], rel=1e-4)
    resumed = fc.run(
        METHODS[name], clients, fc.models.MLP(8), out=tmp_path / "run", resume=True, **SETTINGS
    )
    assert resumed.already_finished


@pytest.mark.parametrize("name", METHODS)
def test_a_run_of_the_users_module_is_loaded_with_that_module(name: str, tmp_path: Path) -> None:
    clients = small_digits()
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 10))
    result = fc.run(METHODS[name], clients, module, out=tmp_path / "run", **SETTINGS)
    loaded = fc.load(tmp_path / "run", model=module)
    x = clients.x_test[:4]
    assert torch.equal(loaded.predict(x, 2), result.predict(x, 2))
    again = fc.load(tmp_path / "run", model=result.module)  # already the module of a client
    assert torch.equal(again.predict(x, 2), result.predict(x, 2))


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_serves_the_same_models(name: str, tmp_path: Path) -> None:
    clients, x = small_digits(), small_digits().x_test[:6]
    whole = fc.run(METHODS[name], clients, fc.models.MLP(8), **SETTINGS)
    stopped = {**SETTINGS, "rounds": 1, "checkpoint_every": 1, "out": tmp_path / "run"}
    fc.run(METHODS[name], clients, fc.models.MLP(8), **stopped)
    rest = {**stopped, "rounds": 2, "resume": True}
    resumed = fc.run(METHODS[name], clients, fc.models.MLP(8), **rest)
    for client in range(len(clients)):
        assert torch.equal(
            resumed.predict(x, client, kind="output"), whole.predict(x, client, kind="output")
        )


@pytest.mark.parametrize("name", METHODS)
def test_nodes_evaluate_as_the_simulator_does(name: str) -> None:
    clients = ragged_clients()
    torch.manual_seed(0)
    module = fc.models.MLP(8).build(clients.shape or (), 3)
    objective = Objective(module)
    method: Method = METHODS[name].with_local_config(LocalTraining(objective, lr=0.1))
    served = method.served_objective(module, objective)
    ids, values = torch.arange(len(clients)), []
    node_context = NodeContext(objective, served=served)
    for fed in (fc.Simulator(clients), InProcessFederation(clients, node_context)):
        fed.init_client_state(method.initial_client_state(objective.params()))
        state = method.init(fed, objective.params(), key=0)
        fed.client_state.commit(0)
        state = method.round(fed, state, ids[:4], key=1)
        fed.client_state.commit(1)
        request = EvalRequest(served, {}, "train", method.personalization_program())
        values.append(fed.evaluate(method.assign_models(state, ids), ids, [request])[0]["loss"])
    torch.testing.assert_close(values[0], values[1])


@pytest.mark.parametrize("name", METHODS)
def test_fine_tuning_is_refused(name: str) -> None:
    tune = fc.PersonalConfig("finetune")
    with pytest.raises(fc.InvalidInputError) as caught:
        fc.run(METHODS[name], small_digits(), fc.models.MLP(8), personal=tune, **SETTINGS)
    assert caught.value.field == "personal.layer"


@pytest.mark.parametrize("name", METHODS)
def test_models_with_batch_norm_and_dropout(name: str) -> None:
    layers = (nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 10))
    module = nn.Sequential(nn.Flatten(), *layers)
    result = fc.run(METHODS[name], small_digits(), module, **SETTINGS)
    assert torch.isfinite(result.predict(small_digits().x_test[:4], 0, kind="output")).all()


def test_knn_per_with_own_batch_norm() -> None:
    layers = (nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    module = nn.Sequential(nn.Flatten(), *layers)
    settings = {**SETTINGS, "clients_per_round": 1.0}
    result = fc.run(fc.KNNPer(), small_digits(), module, batch_norm="own", **settings)
    first, second = (result.model_of(client).state_dict() for client in (0, 1))
    assert not torch.equal(first["model.2.running_mean"], second["model.2.running_mean"])
    assert torch.equal(first["model.1.weight"], second["model.1.weight"])


def test_fedem_with_own_batch_norm_is_refused() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    with pytest.raises(fc.InvalidInputError) as caught:
        fc.run(fc.FedEM(), small_digits(), module, batch_norm="own", **SETTINGS)
    assert caught.value.field == "local.batch_norm"


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("aggregator", ["median", "clipped_mean"])
def test_robust_aggregation_and_server_optimizers(name: str, aggregator: str) -> None:
    result = fc.run(
        METHODS[name],
        small_digits(),
        fc.models.MLP(8),
        aggregator=aggregator,
        server_optimizer="fedadam",
        serve="mean",
        **SETTINGS,
    )
    assert result.summary["loss"] > 0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_optimizers_momentum_decay_and_clipping(name: str, optimizer: str) -> None:
    if METHODS[name].needs_sgd and optimizer != "sgd":
        pytest.skip("the method needs SGD")
    settings = {**SETTINGS, "lr": 0.01, "weight_decay": 0.01, "clip_norm": 1.0}
    momentum = 0.5 if optimizer == "sgd" else 0.0
    result = fc.run(
        METHODS[name],
        small_digits(),
        fc.models.MLP(8),
        optimizer=optimizer,
        momentum=momentum,
        **settings,
    )
    assert result.summary["loss"] > 0
