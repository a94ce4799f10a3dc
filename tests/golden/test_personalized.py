"""Personalized methods on the three clients of conftest.py, by hand: FedAvg with fine-tuning,
FedPer, FedRep, FedBABU, Ditto, APFL and FedALA.

FedAvg's model after a round of all clients is g = (0.4 + 2 · 0.8 + 3 · 1.2) / 6 = 14 / 15.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedclade import (
    APFL,
    Ditto,
    FedALA,
    FedAvgFineTune,
    FedBABU,
    FedPer,
    FedRep,
    InvalidInputError,
)
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.data import Clients, from_arrays

G = 14 / 15


def numbers(*values: float) -> Any:
    return pytest.approx(list(values), abs=1e-6)


def used(run: Any, name: str = "0.weight") -> list[float]:
    """The number that each client uses, after what it does on its data first."""
    ids = torch.arange(len(run.fed.sizes))
    models = run.fed.models_of(
        run.method.assign_models(run.state, ids), ids, run.method.personalization_program()
    )
    weights: Tensor = models[name]
    return weights.flatten().tolist()


def kept(run: Any, name: str) -> list[float]:
    """A number in each client's state."""
    values: Tensor = run.fed.client_state.read(torch.arange(len(run.fed.sizes)))[name]
    return values.flatten().tolist()


def samples_of(count: int, *targets: tuple[float, float]) -> Clients:
    """Clients with that many samples x = 1: the target of the held-out ones, and of the others."""
    held_out = torch.arange(count) % 5 == 4
    return from_arrays(
        [
            (torch.ones(count, 1), torch.where(held_out, float(own), float(other)))
            for own, other in targets
        ]
    )


def test_fine_tuning_with_a_given_share(case: Any) -> None:
    run = case(FedAvgFineTune(fine_tune_epochs=1, alpha=0.5))
    run.round(0, 1, 2)
    # From g a full-batch step is 0.2 (2 - g), 0.2 (4 - g), 0.4 (3 - 2 g); the client takes half.
    assert run.served() == numbers(G, G, G)
    assert used(run) == numbers(G + 0.1 * (2 - G), G + 0.1 * (4 - G), G + 0.2 * (3 - 2 * G))


def test_a_client_with_fewer_than_five_samples_uses_the_shared_model(case: Any) -> None:
    run = case(FedAvgFineTune())
    run.round(0, 1, 2)
    assert used(run) == numbers(G, G, G)


def test_fine_tuning_takes_the_share_that_held_out_samples_prefer(case: Any) -> None:
    # From 0 the step on the samples that are not held out goes to 0.4. Held-out targets: 2 prefers
    # the whole step, 0 none, 0.1 a quarter of it. Then the client tunes on all samples: the mean
    # target of the last two is 1.6 and 1.62, the step 0.2 times that.
    run = case(FedAvgFineTune(fine_tune_epochs=1), clients=samples_of(10, (2, 2), (0, 2), (0.1, 2)))
    assert used(run) == numbers(0.4, 0.0, 0.25 * 0.2 * 1.62)


def test_fedper_averages_the_body_and_keeps_the_heads(case: Any) -> None:
    run = case(FedPer(), layers=2)
    run.round(0, 1, 2)
    # As LG-FedAvg's hand-worked case: a = b = 1.2, 1.6, 1.4. Here b stays, and a is averaged.
    a = (1.2 + 2 * 1.6 + 3 * 1.4) / 6
    assert run.served() == numbers(a, a, a)
    assert kept(run, "1.weight") == numbers(1.2, 1.6, 1.4)
    assert (run.fed.traffic.up, run.fed.traffic.down) == (3 * 4, 3 * 4)


def test_fedper_gives_a_client_that_never_trained_the_body_and_the_initial_head(case: Any) -> None:
    run = case(FedPer(), layers=2)
    run.round(0)
    assert used(run, "0.weight") == numbers(1.2, 1.2, 1.2)
    assert used(run, "1.weight") == numbers(1.2, 1, 1)


@pytest.mark.parametrize(("weights", "n"), [("clients", (1, 1, 1)), ("examples", (1, 2, 3))])
def test_fedrep_trains_the_head_first_and_then_the_body_with_that_head(
    case: Any, weights: Any, n: tuple[int, int, int]
) -> None:
    run = case(FedRep(head_epochs=1, final_head_epochs=0, weights=weights), layers=2)
    run.round(0, 1, 2)
    # Head, with a = 1: b = 1.2, 1.6, 1.4. Body, with that b: residuals -0.8, -2.4, -0.2;
    # da = 2 r b x = -1.92, -7.68, -1.12: a = 1.192, 1.768, 1.112
    a = (n[0] * 1.192 + n[1] * 1.768 + n[2] * 1.112) / sum(n)
    assert FedRep().weights == "clients"  # the paper's
    assert kept(run, "1.weight") == numbers(1.2, 1.6, 1.4)
    assert run.served() == numbers(a, a, a)
    assert used(run, "1.weight") == numbers(1.2, 1.6, 1.4)


