"""`server.optimizer` and `server.serve` in runs: every method that averages, stops, splits."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedclade as fc
from fedclade.aggregation.mean import weighted_mean
from fedclade.aggregation.optimizer_federation import OptimizerFederation
from fedclade.aggregation.server_optimizer import update_models
from fedclade.core import Federation, State
from fedclade.core.federation import ModelAssignment, SegmentSum, ServerUpdate
from fedclade.core.local_sgd import sgd
from fedclade.data import Clients
from fedclade.io import checkpoint
from fedclade.methods.cfl import CFLState

METHODS = pytest.mark.parametrize(
    "method",
    [
        fc.FedAvg(),
        fc.FedProx(),
        fc.FedNova(),
        fc.SCAFFOLD(),
        fc.LGFedAvg(),
        fc.PerFedAvg(),
        fc.IFCA(clusters=2, warm_up=1, num_restarts=2, trial_rounds=2),
        fc.IFCA(clusters=2, shared_layers="trunk"),
        fc.FedSEM(clusters=2),
        fc.PCAHC(clusters=2),
        fc.CFL(eps1=10.0, eps2=0.0, gamma_max=0.0, check_after=1),
        fc.CFL(permute=True),
        fc.FLISHC(),
        fc.Clade(recluster_every=2),
        fc.FLT(manifold="none", k=2),
        fc.Oracle(),
    ],
    ids=lambda method: method.name,
)


class StopError(Exception):
    pass


def files(folder: Path) -> dict[str, Any]:
    """The files of a run, without the times."""
    summary = json.loads((folder / "summary.json").read_text())
    tensors = sorted(folder.rglob("*.safetensors"))
    states = [checkpoint._read(path) for path in tensors if path.name.startswith("round-")]
    return {
        "models": (folder / "models" / "models.safetensors").read_bytes(),
        "states": [
            {name: value.tolist() for name, value in found.state.items()} for found in states
        ],
        "summary": {name: value for name, value in summary.items() if name != "seconds"},
    }


@METHODS
@pytest.mark.parametrize("serve", ["last", "mean"])
def test_every_averaging_method_resumes_to_the_same_bytes(
    method: fc.Method, serve: Any, digits: Clients, tmp_path: Path
) -> None:
    def run(folder: str, stop: int = 0) -> fc.Result:
        def on_round(row: Any) -> None:
            if row["round"] == stop:
                raise StopError

        return fc.run(
            method,
            digits,
            fc.models.MLP(8),
            rounds=4,
            clients_per_round=0.5,
            server_optimizer="fedadam",
            serve=serve,
            checkpoint_every=1,
            eval_every=2,
            out=tmp_path / folder,
            resume=(tmp_path / folder).exists(),
            on_round=on_round,
        )

    whole = run("whole")
    with pytest.raises(StopError):
        run("stopped", stop=3)
    run("stopped")
    assert files(tmp_path / "whole") == files(tmp_path / "stopped")
    last = checkpoint.latest(tmp_path / "whole" / "checkpoint")
    assert last is not None
    rows = {
        len(v) for name, v in last.state.items() if name.startswith(("models/", "server_state/"))
    }
    assert len(rows) == 1  # the moments and means have a row for each model
    assert any(name.startswith("server_state/v/") for name in last.state)
    assert any(name.startswith("server_state/mean/") for name in last.state) == (serve == "mean")
    assert whole.summary["failures"] == 0


def test_fedadam_equals_its_formula_on_the_means_of_fedavg(small_digits: Clients) -> None:
    model = module_with_batch_norm()
    trained = dict(model.named_parameters())

    def run(rounds: int, **server: Any) -> dict[str, Tensor]:
        # One batch has all samples, so that all rounds draw the same.
        settings = {"clients_per_round": 1.0, "batch_size": 100, "eval_every": 0}
        result = fc.run(fc.FedAvg(), small_digits, model, rounds=rounds, **settings, **server)
        return {name: value.double() for name, value in result.model_of(0).state_dict().items()}

    got = run(2, server_optimizer="fedadam", server_lr=0.02)
    w = {name: value.double() for name, value in model.state_dict().items()}
    m = {name: torch.zeros_like(value) for name, value in w.items()}
    v = {name: torch.full_like(value, 1e-6) for name, value in w.items()}
    for _ in range(2):
        model.load_state_dict(w)
        for name, mean in run(1).items():
            delta = mean - w[name]
            m[name] = 0.9 * m[name] + 0.1 * delta
            v[name] = 0.99 * v[name] + 0.01 * delta**2
            step = 0.02 * m[name] / (v[name].sqrt() + 1e-3)
            w[name] = w[name] + step if name in trained else mean
    for name, value in got.items():
        assert torch.allclose(value, w[name], atol=1e-5), name


def test_served_models_are_the_means_over_the_rounds(small_digits: Clients) -> None:
    def models(rounds: int, **server: Any) -> dict[str, Tensor]:
        result = fc.run(
            fc.FedAvg(), small_digits, fc.models.MLP(8), rounds=rounds, eval_every=0, **server
        )
        return result.model_of(0).state_dict()

    x1, x2, x3 = (models(rounds) for rounds in (1, 2, 3))
    for name, value in models(3, serve="mean").items():
        expected = (x1[name] + 256 * x2[name] + 6561 * x3[name]) / 6818
        assert torch.allclose(value, expected, atol=1e-6)
        assert not torch.allclose(value, x3[name], atol=1e-6)


def bound(method: fc.Method, clients: Clients) -> tuple[fc.Method, fc.Simulator, dict[str, Tensor]]:
    objective = fc.core.Objective(fc.models.MLP(4).build(clients.shape, 10))
    return (
        method.with_local_config(fc.core.LocalTraining(objective)),
        fc.Simulator(clients),
        objective.params(),
    )


def test_a_cluster_without_replies_does_not_change(small_digits: Clients) -> None:
    oracle = fc.Oracle(truth=torch.arange(len(small_digits)) % 2)
    method, engine, params = bound(oracle, small_digits)
    fed = OptimizerFederation(engine, ServerUpdate("fedavgm", serve_mean=True))
    state = method.init(fed, params, key=0)
    state = method.round(fed, state, torch.arange(4), key=1)
    after = method.round(fed, state, torch.tensor([0, 2]), key=2)
    for before, now in ((state.models, after.models), (state.server_state, after.server_state)):
        for name in before:
            assert torch.equal(before[name][1], now[name][1])
            assert not torch.equal(before[name][0], now[name][0])


def test_a_split_copies_moments_and_means_and_a_revert_removes_them() -> None:
    models = {"w": torch.tensor([[1.0]])}
    state = CFLState.initial(models, clients=2, size=1)
    state = replace(state, server_state={"m/w": torch.tensor([[3.0]]), "rounds": torch.tensor([4])})
    ids, side = torch.arange(2), torch.tensor([False, True])
    split = state.split(0, ids, side, torch.tensor([[1.0], [-1.0]]))
    assert split.server_state["m/w"].flatten().tolist() == [3.0, 3.0, 3.0]
    assert split.server_state["rounds"].tolist() == [4, 4, 4]
    assert split.revert(torch.tensor([0])).server_state["m/w"].flatten().tolist() == [3.0]


def test_a_child_of_a_split_moves_from_its_parents_model_with_its_parents_moments() -> None:
    class Fed:
        server_update = ServerUpdate("fedavgm")

    state = State({"w": torch.tensor([[1.0]])}, torch.zeros(2, dtype=torch.int64))
    fed: Any = Fed()
    state = update_models(fed, state, {"w": torch.tensor([[2.0]])})  # Δ = m = 1, w = 2
    state = state.at_rows(torch.tensor([0, 0]))
    state = update_models(fed, state, {"w": torch.tensor([[2.5], [1.0]])})
    # Δ = 0.5 and -1, m = 0.9 + Δ
    assert state.models["w"].flatten().tolist() == pytest.approx([2 + 1.4, 2 - 0.1])


def test_robust_aggregators_combine_with_an_optimizer(small_digits: Clients) -> None:
    def model(**server: Any) -> dict[str, Tensor]:
        result = fc.run(
            fc.FedAvg(),
            small_digits,
            fc.models.Logistic(),
            rounds=2,
            clients_per_round=1.0,
            eval_every=0,
            **server,
        )
        return result.model_of(0).state_dict()

    plain = model(aggregator="median")
    # Without momentum and with lr = 1 FedAvgM takes the aggregate itself.
    same = model(
        aggregator="median", server_optimizer="fedavgm", server_momentum=0.0, server_lr=1.0
    )
    adam = model(aggregator="median", server_optimizer="fedadam")
    for name, value in plain.items():
        assert torch.allclose(value, same[name], atol=1e-6)
        assert not torch.allclose(value, adam[name], atol=1e-3)


@pytest.mark.parametrize(
    "method", [fc.Local(), fc.FLISDC(), fc.FedGMCC()], ids=lambda method: method.name
)
@pytest.mark.parametrize("field", ["server.optimizer", "server.serve"])
def test_methods_without_a_lasting_model_refuse(
    method: fc.Method, field: str, digits: Clients
) -> None:
    value = {"server.optimizer": {"server_optimizer": "fedadam"}, "server.serve": {"serve": "mean"}}
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == field):
        fc.run(method, digits, fc.models.MLP(4), **value[field])


@dataclass(frozen=True)
class OwnMean(fc.FedAvg):
    """A method that makes its models without `update_models`."""

    name = "own_mean"

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        clusters = state.cluster_ids[cohort]
        results = fed.map(
            sgd(self.local),
            cohort,
            per_client=ModelAssignment(state.models, clusters),
            key=key,
            reduce=SegmentSum(fed.sizes[cohort], 1, clusters),
        )
        return replace(
            state, models=weighted_mean(results.sums, results.total_weight, state.models)
        )


def test_a_method_that_ignores_the_optimizer_is_refused(small_digits: Clients) -> None:
    with pytest.raises(fc.InvalidInputError, check=lambda error: error.field == "server.optimizer"):
        fc.run(OwnMean(), small_digits, fc.models.MLP(4), rounds=1, server_optimizer="fedadam")


def module_with_batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
