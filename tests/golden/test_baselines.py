"""FedProx, FedNova, SCAFFOLD, LG-FedAvg, Per-FedAvg and IFCA on the three clients of
conftest.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fedclade import IFCA, SCAFFOLD, FedNova, FedProx, InvalidInputError, LGFedAvg, PerFedAvg
from fedclade.core.method_state import UNKNOWN


def numbers(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-6)


def test_fedprox_pulls_back_to_the_model_it_was_sent(case: Any) -> None:
    run = case(FedProx(mu=1.0), epochs=2)
    run.round(0)
    # w = 0.4; then 2 (0.4 - 2) + 1 (0.4 - 0) = -2.8, w = 0.68
    assert run.served() == numbers(0.68, 0.68, 0.68)
    run.round(0)
    # From 0.68: g = -2.64, w = 0.944; then 2 (0.944 - 2) + (0.944 - 0.68) = -1.848, w = 1.1288
    assert run.served() == numbers(1.1288, 1.1288, 1.1288)


def test_fednova_with_unequal_steps(case: Any) -> None:
    run = case(FedNova(), batch_size=1)
    run.round(0, 1, 2)
    # One, two and three steps: y = 0.4; 0.8, 1.44; 1.2, 1.44, 1.488. Mean steps d = -0.4, -0.72,
    # -0.496 with p = 1/6, 2/6, 3/6: sum of p d = -3.328 / 6; tau_eff = (1 * 1 + 2 * 2 + 3 * 3) / 6
    # = 14 / 6; x = 14 / 6 * 3.328 / 6
    assert run.served() == numbers(*[46.592 / 36] * 3)


def test_fednova_with_momentum(case: Any) -> None:
    run = case(FedNova(), batch_size=1, momentum=0.5)
    run.round(0, 1, 2)
    # a = 1; 1.5 + 1 = 2.5; 1.75 + 1.5 + 1 = 4.25. y = 0.4; v = -8, -10.4: 1.84; v = -12, -8.4,
    # 0.12: 2.028 p d = -0.4 / 6, -2 * 1.84 / 2.5 / 6, -3 * 2.028 / 4.25 / 6; tau_eff = (1 + 5 +
    # 12.75) / 6 = 3.125
    assert run.served() == numbers(*[3.125 * (0.4 + 1.472 + 6.084 / 4.25) / 6] * 3)


def test_fednova_counts_only_clients_that_replied(case: Any) -> None:
    run = case(FedNova(), batch_size=1, absent=[2])
    run.round(0, 1, 2)
    # p = 1/3, 2/3: sum of p d = -(0.4 + 1.44) / 3, tau_eff = 5 / 3
    assert run.served() == numbers(*[5 / 3 * 1.84 / 3] * 3)


def test_scaffold_over_three_rounds_with_partial_participation(case: Any) -> None:
    run = case(SCAFFOLD(weights="clients"))
    run.round(0, 1)
    # y = 0.4, 0.8: x = 0.6. One step: c_0 = (0 - 0.4) / 0.1 = -4, c_1 = -8; c = (-4 - 8) / 3, not /
    # 2
    assert run.served() == numbers(0.6, 0.6, 0.6)
    assert run.stored() == numbers(-4, -8, 0)
    assert run.state.c["0.weight"].flatten().tolist() == numbers(-4)
    run.round(1, 2)
    # Client 1: g = 2 (0.6 - 4) = -6.8, + 8 - 4: -2.8, y = 0.88, c_1 = -8 + 4 - 2.8 = -6.8
    # Client 2: g = 4 (1.2 - 3) = -7.2, - 0 - 4: -11.2, y = 1.72, c_2 = 0 + 4 - 11.2 = -7.2
    # x = 0.6 + (0.28 + 1.12) / 2 = 1.3; c = -4 + ((-6.8 + 8) + (-7.2 - 0)) / 3 = -6
    assert run.served() == numbers(1.3, 1.3, 1.3)
    assert run.stored() == numbers(-4, -6.8, -7.2)
    assert run.state.c["0.weight"].flatten().tolist() == numbers(-6)
    run.round(0, 2)
    # Client 0: g = -1.4, + 4 - 6: -3.4, y = 1.64, c_0 = -1.4. Client 2: g = -1.6, + 7.2 - 6: -0.4,
    # y = 1.34, c_2 = -1.6 x = 1.3 + (0.34 + 0.04) / 2 = 1.49; c = -6 + (2.6 + 5.6) / 3, which is
    # the mean of all c_i, (-1.4 - 6.8 - 1.6) / 3
    assert run.served() == numbers(1.49, 1.49, 1.49)
    assert run.stored() == numbers(-1.4, -6.8, -1.6)
    assert run.state.c["0.weight"].flatten().tolist() == numbers(-9.8 / 3)


def test_scaffold_weights_c_by_examples_like_x(case: Any) -> None:
    run = case(SCAFFOLD())
    run.round(0, 1)
    assert run.served() == numbers(*[(0.4 + 2 * 0.8) / 3] * 3)
    assert run.state.c["0.weight"].flatten().tolist() == numbers((1 * -4 + 2 * -8) / 6)


def test_scaffold_divides_by_the_number_of_steps_of_each_client(case: Any) -> None:
    run = case(SCAFFOLD(), batch_size=1)
    run.round(0, 1, 2)
    # y = 0.4, 1.44, 1.488 after 1, 2 and 3 steps: the mean gradient of each client
    assert run.stored() == numbers(-4, -7.2, -4.96)


def test_scaffold_with_momentum_keeps_a_mean_of_gradients(case: Any) -> None:
    run = case(SCAFFOLD(), batch_size=1, momentum=0.5)
    run.round(1)
    # gradients -8 and -6.4 count 1.5 and 1 times in y = 1.84
    assert run.stored() == numbers(0, (1.5 * -8 - 6.4) / 2.5, 0)


def test_scaffold_option_1_takes_the_gradient_at_the_servers_model(case: Any) -> None:
    run = case(SCAFFOLD(option=1), batch_size=1, epochs=2)
    run.round(0, 1, 2)
    assert run.stored() == numbers(-4, -8, -12)
    assert run.state.c["0.weight"].flatten().tolist() == numbers(-56 / 6)


def test_scaffold_with_a_server_step_of_one_half(case: Any) -> None:
    run = case(SCAFFOLD(server_lr=0.5, weights="clients"))
    run.round(0, 1)
    assert run.served() == numbers(0.3, 0.3, 0.3)


def test_scaffold_absent_clients_keep_their_control_variate(case: Any) -> None:
    run = case(SCAFFOLD(weights="clients"), absent=[1])
    run.round(0, 1)
    assert run.stored() == numbers(-4, 0, 0)
    assert run.state.c["0.weight"].flatten().tolist() == numbers(-4 / 3)


def test_lg_fedavg_keeps_the_representation_and_averages_the_head(case: Any) -> None:
    run = case(LGFedAvg(), layers=2)
    run.round(0, 1, 2)
    # f = b a x from a = b = 1: residuals -1, -3, -1; da = db = 2 r x = -2, -6, -4: a = b = 1.2,
    # 1.6, 1.4
    assert run.served() == numbers(1.2, 1.6, 1.4)
    assert run.state.models.keys() == {"1.weight"}
    b = (1.2 + 2 * 1.6 + 3 * 1.4) / 6
    assert run.state.models["1.weight"].flatten().tolist() == numbers(b)
    assert (run.fed.traffic.up, run.fed.traffic.down) == (3 * 4, 3 * 4)
    run.round(0)
    # a = 1.2, b as shared: r = 1.2 b - 2, a <- 1.2 - 0.2 r b, b <- b - 0.2 r 1.2
    r = 1.2 * b - 2
    assert run.served() == numbers(1.2 - 0.2 * r * b, 1.6, 1.4)
    assert run.state.models["1.weight"].flatten().tolist() == numbers(b - 0.24 * r)


def test_lg_fedavg_with_the_head_local(case: Any) -> None:
    run = case(LGFedAvg(local_layers=("1",)), layers=2)
    run.round(0, 1, 2)
    assert run.state.models["0.weight"].flatten().tolist() == numbers((1.2 + 2 * 1.6 + 3 * 1.4) / 6)
    assert run.fed.client_state.read(torch.arange(3))["1.weight"].flatten().tolist() == numbers(
        1.2, 1.6, 1.4
    )


@pytest.mark.parametrize(
    ("layers", "parts"),
    [(("2",), ("layer '2'", "Known: 0, 1")), (("0", "1"), ("('0', '1')",))],
)
def test_lg_fedavg_refuses_invalid_layers(
    case: Any, layers: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    with pytest.raises(InvalidInputError) as caught:
        case(LGFedAvg(local_layers=layers), layers=2)
    assert caught.value.field == "method.local_layers"
    for part in parts:
        assert part in str(caught.value)


def test_per_fedavg_takes_the_gradient_one_step_ahead(case: Any) -> None:
    run = case(PerFedAvg(alpha=0.25))
    run.round(0)
    # Both steps use the same single batch: ahead = 0 + 0.25 * 4 = 1, the gradient there is
    # 2 (1 - 2) = -2, w = 0.2
    assert run.served() == numbers(0.2, 0.2, 0.2)
    ids = torch.arange(3)
    personal = run.fed.models_of(
        run.method.assign_models(run.state, ids), ids, run.method.personalization_program()
    )["0.weight"]
    # The step of each client from 0.2: 0.2 + 0.25 * 3.6, 0.2 + 0.25 * 7.6, 0.2 + 0.25 * 4 * 2.6
    assert personal.flatten().tolist() == numbers(1.1, 2.1, 2.8)


def test_per_fedavg_hessian_free(case: Any) -> None:
    run = case(PerFedAvg(alpha=0.25, variant="hessian-free"))
    run.round(2)
    # g(w) = 4 (2 w - 3): ahead = 3, g = 12; the second derivative is 8, so w = 0 - 0.1 (12 - 0.25 *
    # 8 * 12) = 1.2
    assert run.served() == pytest.approx([1.2] * 3, abs=1e-3)


def with_models(run: Any, *values: float) -> Any:
    run.state = replace(run.state, models={"0.weight": torch.tensor(values)[:, None, None]})
    return run


def test_ifca_clients_choose_the_model_with_the_least_loss(case: Any) -> None:
    run = with_models(case(IFCA(clusters=2)), 0.0, 3.5)
    run.round(0, 1, 2)
    # Losses under 0 and 3.5: 4 and 2.25; 16 and 0.25; 9 and 16. Trained: 3.2; 3.6; 1.2
    assert run.state.cluster_ids.tolist() == [1, 1, 0]
    assert run.state.models["0.weight"].flatten().tolist() == numbers(1.2, (3.2 + 2 * 3.6) / 3)


def test_ifca_keeps_a_model_that_no_client_chose(case: Any) -> None:
    run = with_models(case(IFCA(clusters=2)), 0.0, 3.5)
    run.round(2)
    assert run.state.models["0.weight"].flatten().tolist() == numbers(1.2, 3.5)
    assert run.state.cluster_ids.tolist() == [UNKNOWN, UNKNOWN, 0]


def test_ifca_clients_choose_the_first_of_equal_models_and_never_a_diverged_one(case: Any) -> None:
    run = with_models(case(IFCA(clusters=3)), float("inf"), 0.0, 0.0)
    run.round(0, 1, 2)
    assert run.state.cluster_ids.tolist() == [1, 1, 1]


def test_ifca_late_clients_choose_the_model_with_the_least_loss(case: Any) -> None:
    run = with_models(case(IFCA(clusters=2)), 0.0, 3.5)
    state = run.method.add_clients(run.fed, run.state, torch.tensor([1, 2]), key=0)
    assert state.cluster_ids.tolist() == [UNKNOWN, 1, 0]


def test_ifca_clients_outside_the_cohort_are_served_the_model_with_the_least_loss_now(
    case: Any,
) -> None:
    run = with_models(case(IFCA(clusters=2)), 0.0, 3.0)
    run.round(0)
    # Losses of client 0 under 0 and 3: 4 and 1. It trains 3 - 0.2 (3 - 2) = 2.8
    assert run.state.models["0.weight"].flatten().tolist() == numbers(0.0, 2.8)
    assert run.state.cluster_ids.tolist() == [1, UNKNOWN, UNKNOWN]
    run.round(2)
    # Losses of client 2 under 0 and 2.8: 9 and 6.76. It trains 2.8 - 0.4 (5.6 - 3) = 1.76
    assert run.state.models["0.weight"].flatten().tolist() == numbers(0.0, 1.76)
    run = with_models(run, 2.2, 1.76)
    run.round(2)
    # Losses of client 2 under 2.2 and 1.76: 1.96 and 0.2704. It trains 1.76 - 0.4 (0.52) = 1.552.
    # Client 0 chose the second model in the first round; now its losses are 0.04 and 0.200704.
    assert run.state.cluster_ids.tolist() == [UNKNOWN, UNKNOWN, 1]
    # Client 1: 3.24 and 5.992704
    up, down = run.fed.traffic.up, run.fed.traffic.down
    assert run.served() == numbers(2.2, 2.2, 1.552)
    # Two clients chose: two models of four bytes each down, the number of one up
    assert (run.fed.traffic.up - up, run.fed.traffic.down - down) == (2 * 8, 2 * 2 * 4)


def test_ifca_serves_the_first_draw_until_the_trial_ends(case: Any) -> None:
    run = with_models(case(IFCA(clusters=1, num_restarts=2, trial_rounds=3)), 0.0, 3.5)
    run.round(2)
    # Client 1 has less loss under a model of the second draw, which is not served yet.
    assert run.state.models["0.weight"].flatten().tolist() == numbers(1.2, 1.9)
    assert run.served() == numbers(1.2, 1.2, 1.2)


def test_ifca_keeps_choices_if_no_client_replies(case: Any) -> None:
    run = with_models(case(IFCA(clusters=2), absent=[2]), 0.0, 3.5)
    run.round(0)
    run.round(2)
    assert run.state.models["0.weight"].flatten().tolist() == numbers(0.0, 3.2)
    assert run.state.cluster_ids.tolist() == [1, UNKNOWN, UNKNOWN]


def test_ifca_warms_up_as_fedavg_and_then_draws_heads(case: Any) -> None:
    run = case(IFCA(clusters=2, warm_up=1), layers=2)
    run.round(0, 1, 2)
    # One round of FedAvg: the mean of 1.2, 1.6 and 1.4. A head of one weight has only one order.
    mean = (1.2 + 2 * 1.6 + 3 * 1.4) / 6
    assert run.state.models["0.weight"].flatten().tolist() == numbers(mean, mean)
    assert run.state.models["1.weight"].flatten().tolist() == numbers(mean, mean)
    assert run.state.cluster_ids.tolist() == [UNKNOWN] * 3


def test_ifca_with_a_shared_trunk_averages_it_over_all(case: Any) -> None:
    run = case(IFCA(clusters=2, shared_layers="trunk"), layers=2)
    heads, trunk = torch.tensor([1.0, 3.0])[:, None, None], torch.ones(2, 1, 1)
    run.state = replace(run.state, models={"0.weight": trunk, "1.weight": heads})
    run.round(0, 1, 2)
    # f = b a x: losses under b = 1 and 3: 1, 1 (a tie: the first); 9, 1; 1, 9. Steps 2 r b x for a,
    # 2 r a x for b: client 0: r = -1: a = 1.2, b = 1.2. Client 1 with b = 3: r = -1: a = 1.6, b =
    # 3.2. Client 2: r = -1: a = 1.4, b = 1.4
    assert run.state.cluster_ids.tolist() == [0, 1, 0]
    trunk = (1.2 + 2 * 1.6 + 3 * 1.4) / 6
    assert run.state.models["0.weight"].flatten().tolist() == numbers(trunk, trunk)
    assert run.state.models["1.weight"].flatten().tolist() == numbers((1.2 + 3 * 1.4) / 4, 3.2)


def test_ifca_continues_the_restart_with_the_least_loss(case: Any) -> None:
    run = with_models(case(IFCA(clusters=1, num_restarts=2, trial_rounds=2)), 0.0, 3.5)
    run.round(0, 1, 2)
    first, second = 5.6 / 6, (3.2 + 2 * 3.6 + 3 * (3.5 - 0.4 * 4)) / 6
    assert run.state.models["0.weight"].flatten().tolist() == numbers(first, second)
    # Second round. Losses under the first: 1.14, 9.40, 1.28, with the sum 1.14 + 2 * 9.40 +
    # 3 * 1.28 = 23.8; under the second, 2.783: 0.61, 1.48, 6.59, with the sum 23.3
    run.round(0, 1, 2)
    w = second
    expected = (w - 0.2 * (w - 2) + 2 * (w - 0.2 * (w - 4)) + 3 * (w - 0.4 * (2 * w - 3))) / 6
    assert run.state.models["0.weight"].flatten().tolist() == numbers(expected)
    assert run.state.cluster_ids.tolist() == [0, 0, 0]