def test_fedrep_has_no_mean_head(case: Any) -> None:
    run = case(FedRep(head_epochs=1, final_head_epochs=0), layers=2)
    run.round(0)
    # The others keep the initial head. (In the authors' code they get the mean of the heads.)
    assert kept(run, "1.weight") == numbers(1.2, 1, 1)


def test_fedrep_gives_a_client_that_never_trained_a_head(case: Any) -> None:
    run = case(FedRep(head_epochs=1, final_head_epochs=1), layers=2)
    run.round(0)
    a = 1.192
    assert used(run, "0.weight") == numbers(a, a, a)
    # From b = 1.2 (client 0) or 1: b <- b - 0.2 (b a x - y) a x
    assert used(run, "1.weight") == numbers(
        1.2 - 0.2 * (1.2 * a - 2) * a, 1 - 0.2 * (a - 4) * a, 1 - 0.4 * (2 * a - 3) * a
    )
    assert kept(run, "1.weight") == numbers(1.2, 1, 1)


def test_fedbabu_never_trains_the_head_in_a_round(case: Any) -> None:
    run = case(FedBABU(fine_tune="head", fine_tune_epochs=1), layers=2)
    run.round(0, 1, 2)
    a = (1.2 + 2 * 1.6 + 3 * 1.4) / 6
    assert run.served() == numbers(a, a, a)
    assert kept(run, "1.weight") == numbers(1, 1, 1)
    assert used(run, "1.weight") == numbers(
        1 - 0.2 * (a - 2) * a, 1 - 0.2 * (a - 4) * a, 1 - 0.4 * (2 * a - 3) * a
    )
    assert used(run, "0.weight") == numbers(a, a, a)


def test_fedbabu_fine_tunes_the_whole_model(case: Any) -> None:
    run = case(FedBABU(fine_tune_epochs=1), layers=2)
    # From a = b = 1 without any round: both make the same step.
    assert used(run, "0.weight") == numbers(1.2, 1.6, 1.4)
    assert used(run, "1.weight") == numbers(1.2, 1.6, 1.4)


def test_ditto_pulls_the_own_model_to_the_model_that_was_sent(case: Any) -> None:
    run = case(Ditto(lam=0.5))
    run.round(0, 1, 2)
    # v = w = 0: there is no pull.
    assert kept(run, "own/0.weight") == numbers(0.4, 0.8, 1.2)
    assert run.served() == numbers(G, G, G)
    run.round(0, 1, 2)
    # v = 0.4 - 0.1 (2 (0.4 - 2) + 0.5 (0.4 - g)) = 0.7467, and so on (tests/golden/test_ditto.py)
    v = [
        0.4 - 0.1 * (2 * (0.4 - 2) + 0.5 * (0.4 - G)),
        0.8 - 0.1 * (2 * (0.8 - 4) + 0.5 * (0.8 - G)),
        1.2 - 0.1 * (4 * (2.4 - 3) + 0.5 * (1.2 - G)),
    ]
    assert used(run) == numbers(*v)
    assert run.served() == numbers(1.4, 1.4, 1.4)


def test_ditto_pulls_to_the_start_of_the_round_while_the_shared_model_moves(case: Any) -> None:
    run = case(Ditto(lam=0.5), epochs=2)
    run.round(0)
    # After the first batch w = v = 0.4; w goes on to 0.72, and v is pulled to 0, not to 0.4.
    assert run.served()[0] == pytest.approx(0.72, abs=1e-6)
    assert kept(run, "own/0.weight")[0] == pytest.approx(0.72 - 0.1 * 0.5 * 0.4, abs=1e-6)


def test_ditto_uses_the_own_model_also_where_the_shared_one_is_better(case: Any) -> None:
    # After one round of all, g fits client 0 (target 2) better than v = 0.4 does.
    run = case(Ditto(lam=0.5))
    run.round(0, 1, 2)
    assert abs(G - 2) < abs(0.4 - 2)
    assert used(run) == numbers(0.4, 0.8, 1.2)


