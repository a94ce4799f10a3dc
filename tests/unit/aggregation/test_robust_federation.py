"""`server.aggregator`: every method that averages models, with some of them bad."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

import fedclade as fc
from fedclade.aggregation.robust_federation import RobustFederation
from fedclade.core.federation import Aggregator, SegmentSum
from fedclade.core.pytree import Tree
from fedclade.data import Clients
from fedclade.training.config import EngineConfig, LocalConfig, ServerConfig, TrainingConfig
from fedclade.training.runner import TrainingRun

AVERAGES = pytest.mark.parametrize(
    "average", [name for name in get_args(Aggregator) if name != "mean"]
)
METHODS = pytest.mark.parametrize(
    "method",
    [
        fc.FedAvg(),
        fc.FedProx(),
        fc.FedNova(),
        fc.SCAFFOLD(),
        fc.LGFedAvg(),
        fc.PerFedAvg(),
        fc.IFCA(clusters=2),
        fc.FedSEM(clusters=2),
        fc.PCAHC(clusters=2),
        fc.CFL(),
        fc.FLISDC(),
        fc.FLISHC(),
        fc.Clade(),
        fc.FLT(manifold="none", k=2),
    ],
    ids=lambda method: method.name,
)


@pytest.fixture(scope="module")
def alike() -> Clients:
    """Twenty clients of one distribution, each with many of the digits."""
    return fc.data.partition(fc.data.load("digits"), fc.data.Iid(), clients=20, seed=0)


def run(
    clients: Clients, method: fc.Method, average: str, bad: set[int], rounds: int = 20, **local: Any
) -> fc.Result:
    """Clients `bad` send their weights times -10: finite, of the right shape, and useless."""

    def fault(key: int, client: int, reply: Tree) -> Tree:
        return (
            {
                name: -10 * value if value.is_floating_point() and value.ndim else value
                for name, value in reply.items()
            }
            if client in bad
            else reply
        )

    settings = TrainingConfig(rounds, 1.0, eval_every=0, checkpoint_every=0)
    engine = fc.Simulator(clients, faults=fault if bad else None)
    learn = LocalConfig(**{"lr": 0.1, "epochs": 2, **local})
    return TrainingRun(
        method,
        clients,
        fc.models.MLP(16),
        learn,
        settings,
        EngineConfig(),
        federation=engine,
        server=ServerConfig(average),
    ).run()  # type: ignore[arg-type]


@METHODS
@AVERAGES
def test_every_method_that_averages_runs_with_every_aggregator(
    method: fc.Method, average: str, digits: Clients
) -> None:
    summary = run(digits, method, average, set(), rounds=2).summary
    assert summary["rounds"] == 2
    assert summary["failures"] == 0


@AVERAGES
def test_a_fifth_of_bad_models_harms_only_the_mean(average: str, alike: Clients) -> None:
    bad = {3, 8, 13, 18}
    clean = run(alike, fc.FedAvg(), "mean", set()).summary["accuracy"]
    mean = run(alike, fc.FedAvg(), "mean", bad).summary["accuracy"]
    robust = run(alike, fc.FedAvg(), average, bad).summary["accuracy"]
    assert mean < clean - 10
    assert robust > clean - 2


def test_the_median_of_one_client_is_its_model(digits: Clients) -> None:
    mean, median = (
        run(digits, fc.FedAvg(), average, set(), rounds=1) for average in ("mean", "median")
    )
    # With many clients they differ.
    assert mean.summary["accuracy"] != median.summary["accuracy"]
    single = digits.only([0])
    mean_model, median_model = (
        run(single, fc.FedAvg(), average, set(), rounds=1).model_of(0).state_dict()
        for average in ("mean", "median")
    )
    assert all(torch.equal(mean_model[name], median_model[name]) for name in mean_model)


def test_sums_of_other_values_than_models_stay_sums(digits: Clients) -> None:
    engine = fc.Simulator(digits)
    fed = RobustFederation(engine, "median")
    objective = fc.core.functional_model.Objective(fc.models.Logistic().build(digits.shape, 10))
    program, ids = fc.programs.evaluation.evaluate_losses(objective), torch.arange(4)
    models = fc.core.pytree.stack([objective.params()])
    add = SegmentSum(segment_ids=torch.zeros_like(ids), weights=torch.ones(4), num_segments=1)
    plain, robust = (
        federation.map(program, ids, broadcast=models, key=1, reduce=add).sums
        for federation in (engine, fed)
    )
    assert torch.equal(plain["loss"], robust["loss"])
    assert fed.aggregator == "median"
    assert torch.equal(fed.sizes, engine.sizes)


def test_a_run_without_replies_ends_normally(digits: Clients) -> None:
    settings = TrainingConfig(2, 1.0, eval_every=0, checkpoint_every=0)
    engine = fc.Simulator(digits, faults=lambda key, client, reply: None)
    result = TrainingRun(
        fc.FedAvg(),
        digits,
        fc.models.MLP(4),
        LocalConfig(),
        settings,
        EngineConfig(),
        federation=engine,
        server=ServerConfig("median"),
    ).run()
    assert result.summary["failures"] == 2 * len(digits)


def test_an_unknown_aggregator_and_a_method_with_custom_aggregation_are_refused(
    digits: Clients,
) -> None:
    with pytest.raises(fc.InvalidInputError, match="'mode'") as unknown:
        ServerConfig(aggregator="mode")  # type: ignore[arg-type]
    assert unknown.value.field == "server.aggregator"
    assert all(name in str(unknown.value) for name in get_args(Aggregator))
    with pytest.raises(fc.InvalidInputError, match="'median'") as unsupported:
        run(digits, fc.FedGMCC(), "median", set())
    assert unsupported.value.field == "server.aggregator"
    assert "fedgmcc" in str(unsupported.value)
