"""IFCA's claim on rotated images in groups, and its options against collapse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fedclade as fc
from fedclade.data import Clients, Rotation, load, partition


def rotated(seed: int) -> Clients:
    """Twenty clients in four groups, which see the digits turned by 0, 90, 180 and 270 degrees."""
    return partition(load("digits"), Rotation(clusters=4), clients=20, seed=seed, probe=None)


def trained(method: fc.Method, seed: int = 0, **settings: Any) -> fc.Result:
    defaults: dict[str, Any] = {
        "rounds": 25,
        "clients_per_round": 1.0,
        "lr": 0.1,
        "epochs": 2,
        "eval_every": 0,
        "seed": seed,
    }
    return fc.run(method, rotated(seed), fc.models.MLP(64), **{**defaults, **settings})


@pytest.mark.parametrize("seed", range(3))
def test_rotated_groups_are_found_with_restarts(seed: int) -> None:
    result = trained(fc.IFCA(clusters=4, num_restarts=4, trial_rounds=6), seed)
    assert result.summary["ari"] == 1
    assert result.summary["accuracy"] > trained(fc.FedAvg(), seed).summary["accuracy"] + 10


def test_a_draw_that_collapses_is_replaced_by_one_that_does_not() -> None:
    alone, among_four = (
        trained(fc.IFCA(clusters=4, num_restarts=restarts, trial_rounds=6)) for restarts in (1, 4)
    )
    assert alone.summary["ari"] < 1  # with this seed the first draw leaves two groups in one model
    assert among_four.summary["ari"] == 1


def test_more_models_than_groups_leave_some_models_unused() -> None:
    result = trained(fc.IFCA(clusters=9), rounds=8)
    assert result.summary["clusters"] < 9
    assert all(
        bool(torch.isfinite(value).all())
        for client in range(20)
        for value in result.model_of(client).state_dict().values()
    )


def test_there_is_one_trunk_and_several_heads() -> None:
    result = trained(fc.IFCA(clusters=4, shared_layers="trunk"), rounds=5)
    models = [result.model_of(client).state_dict() for client in range(20)]
    assert len({tuple(model["fc1.weight"].flatten().tolist()) for model in models}) == 1
    assert (
        len({tuple(model["fc2.weight"].flatten().tolist()) for model in models})
        == result.summary["clusters"]
        > 1
    )


def test_the_warm_up_is_fedavg_and_the_trunk_continues_from_it() -> None:
    warm = trained(fc.IFCA(clusters=4, warm_up=5), rounds=5)
    plain = trained(fc.FedAvg(), rounds=5)
    ours, theirs = warm.model_of(0).state_dict(), plain.model_of(0).state_dict()
    assert torch.equal(ours["fc1.weight"], theirs["fc1.weight"])
    assert torch.equal(
        ours["fc2.weight"].flatten().sort().values, theirs["fc2.weight"].flatten().sort().values
    )


@pytest.mark.parametrize(
    ("method", "field", "value", "allowed"),
    [
        (fc.IFCA, "clusters", 0, ("1",)),
        (fc.IFCA, "num_restarts", 0, ("1",)),
        (fc.IFCA, "trial_rounds", 0, ("1",)),
        (fc.IFCA, "warm_up", -1, ("0",)),
        (fc.IFCA, "shared_layers", "head", ("'nothing'", "'trunk'")),
        (fc.FedProx, "mu", -1.0, ("0",)),
        (fc.SCAFFOLD, "server_lr", 0.0, ("0",)),
        (fc.SCAFFOLD, "option", 3, ("1", "2")),
        (fc.PerFedAvg, "alpha", -0.1, ("0",)),
        (fc.PerFedAvg, "variant", "exact", ("'first-order'", "'hessian-free'")),
    ],
)
def test_hyper_parameters_are_checked(
    method: type[fc.Method], field: str, value: object, allowed: tuple[str, ...]
) -> None:
    with pytest.raises(fc.InvalidInputError) as caught:
        method(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == f"method.{field}"
    for part in (repr(value), *allowed):
        assert part in str(caught.value)
