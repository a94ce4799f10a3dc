"""The guard of the personal layer on three clients, worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import fedclade as fc
from fedclade.core import LocalTraining, ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import State
from fedclade.programs import personal_layer as programs
from fedclade.programs.client_slots import SLOTS
from fedclade.programs.personal_layer import (
    LOSS_WEIGHT,
    PRIOR_SAMPLES,
    SCORE,
    candidates,
    score_candidates,
)
from fedclade.training.personal_layer import PersonalLayer, pooled_scores

IDS = torch.arange(3)


def clients() -> fc.data.Clients:
    """Every sample has x = 1. Ten samples: the fifth and the tenth are held out. The first client
    has label 1, the second label 0; held-out samples of the third have 1 and its others 0.
    """
    labels = [[1] * 10, [0] * 10, [0, 0, 0, 0, 1] * 2]
    return fc.data.from_arrays([(torch.ones(10, 1), torch.tensor(y)) for y in labels])


def model() -> nn.Linear:
    """Two outputs, both 0."""
    linear = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


def assignment(
    kind: Any, lr: float = 1.0
) -> tuple[fc.Simulator, PersonalLayer, fc.FedAvg, ModelAssignment]:
    data = clients()
    fed, objective = fc.Simulator(data, device="cpu"), Objective(model())
    local = LocalTraining(objective, lr=lr, batch_size=100)
    method = fc.FedAvg().with_local_config(local)
    fed.init_client_state({})
    state: State = method.init(fed, objective.params(), key=0)
    layer = PersonalLayer(fc.PersonalConfig(kind, epochs=1), kind, "classes")
    return (
        fed,
        layer,
        method,
        layer.assignment(fed, method, method.assign_models(state, IDS), IDS, key=1),
    )


def losses(step: float, label_is_first: bool) -> float:
    """The loss of a sample of label 1 whose outputs are (-step, step), or of label 0. One step from
    0 with lr 1 gives step ½: the gradient for label 1 is p - 1{y} = (½, -½).
    """
    return math.log1p(math.exp(2 * step if label_is_first else -2 * step))


def test_the_scores_of_interpolation() -> None:
    fed, _, method, received = assignment("interpolate")
    program = score_candidates(method.local, "interpolate", "classes", None)
    result = fed.map(program, IDS, per_client=method.assign_models(_state(method, fed), IDS), key=1)
    assert result.outputs["examples"].tolist() == [2, 2, 2]
    # With equal outputs the first class is predicted.
    assert result.outputs["right"].tolist() == [[0, 2, 2, 2, 2], [2] * 5, [0] * 5]
    alphas = (0, 0.25, 0.5, 0.75, 1)
    for client, is_wrong in enumerate((False, False, True)):
        assert result.outputs["loss"][client].tolist() == pytest.approx(
            [2 * losses(alpha / 2, is_wrong) for alpha in alphas], abs=1e-5
        )
    # One pool of three clients: the mean score of a sample, by hand.
    good, bad = ([losses(alpha / 2, wrong) for alpha in alphas] for wrong in (False, True))
    right = [2, 4, 4, 4, 4]
    expected = [
        (r - LOSS_WEIGHT * (4 * g + 2 * b)) / 6 for r, g, b in zip(right, good, bad, strict=True)
    ]
    assert received.models[SCORE][0].tolist() == pytest.approx(expected, abs=1e-5)


def _state(method: fc.FedAvg, fed: fc.Simulator) -> State:
    return method.init(fed, method.local.objective.params(), key=0)


@pytest.mark.parametrize(
    ("prior", "expected"), [(PRIOR_SAMPLES, [0.375, -0.375, -0.225]), (1.0, [0.5, -0.5, -0.075])]
)
def test_a_client_adds_the_mean_over_clients_to_its_own_samples(
    prior: float, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tuning helps the first two clients, and is wrong for the third. Two samples of their own
    count little against 100, and more than one.
    """
    monkeypatch.setattr(programs, "PRIOR_SAMPLES", prior)
    fed, layer, method, received = assignment("interpolate")
    served = fed.models_of(received, IDS, layer.program(method), key=1)["weight"][:, 1, 0]
    score = received.models[SCORE][0].double()
    for client, is_wrong in enumerate((False, False, True)):
        own = torch.tensor(
            [
                2 * (client == 1 or (client == 0 and alpha > 0))
                - 2 * LOSS_WEIGHT * losses(alpha / 2, is_wrong)
                for alpha in (0, 0.25, 0.5, 0.75, 1)
            ]
        )
        alpha = candidates("interpolate")[int((own + prior * score).argmax())][0]
        # All samples of a client but the third's have one label; of the third's ten, two have 1.
        step = {0: 0.5, 1: -0.5, 2: -0.3}[client]
        assert float(served[client]) == pytest.approx(alpha * step, abs=1e-6)
    assert served.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_client_that_sent_no_scores_follows_the_others() -> None:
    fed, layer, method, received = assignment("interpolate")
    fed.client_state.rollback()  # the third client's own scores, which prefer α = 0
    served = fed.models_of(received, IDS, layer.program(method), key=1)["weight"][:, 1, 0]
    alpha = candidates("interpolate")[int(received.models[SCORE][0].argmax())][0]
    assert served.tolist() == pytest.approx([0.5 * alpha, -0.5 * alpha, -0.3 * alpha], abs=1e-6)


