"""Server optimizers worked by hand on the three clients.

From the model w the clients reach 0.8 w + 0.4, 0.8 w + 0.8 and 0.2 w + 1.2. Their mean, with the
weights 1/6, 2/6 and 3/6, is 0.5 w + 14/15, so that Δ = 14/15 - w/2. The first model is w = 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from fedclade import FedAvg
from fedclade.aggregation.optimizer_federation import OptimizerFederation
from fedclade.aggregation.server_optimizer import served_state
from fedclade.core.federation import ServerUpdate

if TYPE_CHECKING:
    from conftest import Case


def weights_over_rounds(case: Case, update: ServerUpdate, *cohorts: list[int]) -> list[float]:
    """The model after each round."""
    fed, weights = OptimizerFederation(case.fed, update), []
    for cohort in cohorts:
        case.state = case.method.round(fed, case.state, torch.tensor(cohort), key=3)
        weights.append(float(case.state.models["0.weight"]))
    return weights


EVERYONE = [0, 1, 2]
LR = {"fedavg": None, "fedavgm": 1.0, "nesterov": 1.0}  # of the others: 0.1
# Δ1 = 14/15 for all. FedAvgM: m = 14/15, then 0.9 m + 7/15 = 19.6/15. Nesterov: w1 = 1.7 Δ1 =
# 23.8/15, Δ2 = 2.1/15, m2 = 0.7 m + Δ2 = 11.9/15, w2 = w1 + Δ2 + 0.7 m2. The others: m1 = 0.1 Δ1 =
# 0.0933333, w1 = 0.1 m1 / (√v1 + 0.001) and
#   FedAdagrad  v1 = 0.000001 + 0.8711111            Δ2 = 0.9283387  m2 = 0.1768339  v2 = 1.7329248
#   FedAdam     v1 = 0.00000099 + 0.00871111         Δ2 = 0.8838661  m2 = 0.1723866  v2 = 0.0164372
#   FedYogi     v1 = 0.000001 + 0.00871111           Δ2 = 0.8838662  m2 = 0.1723866  v2 = 0.0165243
BY_HAND = {
    "fedavg": (14 / 15, 7 / 15 + 14 / 15),
    "fedavgm": (14 / 15, 33.6 / 15),
    "nesterov": (23.8 / 15, 34.23 / 15),
    "fedadagrad": (0.0099892915, 0.0099892915 + 0.1 * 0.1768338688 / (1.3164060 + 0.001)),
    "fedadam": (0.0989343672, 0.0989343672 + 0.1 * 0.1723866150 / (0.1282075 + 0.001)),
    "fedyogi": (0.0989343111, 0.0989343111 + 0.1 * 0.1723866178 / (0.1285469 + 0.001)),
}


@pytest.mark.parametrize("optimizer", BY_HAND)
def test_two_rounds_of_each_optimizer(case: type[Case], optimizer: Any) -> None:
    update = ServerUpdate(optimizer, lr=LR.get(optimizer, 0.1))
    got = weights_over_rounds(case(FedAvg()), update, EVERYONE, EVERYONE)
    assert got == pytest.approx(BY_HAND[optimizer], abs=1e-6)


def test_v_of_fedyogi_falls_by_the_square_of_a_small_change(case: type[Case]) -> None:
    run = case(FedAvg())
    weights_over_rounds(run, ServerUpdate("fedyogi"), EVERYONE)
    # Close to the fixed point w = 28/15, Δ is -0.01: its square is below v = 0.0087121.
    run.state.models["0.weight"].fill_(28 / 15 + 0.02)
    weights_over_rounds(run, ServerUpdate("fedyogi"), EVERYONE)
    v = float(run.state.server_state["v/0.weight"])
    assert v == pytest.approx(0.00871211111 - 0.01 * 0.0001, abs=1e-8)


def test_lr_and_momentum_are_those_of_the_settings(case: type[Case]) -> None:
    # m = 14/15, w = 7/15; Δ = 14/15 - 7/30 = 21/30, m = 0.5 * 14/15 + 21/30 = 35/30
    got = weights_over_rounds(
        case(FedAvg()), ServerUpdate("fedavgm", lr=0.5, momentum=0.5), EVERYONE, EVERYONE
    )
    assert got == pytest.approx([7 / 15, 7 / 15 + 35 / 60], abs=1e-6)


def test_a_model_without_replies_and_its_moments_do_not_change(case: type[Case]) -> None:
    run = case(FedAvg())
    [first] = weights_over_rounds(run, ServerUpdate("fedavgm"), EVERYONE)
    before = run.state.server_state
    run.absent = {0, 1, 2}
    assert weights_over_rounds(run, ServerUpdate("fedavgm"), EVERYONE) == [first]
    assert torch.equal(run.state.server_state["m/0.weight"], before["m/0.weight"])


def test_served_models_are_means_with_the_weights_1_256_6561(case: type[Case]) -> None:
    run, update = case(FedAvg()), ServerUpdate(serve_mean=True)
    x1, x2, x3 = weights_over_rounds(run, update, EVERYONE, EVERYONE, EVERYONE)
    assert [x1, x2, x3] == pytest.approx([14 / 15, 21 / 15, 24.5 / 15], abs=1e-6)
    served = float(served_state(run.state).models["0.weight"])
    assert served == pytest.approx((x1 + 256 * x2 + 6561 * x3) / 6818, abs=1e-6)