def test_ditto_with_equal_weights(case: Any) -> None:
    run = case(Ditto(lam=0.5, weights="clients"))
    run.round(0, 1, 2)
    assert run.served() == numbers(0.8, 0.8, 0.8)
    assert kept(run, "own/0.weight") == numbers(0.4, 0.8, 1.2)


def test_ditto_serves_the_shared_model_to_a_client_that_never_trained(case: Any) -> None:
    run = case(Ditto(lam=0.5), absent=[2])
    run.round(0, 2)
    assert used(run) == numbers(0.4, 0.4, 0.4)
    assert kept(run, "trained") == numbers(1, 0, 0)
    assert kept(run, "own/0.weight") == numbers(0.4, 0, 0)


def test_ditto_takes_lambda_1_with_few_samples(case: Any) -> None:
    run = case(Ditto())
    run.round(0, 1, 2)
    run.round(0)
    assert kept(run, "own/0.weight")[0] == pytest.approx(0.4 + 0.32 - 0.1 * (0.4 - G), abs=1e-6)


def test_ditto_chooses_lambda_with_a_model_that_never_saw_the_held_out_samples(case: Any) -> None:
    # Client 0 has the target 2, with held-out targets of 2 or of 0.4; client 1 has 4. The second
    # model trains on the target 2 alone, in all rounds. Round 1, from 0: it is 0.4, and v and w are
    # 0.2 · (mean target). Round 2: w is above it, so a large pull is better if held-out samples
    # want a large number, and worse if they want a small one. With 15 samples only three are held
    # out, and λ is 1.
    for count, held_out, chosen in ((20, 2.0, 2.0), (20, 0.4, 0.1), (15, 2.0, 1.0)):
        clients = samples_of(count, (held_out, 2), (4, 4))
        run = case(Ditto(), clients=clients, batch_size=20)
        run.round(0, 1)
        mean = 0.8 * 2 + 0.2 * held_out
        v, w = 0.2 * mean, 0.1 * (mean + 4)
        assert kept(run, "fit/0.weight") == numbers(0.4, 0.8)
        assert kept(run, "own/0.weight") == numbers(v, 0.8)
        run.round(0)
        second = 0.4 - 0.1 * (2 * (0.4 - 2) + chosen * (0.4 - w))
        after = v - 0.1 * (2 * (v - mean) + chosen * (v - w))
        assert kept(run, "fit/0.weight")[0] == pytest.approx(second, abs=1e-6)
        assert kept(run, "own/0.weight")[0] == pytest.approx(after, abs=1e-6)
        assert run.served()[0] == pytest.approx(w + 0.2 * (mean - w), abs=1e-6)


def test_apfl_trains_the_own_model_and_its_share_at_the_mixture(case: Any) -> None:
    run = case(APFL(alpha=0.5))
    run.round(0)
    # At v = w = 0: gradient -4. w steps once, v by half a step; v - w = 0 leaves the share.
    assert run.served() == numbers(0.4, 0.4, 0.4)
    assert kept(run, "own/0.weight") == numbers(0.2, 0, 0)
    assert kept(run, "alpha") == numbers(0.5, 0.5, 0.5)
    # 0.5 · 0.2 + 0.5 · 0.4; clients that never trained use w.
    assert used(run) == numbers(0.3, 0.4, 0.4)
    run.round(0)
    # The mixture is 0.3: gradient 2 (0.3 - 2) = -3.4. v = 0.2 + 0.1 · 0.5 · 3.4 = 0.37; the share
    # is 0.5 - 0.1 (0.2 - 0.4) (-3.4) = 0.432; w = 0.4 + 0.32 = 0.72.
    assert kept(run, "own/0.weight")[0] == pytest.approx(0.37, abs=1e-6)
    assert kept(run, "alpha")[0] == pytest.approx(0.432, abs=1e-6)
    assert run.served() == numbers(0.72, 0.72, 0.72)
    assert used(run)[0] == pytest.approx(0.432 * 0.37 + 0.568 * 0.72, abs=1e-6)


def test_apfl_moves_its_share_in_every_batch(case: Any) -> None:
    run = case(APFL(alpha=0.5), epochs=2)
    run.round(0)
    # The two steps of the test before, in one round.
    assert kept(run, "own/0.weight")[0] == pytest.approx(0.37, abs=1e-6)
    assert kept(run, "alpha")[0] == pytest.approx(0.432, abs=1e-6)
    assert APFL().alpha == 0.5  # the authors' default; 1 would be Local


