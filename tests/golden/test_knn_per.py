"""kNN-Per on three clients, against the same mathematics in plain Python.

The model has two layers, φ(x) = 2 x and outputs (φ, -φ), and does not change: lr = 0.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedclade as fc
from fedclade import FedAvg, InvalidInputError, KNNPer, Method, Simulator
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.pytree import Tree
from fedclade.core.rng import fold_in
from fedclade.data import Clients, from_arrays
from fedclade.programs.nearest_neighbors import NearestNeighbors

# (x, y) of each client; the third has 25 samples, so that 5 are held out.
SAMPLES: list[list[tuple[float, int]]] = [
    [(0.5, 1)],
    [(0.0, 0), (1.0, 1)],
    [(i / 10 - 1, int(i % 7 > 3)) for i in range(25)],
]


def clients(samples: list[list[tuple[float, int]]] = SAMPLES) -> Clients:
    return from_arrays(
        [
            (torch.tensor([[x] for x, _ in rows]), torch.tensor([y for _, y in rows]))
            for rows in samples
        ]
    )


def model() -> nn.Module:
    layers = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        layers[0].weight.fill_(2.0)
        layers[1].weight.copy_(torch.tensor([[1.0], [-1.0]]))
    return layers


def served(
    method: Method,
    data: Clients,
    lr: float = 0.0,
    rounds: int = 1,
    cohort: list[int] | None = None,
) -> tuple[Tree, Any]:
    """The parameters of each client's module after these rounds, and the federation."""
    objective = Objective(model())
    bound = method.with_local_config(LocalTraining(objective, lr=lr, batch_size=4))
    fed, ids = Simulator(data), torch.arange(len(data))
    state = bound.init(fed, objective.params(), key=0)
    for number in range(rounds):
        clients = ids if cohort is None else torch.tensor(cohort)
        state = bound.round(fed, state, clients, key=fold_in(0, "round", number))
    return fed.models_of(bound.assign_models(state, ids), ids, bound.personalization_program()), fed


def p_model(x: float) -> list[float]:
    total = math.exp(2 * x) + math.exp(-2 * x)
    return [math.exp(2 * x) / total, math.exp(-2 * x) / total]


def p_knn(x: float, store: list[tuple[float, int]], k: int, scale: float) -> list[float]:
    """dim = 1, so that a neighbor has the weight exp(-(2 x - 2 x_j)² / s)."""
    near = sorted(store, key=lambda sample: abs(sample[0] - x))[:k]
    weights = [0.0, 0.0]
    for x_j, y in near:
        weights[y] += math.exp(-((2 * x - 2 * x_j) ** 2) / scale)
    return [weight / sum(weights) for weight in weights]


def module_of(method: KNNPer, params: Tree, client: int) -> nn.Module:
    row = {name: value[client] for name, value in params.items()}
    module = method.served_module(model(), row)
    module.load_state_dict(row)
    return module


@pytest.mark.parametrize(("k", "scale"), [(10, 1.0), (2, 0.5)])
def test_three_clients_by_hand(k: int, scale: float) -> None:
    method = KNNPer(k=k, scale=scale, hold_out=False, default_weight=0.3)
    params, _ = served(method, clients())
    assert params["knn_weight"].tolist() == pytest.approx([0.3] * 3)
    for client, store in enumerate(SAMPLES):
        module = module_of(method, params, client)
        for x in (-0.73, 0.11, 0.97):
            expected = [
                0.3 * a + 0.7 * b
                for a, b in zip(p_knn(x, store, k, scale), p_model(x), strict=True)
            ]
            # Outputs of h are up to 2: adding them to p_kNN would give no probabilities.
            assert module(torch.tensor([[x]])).exp()[0].tolist() == pytest.approx(
                expected, abs=1e-5
            )


def test_the_store_has_all_training_samples_of_its_client_and_no_padding() -> None:
    params, _ = served(KNNPer(), clients())
    for client, rows in enumerate(SAMPLES):
        labels = params["labels"][client]
        real = labels >= 0
        found = torch.stack([params["features"][client][real, 0], labels[real]], 1).tolist()
        expected = sorted([2 * x, float(y)] for x, y in rows)
        assert torch.allclose(torch.tensor(sorted(found)), torch.tensor(expected))


