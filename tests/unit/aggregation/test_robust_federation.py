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
    """Twenty clients of one kind, each with a good part of the digits."""
    return fc.data.partition(fc.data.load("digits"), fc.data.Iid(), clients=20, seed=0)


def run(
    clients: Clients, method: fc.Method, average: str, bad: set[int], rounds: int = 20, **local: Any
) -> fc.Result:
    """Clients `bad` send weights of the opposite sign, all of size 2: finite, of the right shape,
    and of no use.
    """

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
def test_every_method_that_averages_runs_with_every_average(
    method: fc.Method, average: str, digits: Clients
) -> None:
    summary = run(digits, method, average, set(), rounds=2).summary
    assert summary["rounds"] == 2
    assert summary["failures"] == 0


@AVERAGES
def test_a_fifth_of_bad_models_spoils_the_mean_and_not_these(average: str, alike: Clients) -> None:
    bad = {3, 8, 13, 18}
    clean = run(alike, fc.FedAvg(), "mean", set()).summary["accuracy"]
    spoilt = run(alike, fc.FedAvg(), "mean", bad).summary["accuracy"]
    saved = run(alike, fc.FedAvg(), average, bad).summary["accuracy"]
    assert spoilt < clean - 10
    assert saved > clean - 2


def test_the_median_of_one_client_is_its_model(digits: Clients) -> None:
    alone = [run(digits, fc.FedAvg(), average, set(), rounds=1) for average in ("mean", "median")]
    assert (
        alone[0].summary["accuracy"] != alone[1].summary["accuracy"]
    )  # of many it is not the mean
    one = digits.only([0])
    same = [
        run(one, fc.FedAvg(), average, set(), rounds=1).model_of(0).state_dict()
        for average in ("mean", "median")
    ]
    assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])


def test_sums_that_are_no_models_stay_sums(digits: Clients) -> None:
    engine = fc.Simulator(digits)
    fed = RobustFederation(engine, "median")
    objective = fc.core.functional_model.Objective(fc.models.Logistic().build(digits.shape, 10))
    ask, ids = fc.programs.evaluation.evaluate_losses(objective), torch.arange(4)
    models = fc.core.pytree.stack([objective.params()])
    add = SegmentSum(segment_ids=torch.zeros_like(ids), weights=torch.ones(4), num_segments=1)
    plain, robust = (
        one.map(ask, ids, broadcast=models, key=1, reduce=add).sums for one in (engine, fed)
    )
    assert torch.equal(plain["loss"], robust["loss"])
    assert fed.aggregator == "median"
    assert torch.equal(fed.sizes, engine.sizes)


def test_where_nobody_answers_the_models_stay(digits: Clients) -> None:
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


def test_what_is_no_average_is_refused_and_so_is_a_method_with_a_mean_of_its_own(
    digits: Clients,
) -> None:
    with pytest.raises(
        fc.InvalidInputError,
        match=(
            r"server\.aggregator = 'mode': must be one of mean, median, trimmed_mean, clipped_mean"
        ),
    ):
        ServerConfig(aggregator="mode")  # type: ignore[arg-type]
    with pytest.raises(
        fc.InvalidInputError,
        match=(
            r"server\.aggregator = 'median': method fedgmcc has only the mean along paths between"
            r" models"
        ),
    ):
        run(digits, fc.FedGMCC(), "median", set())