def test_apfl_trains_both_models_with_momentum_and_weight_decay(case: Any) -> None:
    run = case(APFL(alpha=0.5), epochs=2, momentum=0.5, weight_decay=0.25)
    run.round(0)
    # First batch: w = 0.4, v = 0.2, velocities -4 and -2. The second, at 0.3: gradient -3.4.
    velocity_of_v = 0.5 * -2 + 0.5 * -3.4 + 0.25 * 0.2
    velocity_of_w = 0.5 * -4 + 2 * (0.4 - 2) + 0.25 * 0.4
    assert kept(run, "own/0.weight")[0] == pytest.approx(0.2 - 0.1 * velocity_of_v, abs=1e-6)
    assert run.served()[0] == pytest.approx(0.4 - 0.1 * velocity_of_w, abs=1e-6)
    assert kept(run, "alpha")[0] == pytest.approx(0.432, abs=1e-6)


def test_apfl_clips_the_gradients_of_both_models(case: Any) -> None:
    run = case(APFL(alpha=0.5), clip_norm=1.0)
    run.round(0)
    assert kept(run, "own/0.weight")[0] == pytest.approx(0.1, abs=1e-6)
    assert run.served()[0] == pytest.approx(0.1, abs=1e-6)


def test_apfl_with_outputs_mixed_as_in_the_authors_code(case: Any) -> None:
    run = case(APFL(alpha=0.5, mix="outputs"), epochs=2)
    run.round(0)
    # First batch: w = 0.4. The output is 0.5 · 0 + 0.5 · 0.4 = 0.2, so dL/doutput = -3.6, and -1.8
    # by v and by w: v = 0.18. The share: 0.5 - 0.1 ((0.18 - 0.4) (-1.8) + 0.02 · 0.5) = 0.4594.
    v, w, share = 0.18, 0.4, 0.5 - 0.1 * (0.22 * 1.8 + 0.01)
    # Second batch: w = 0.72, then a step of v. The share moves in the first batch only.
    w += 0.1 * 2 * (2 - w)
    v += 0.1 * share * 2 * (2 - share * v - (1 - share) * w)
    assert kept(run, "own/0.weight") == numbers(v, 0, 0)
    assert kept(run, "alpha") == numbers(share, 0.5, 0.5)
    # Both models and the share of client 0; the others never trained and use w.
    assert used(run, "own.0.weight") == numbers(v, 0, 0)
    assert used(run, "shared.0.weight") == numbers(w, w, w)
    assert used(run, "alpha") == numbers(share, 0, 0)


def test_apfl_trains_at_the_mixture_of_outputs_by_option(case: Any) -> None:
    run = case(APFL(mix="outputs"), layers=2)
    run.round(0)
    # w: residual -1, so a = b = 1.2. The outputs are 1 and 1.44, their mean 1.22 (of the weights:
    # 1.21), dL/doutput = -1.56; by v 0.5 · -1.56 · 1, by w 0.5 · -1.56 · 1.2.
    v, of_v, of_w = 1 + 0.1 * 0.78, -0.78, -0.936
    slope = 2 * (v - 1.2) * 0.5 * (of_v + of_w) + 0.02 * 0.5
    assert kept(run, "own/0.weight")[0] == pytest.approx(v, abs=1e-6)
    assert kept(run, "own/1.weight")[0] == pytest.approx(v, abs=1e-6)
    assert kept(run, "alpha")[0] == pytest.approx(0.5 - 0.1 * slope, abs=1e-6)
    assert used(run, "shared.0.weight")[0] == pytest.approx(1.2, abs=1e-6)


def test_apfl_mixes_outputs_not_weights_by_option() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
    weights = {"alpha": torch.tensor(0.25)}
    for name, value in (("own", 1.0), ("shared", 3.0)):
        weights |= {f"{name}.{layer}.weight": torch.full((1, 1), value) for layer in (0, 1)}
    mixture = APFL(mix="outputs").served_module(layers, weights)
    mixture.load_state_dict(weights)
    # 0.25 · 1 + 0.75 · 9; the mean of the weights, 2.5, would give 6.25.
    assert float(mixture(torch.ones(1, 1)).detach()) == 7.0


def test_apfl_with_the_share_0_is_fedavg(case: Any) -> None:
    run = case(APFL(alpha=0.0))
    run.round(0, 1, 2)
    assert used(run) == numbers(G, G, G)


