"""FedEM on three clients, against the same mathematics in plain Python.

The model is one linear layer without bias, two inputs, two classes. Its inputs are (1, 0) or
(0, 1), so a sample reads and trains one column of the weights, and the order of the batches does
not matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedclade as fc
from fedclade import FedEM, InvalidInputError, Simulator
from fedclade.core import LocalTraining
from fedclade.core.functional_model import Objective
from fedclade.core.pytree import Tree
from fedclade.data import Clients, from_arrays
from fedclade.programs.mixture import Mixture

Weights = list[list[float]]  # [class][input]
LR = 0.1
# Each sample is (input, label); the clients have one, two and three of them.
SAMPLES: list[list[tuple[int, int]]] = [[(0, 1)], [(0, 0), (1, 1)], [(0, 0), (1, 0), (1, 1)]]
MODELS: list[Weights] = [[[1.0, -0.5], [-1.0, 0.5]], [[-0.5, 0.25], [1.5, 0.75]]]


def clients() -> Clients:
    inputs = torch.eye(2)
    return from_arrays(
        [(inputs[[x for x, _ in rows]], torch.tensor([y for _, y in rows])) for rows in SAMPLES]
    )


def softmax(logits: Sequence[float]) -> list[float]:
    total = sum(map(math.exp, logits))
    return [math.exp(value) / total for value in logits]


def probabilities(model: Weights, x: int) -> list[float]:
    return softmax([row[x] for row in model])


def responsibilities(
    models: list[Weights], pi: Sequence[float], sample: tuple[int, int], shares: Any = None
) -> list[float]:
    x, y = sample
    scores = [p * probabilities(model, x)[y] for p, model in zip(pi, models, strict=True)]
    if shares is not None:
        scores = [score / share[y] for score, share in zip(scores, shares, strict=True)]
    return [score / sum(scores) for score in scores]


def trained(
    models: list[Weights], rows: list[tuple[int, int]], q: list[list[float]], batch_size: int
) -> list[Weights]:
    """One epoch on Σ q loss / batch size. With batches of one, samples must not share an input."""
    after = [[list(row) for row in model] for model in models]
    size = min(batch_size, len(rows))
    for (x, y), weights in zip(rows, q, strict=True):
        for m, model in enumerate(models):
            p = probabilities(model, x)
            for label in range(2):
                error = p[label] - (label == y)
                after[m][label][x] -= LR * weights[m] * error / size
    return after


def mean(models: list[list[Weights]], sizes: list[int]) -> list[Weights]:
    total = sum(sizes)
    return [
        [
            [
                sum(n * one[m][row][x] for n, one in zip(sizes, models, strict=True)) / total
                for x in range(2)
            ]
            for row in range(2)
        ]
        for m in range(len(models[0]))
    ]


class Case:
    """FedEM with two components on the three clients."""

    def __init__(self, method: FedEM | None = None, batch_size: int = 10, **sim: Any) -> None:
        self.module = nn.Sequential(nn.Linear(2, 2, bias=False))
        self.objective = Objective(self.module)
        self.method = (method or FedEM(components=2)).with_local_config(
            LocalTraining(self.objective, lr=LR, batch_size=batch_size)
        )
        self.fed = Simulator(clients(), **sim)
        params = self.objective.params()
        self.fed.init_client_state(self.method.initial_client_state(params))
        state = self.method.init(self.fed, params, key=0)
        self.state = replace(state, models={"0.weight": torch.tensor(MODELS)[None]})

    def round(self, *cohort: int) -> None:
        self.state = self.method.round(self.fed, self.state, torch.tensor(cohort), key=1)
        self.fed.client_state.commit(1)

    def models(self) -> Tensor:
        return self.state.models["0.weight"][0]

    def pi(self) -> Tensor:
        return self.fed.client_state.read(torch.arange(3))["pi"]

    def served(self) -> Tree:
        ids = torch.arange(3)
        return self.fed.models_of(
            self.method.assign_models(self.state, ids), ids, self.method.personalization_program()
        )


def close(value: Tensor, expected: Any) -> bool:
    return torch.allclose(value, torch.tensor(expected), atol=1e-6)


def test_two_rounds_by_hand() -> None:
    run = Case()
    models, pi = MODELS, [[0.5, 0.5]] * 3
    for _ in range(2):
        run.round(0, 1, 2)
        q = [
            [responsibilities(models, pi[t], sample) for sample in rows]
            for t, rows in enumerate(SAMPLES)
        ]
        pi = [[sum(column) / len(rows) for column in zip(*rows, strict=True)] for rows in q]
        models = mean(
            [trained(models, rows, q[t], 10) for t, rows in enumerate(SAMPLES)], [1, 2, 3]
        )
        # The second round begins with the π of the first, not with equal parts.
        assert close(run.pi(), pi)
        assert close(run.models(), models)


@pytest.mark.parametrize("seed", range(4))
def test_weights_stay_with_their_samples_in_shuffled_batches(seed: int) -> None:
    run = Case(batch_size=1)
    run.state = run.method.round(run.fed, run.state, torch.tensor([1]), key=seed)
    q = [responsibilities(MODELS, [0.5, 0.5], sample) for sample in SAMPLES[1]]
    assert abs(q[0][0] - q[1][0]) > 0.3  # swapped weights would give other models
    assert close(run.models(), trained(MODELS, SAMPLES[1], q, 1))


def test_an_absent_client_keeps_its_mixture() -> None:
    run = Case()
    run.round(0, 1, 2)
    before = run.pi()
    run.round(0, 1)
    assert torch.equal(run.pi()[2], before[2])
    assert not torch.equal(run.pi()[0], before[0])


def test_probabilities_are_mixed_not_outputs() -> None:
    mixture = Mixture(nn.Linear(1, 2, bias=False), 2)
    with torch.no_grad():
        mixture.components[0].weight.copy_(torch.tensor([[8.0], [0.0]]))
        mixture.components[1].weight.copy_(torch.tensor([[0.0], [2.0]]))
        mixture.pi.copy_(torch.tensor([0.4, 0.6]))
    first, second = softmax([8, 0]), softmax([0, 2])
    expected = [0.4 * a + 0.6 * b for a, b in zip(first, second, strict=True)]
    outputs = mixture(torch.ones(1, 1))
    assert close(outputs.exp()[0], expected)
    # The mean of the outputs, 3.2 and 1.2, has the other label.
    assert expected[1] > expected[0]
    assert int(outputs.argmax()) == 1


def test_the_mixture_of_the_last_round_is_used() -> None:
    run = Case()
    run.round(0, 1, 2)
    served = run.served()
    assert torch.equal(served["pi"], run.pi())
    assert not torch.allclose(served["pi"], torch.full((3, 2), 0.5), atol=0.05)
    for m in range(2):
        assert close(served[f"components.{m}.0.weight"][0], run.models()[m].tolist())


def test_a_new_client_learns_its_mixture_alone() -> None:
    run = Case()
    served = run.served()  # nobody has trained
    for t, rows in enumerate(SAMPLES):
        pi = [0.5, 0.5]
        for _ in range(20):
            q = [responsibilities(MODELS, pi, sample) for sample in rows]
            pi = [sum(column) / len(rows) for column in zip(*q, strict=True)]
        assert close(served["pi"][t], pi)
    assert close(served["components.1.0.weight"][2], MODELS[1])
    run.round(0, 1)
    assert torch.equal(run.served()["pi"][:2], run.pi()[:2])  # these have trained
    assert float(run.pi()[2].sum()) == 0  # nothing was written for the other one


def test_fedrc_divides_by_the_share_of_a_label() -> None:
    run = Case(FedEM(components=2, fedrc=True))
    models, pi, shares = MODELS, [[0.5, 0.5]] * 3, [[0.5, 0.5]] * 2
    for _ in range(2):
        run.round(0, 1, 2)
        q = [
            [responsibilities(models, pi[t], sample, shares) for sample in rows]
            for t, rows in enumerate(SAMPLES)
        ]
        pi = [[sum(column) / len(rows) for column in zip(*rows, strict=True)] for rows in q]
        models = mean(
            [trained(models, rows, q[t], 10) for t, rows in enumerate(SAMPLES)], [1, 2, 3]
        )
        # One more sample, half of it with each label.
        counts = [
            [
                0.5
                + sum(
                    q[t][i][m]
                    for t, rows in enumerate(SAMPLES)
                    for i, (_, y) in enumerate(rows)
                    if y == label
                )
                for label in range(2)
            ]
            for m in range(2)
        ]
        shares = [[count / sum(row) for count in row] for row in counts]
        assert close(run.pi(), pi)
        assert close(run.models(), models)
        assert close(run.state.shares, shares)


@pytest.mark.parametrize("fedrc", [False, True])
def test_only_models_and_counts_leave_a_client(fedrc: bool) -> None:
    replies: list[Tree] = []

    def record(key: int, client: int, reply: Tree) -> Tree:
        replies.append(reply)
        return reply

    run = Case(FedEM(components=2, fedrc=fedrc), faults=record)
    run.round(0, 1, 2)
    names = {"0.weight", "label_shares"} if fedrc else {"0.weight"}
    assert all(set(reply) == names for reply in replies)
    weights, counts = 2 * 4 * 4, 2 * 2 * 4 * fedrc  # K·W, and K·C numbers of 4 bytes
    assert run.fed.traffic.up == run.fed.traffic.down == 3 * (weights + counts)


def test_a_loss_without_probabilities_is_refused() -> None:
    data = from_arrays([(torch.randn(4, 2), torch.randn(4)) for _ in range(2)])
    with pytest.raises(InvalidInputError) as caught:
        fc.run(FedEM(), data, nn.Linear(2, 1), loss="mse", rounds=1, device="cpu")
    assert caught.value.field == "local.loss"