@pytest.mark.parametrize(("kind", "epochs"), [("interpolate", 1), ("auto", 1), ("knn", 0)])
def test_scores_are_computed_once(kind: str, epochs: int) -> None:
    """Steps of the model that is used: one epoch of fine-tuning, and one to store neighbors."""
    fed, layer, method, received = assignment(kind)
    before = fed.clock.asked
    fed.models_of(received, IDS, layer.program(method), key=1)
    assert fed.clock.asked - before == len(IDS) * (epochs + (kind != "interpolate"))


def test_neighbors_of_held_out_samples_are_the_others() -> None:
    fed, layer, method, received = assignment("knn")
    assert received.models[SLOTS].shape == (1, 10)
    program = score_candidates(method.local, "knn", "classes", None)
    result = fed.map(program, IDS, per_client=received, key=1)
    # p_kNN of the neighbors' label is 1: right for two clients, wrong for the third.
    weights = torch.arange(11) / 10
    for client, is_wrong in enumerate((False, False, True)):
        p = (1 - weights) / 2 + (0 if is_wrong else weights)
        loss = (-2 * p.clamp_min(1e-12).log()).tolist()
        assert result.outputs["loss"][client].tolist() == pytest.approx(loss, abs=1e-4)
    served = fed.models_of(received, IDS, layer.program(method), key=1)
    assert served["knn_weight"].unique().numel() == 1
    weight = float(served["knn_weight"][0])
    assert weight == pytest.approx(candidates("knn")[int(received.models[SCORE][0].argmax())][1])
    assert served["labels"].tolist() == [[1] * 10, [0] * 10, [0, 0, 0, 0, 1] * 2]


def test_pools_are_drawn_to_the_mean_of_everybody() -> None:
    sums = {
        "examples": torch.tensor([100.0, 0.0]),
        "right": torch.tensor([[50.0, 80.0], [0.0, 0.0]]),
        "loss": torch.tensor([[40.0, 20.0], [0.0, 0.0]]),
    }
    everybody = [(50 - 10) / 100, (80 - 5) / 100]
    score = pooled_scores(sums, "classes")
    assert score[0].tolist() == pytest.approx(everybody)
    assert score[1].tolist() == pytest.approx(everybody)
    assert pooled_scores(sums, "loss")[0].tolist() == pytest.approx([-0.4, -0.2])


def test_a_model_that_diverges_is_never_chosen() -> None:
    fed, layer, method, received = assignment("auto", lr=1e30)
    score = received.models[SCORE][0]
    assert torch.isfinite(score).all()
    served = fed.models_of(received, IDS, layer.program(method), key=1)
    assert torch.isfinite(served["model.weight"]).all()