def test_fedala_learns_how_much_of_the_shared_model_to_take(case: Any) -> None:
    run = case(FedALA(rate=0.1, first_passes=1))
    run.round(0, 1, 2)
    # Clients that never trained start from the shared model, 0.
    assert run.served() == numbers(G, G, G)
    assert kept(run, "own/0.weight") == numbers(0.4, 0.8, 1.2)
    run.round(0, 1, 2)
    # The gradient at g times (g - θ_i) is below 0 for clients 0 and 1, so their share stays at 1.
    # Client 2: gradient 4 (2 g - 3), g - 1.2 = -4 / 15: the share falls to 1 - 0.1 · 1.2089.
    share = 1 - 0.1 * 4 * (2 * G - 3) * (G - 1.2)
    assert share == pytest.approx(0.879111, abs=1e-6)
    assert kept(run, "shares/0.weight") == numbers(1, 1, share)
    start = 1.2 + share * (G - 1.2)
    own = [G + 0.2 * (2 - G), G + 0.2 * (4 - G), start + 0.4 * (3 - 2 * start)]
    assert kept(run, "own/0.weight") == numbers(*own)
    shared = (own[0] + 2 * own[1] + 3 * own[2]) / 6
    assert run.served() == numbers(*[shared] * 3)


def test_fedala_learns_longer_the_first_time_only(case: Any) -> None:
    run = case(FedALA(rate=0.01, first_passes=3))
    run.round(0, 1, 2)
    run.round(2)
    share = 1.0
    for _ in range(3):
        at = 1.2 + share * (G - 1.2)
        share -= 0.01 * 4 * (2 * at - 3) * (G - 1.2)
    assert kept(run, "shares/0.weight")[2] == pytest.approx(share, abs=1e-6)
    # Client 0 learns for the first time, client 2 for the second: one pass.
    own, shared = kept(run, "own/0.weight")[2], run.served()[0]
    assert shared == pytest.approx(own)
    run.round(0)
    theta = run.served()[0]
    run.round(1, 2)
    at = own + share * (theta - own)
    assert kept(run, "shares/0.weight")[2] == pytest.approx(
        min(1.0, max(0.0, share - 0.01 * 4 * (2 * at - 3) * (theta - own))), abs=1e-6
    )


def test_fedala_learns_from_a_random_part_of_the_samples(case: Any) -> None:
    # With lr = 0 the model stays at θ = 0. The own model is set to 1, so θ - θ_i = -1, θ̂ = 1 - W
    # = 0, and W moves by rate · mean of 2 (0 - y) over the samples read. The targets are powers of
    # 2: their sum tells which samples were read.
    targets = [2.0**place for place in range(10)]
    clients = from_arrays([(torch.ones(10, 1), torch.tensor(targets)) for _ in range(2)])
    parts = []
    for cohort in ((0,), (0, 1)):  # other draws
        run = case(FedALA(rate=1e-4, first_passes=1), clients=clients, lr=0.0)
        run.round(0)
        state = run.fed.client_state.read(torch.tensor([0]))
        run.fed.client_state.write(torch.tensor([0]), state | {"own/0.weight": torch.ones(1, 1, 1)})
        run.round(*cohort)
        total = round((1 - kept(run, "shares/0.weight")[0]) / 1e-4 * 8 / 2)
        parts.append([place for place in range(10) if total >> place & 1])
    assert [len(part) for part in parts] == [8, 8]  # four fifths
    assert parts[0] != parts[1]


def test_fedala_mixes_the_weight_and_the_bias_of_the_last_layer() -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.Linear(2, 2))
    method = FedALA().with_local_config(LocalTraining(Objective(layers)))
    assert method.top_params() == ("1.weight", "1.bias")


def test_fedala_is_fedavg_for_clients_that_never_trained(case: Any) -> None:
    run = case(FedALA())
    run.round(0)
    assert used(run)[1:] == numbers(0.4, 0.4)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: FedAvgFineTune(alpha=1.5), "method.alpha"),
        (lambda: FedAvgFineTune(fine_tune_epochs=0), "method.fine_tune_epochs"),
        (lambda: FedRep(head_epochs=0), "method.head_epochs"),
        (lambda: FedRep(weights="equal"), "method.weights"),
        (lambda: FedBABU(fine_tune="body"), "method.fine_tune"),
        (lambda: Ditto(lam=-1.0), "method.lam"),
        (lambda: Ditto(weights="equal"), "method.weights"),
        (lambda: APFL(alpha=-0.1), "method.alpha"),
        (lambda: APFL(mix="models"), "method.mix"),
        (lambda: FedALA(rate=0.0), "method.rate"),
        (lambda: FedALA(sample_share=0.0), "method.sample_share"),
        (lambda: FedALA(first_passes=0), "method.first_passes"),
    ],
)
def test_a_wrong_value_names_its_field(make: Any, field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        make()
    assert caught.value.field == field