def test_a_client_that_never_trained_has_the_models_of_the_others_and_its_own_store() -> None:
    params, _ = served(KNNPer(), clients(), lr=0.1, cohort=[0, 1])
    assert len(params["model.0.weight"].unique()) == 1
    assert float(params["model.0.weight"][0]) != 2.0  # it is the trained one
    assert int((params["labels"][2] >= 0).sum()) == 25
    assert float(params["knn_weight"][2]) != 0.5  # chosen, not the default


HELD = [4, 9, 14, 19, 24]  # every fifth sample of the third client


def test_lambda_has_the_largest_likelihood_of_the_samples_held_out() -> None:
    params, _ = served(KNNPer(), clients())
    store = [sample for place, sample in enumerate(SAMPLES[2]) if place not in HELD]

    def likelihood(weight: float) -> float:
        total = 0.0
        for place in HELD:
            x, y = SAMPLES[2][place]
            total += math.log(weight * p_knn(x, store, 10, 1.0)[y] + (1 - weight) * p_model(x)[y])
        return total

    best = max(range(101), key=lambda i: likelihood(i / 100))
    assert 0 < best < 100  # not at the end of the grid, where other rules would be too
    assert float(params["knn_weight"][2]) == pytest.approx(best / 100)
    # Clients with fewer than 5 samples held out have the default.
    assert params["knn_weight"][:2].tolist() == [0.5, 0.5]


def test_nobody_trains_on_samples_that_are_held_out() -> None:
    flipped = [list(rows) for rows in SAMPLES]
    for place in HELD:
        x, y = flipped[2][place]
        flipped[2][place] = (x, 1 - y)
    params, _ = served(KNNPer(), clients(), lr=0.1, rounds=3)
    other, _ = served(KNNPer(), clients(flipped), lr=0.1, rounds=3)
    plain, _ = served(KNNPer(hold_out=False), clients(), lr=0.1, rounds=3)
    for name in ("model.0.weight", "model.1.weight"):
        assert torch.equal(params[name], other[name])
        assert not torch.equal(params[name], plain[name])
    assert float(params["knn_weight"][2]) != float(other["knn_weight"][2])


def test_lambda_and_store_do_not_depend_on_test_data() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 1, generator=generator), torch.arange(60) % 2
    first = from_arrays([(x[a : a + 30], y[a : a + 30], x[a:][:9], y[a:][:9]) for a in (0, 30)])
    second = replace(first, y_test=1 - first.y_test)
    params, other = (served(KNNPer(), data, lr=0.1)[0] for data in (first, second))
    assert all(torch.equal(params[name], other[name]) for name in params)


def test_without_hold_out_training_and_traffic_are_those_of_fedavg() -> None:
    objective = Objective(model())
    results: list[tuple[Tensor, int, int]] = []
    for method in (FedAvg(), KNNPer(hold_out=False), KNNPer()):
        bound = method.with_local_config(LocalTraining(objective, lr=0.1, batch_size=4))
        fed = Simulator(clients())
        state = bound.init(fed, objective.params(), key=0)
        state = bound.round(fed, state, torch.arange(3), key=1)
        results.append((state.models["0.weight"], fed.traffic.up, fed.traffic.down))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:] == results[2][1:]


def test_probabilities_are_mixed_not_outputs() -> None:
    module = NearestNeighbors(model(), 2, k=1, scale=1.0)
    with torch.no_grad():
        module.features.copy_(torch.tensor([[2.0], [-2.0]]))
        module.labels.copy_(torch.tensor([1.0, 0.0]))
        module.knn_weight.fill_(0.6)
    # At x = 1: h gives (2, -2), softmax (0.982, 0.018); the nearest sample has label 1.
    p = module(torch.ones(1, 1)).exp()[0]
    assert p.tolist() == pytest.approx([0.4 * p_model(1)[0], 0.6 + 0.4 * p_model(1)[1]], abs=1e-5)
    assert int(p.argmax()) == 1  # 0.6 p_kNN + 0.4 h would be (0.8, -0.2): the other label


@pytest.mark.parametrize(
    ("field", "value"),
    [("k", 0), ("scale", 0.0), ("default_weight", 1.5)],
)
def test_invalid_values_are_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidInputError) as caught:
        KNNPer(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == f"method.{field}"


def test_a_loss_without_probabilities_is_refused() -> None:
    data = from_arrays([(torch.randn(4, 2), torch.randn(4)) for _ in range(2)])
    with pytest.raises(InvalidInputError) as caught:
        fc.run(KNNPer(), data, nn.Linear(2, 1), loss="mse", rounds=1, device="cpu")
    assert caught.value.field == "local.loss"
