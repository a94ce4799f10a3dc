"""Sketches against plain autograd and plain means."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedclade import Simulator
from fedclade.core import Batch, ModelAssignment
from fedclade.core.functional_model import Objective
from fedclade.core.pytree import stack
from fedclade.data import Clients
from fedclade.errors import InvalidInputError
from fedclade.models import MLP
from fedclade.programs import gradient_signature
from fedclade.programs.gradient_signature import (
    dimensions,
    projection,
    signature,
    sketch_of,
    symmetric,
)

KEY = 123456789012345


@pytest.fixture
def objective() -> Objective:
    torch.manual_seed(0)
    return Objective(MLP(5).build((6,), 3))


def whole(clients: Clients, client: int) -> Batch:
    rows = clients.train[client]
    return Batch(clients.x[rows], clients.y[rows], torch.ones(len(rows)), torch.tensor(0))


def features(objective: Objective, x: torch.Tensor) -> torch.Tensor:
    layers = list(objective.module)  # type: ignore[call-overload]
    return torch.nn.Sequential(*layers[:-1])(x)


def test_gradient_sketch_is_the_projected_gradient_of_the_last_layer(
    objective: Objective, ragged: Clients
) -> None:
    batch = whole(ragged, 2)
    got = sketch_of(objective, "gradient", 8, KEY)(objective.params(), batch)
    params = {name: value.requires_grad_() for name, value in objective.params().items()}
    onto = projection(KEY, 3 * 6, 8, torch.device("cpu"))
    for sample in range(len(batch.y)):
        loss = F.cross_entropy(
            objective.outputs(params, batch.x[sample : sample + 1]), batch.y[sample : sample + 1]
        )
        weight, bias = torch.autograd.grad(loss, [params["fc2.weight"], params["fc2.bias"]])
        expected = torch.cat([weight, bias[:, None]], 1).flatten() @ onto
        torch.testing.assert_close(got[sample], expected, rtol=1e-4, atol=1e-6)


class LastPosition(torch.nn.Module):
    """A classifier of all positions, of which the last one counts."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.tanh())[:, -1]


@pytest.mark.parametrize("vectorized", [True, False])
def test_gradient_sketch_of_a_model_that_does_more_after_its_last_layer(vectorized: bool) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 6, 4), torch.tensor([0, 1, 2, 0, 1])
    objective = Objective(LastPosition())
    if not vectorized:
        objective._not_vectorized = "it is tested"
    batch = Batch(x, y, torch.ones(5), torch.tensor(0))
    got = sketch_of(objective, "gradient", 8, KEY)(objective.params(), batch)
    params = {name: value.requires_grad_() for name, value in objective.params().items()}
    onto = projection(KEY, 3 * 5, 8, torch.device("cpu"))
    for sample in range(5):
        outputs = objective.outputs(params, x[sample : sample + 1])
        loss = F.cross_entropy(outputs, y[sample : sample + 1])
        weight, bias = torch.autograd.grad(loss, [params["head.weight"], params["head.bias"]])
        expected = torch.cat([weight, bias[:, None]], 1).flatten() @ onto
        torch.testing.assert_close(got[sample], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(40, 7), (40, 5, 7)])
def test_a_large_layer_has_a_sketch_that_keeps_inner_products(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    objective = Objective(torch.nn.Sequential(torch.nn.Linear(7, 6)))
    x, y = torch.randn(*shape), torch.randint(0, 6, shape[:-1])
    batch = Batch(x, y, torch.ones(40), torch.tensor(0))
    exact = sketch_of(objective, "gradient", 4096, KEY)(objective.params(), batch)
    monkeypatch.setattr(gradient_signature, "LARGEST_PROJECTION", 4096)
    sketch = sketch_of(objective, "gradient", 4096, KEY)(objective.params(), batch)
    assert not torch.equal(sketch, exact)
    products, expected = sketch @ sketch.T, exact @ exact.T
    assert (products - expected).abs().max() < 0.1 * expected.abs().max()


def test_a_model_whose_last_layer_is_not_used_is_refused() -> None:
    class Unused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(4, 3), torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.used(x)
            return y

    objective = Objective(Unused())
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "model"):
        objective.features(objective.params(), torch.zeros(2, 4))


def test_features_sketch_has_a_projection_and_its_squares_and_ignores_labels(
    objective: Objective, ragged: Clients
) -> None:
    batch = whole(ragged, 2)
    sketch = sketch_of(objective, "features", 8, KEY)
    u = features(objective, batch.x) @ projection(KEY, 5, 4, torch.device("cpu"))
    torch.testing.assert_close(sketch(objective.params(), batch), torch.cat([u, u**2], 1))
    assert torch.equal(
        sketch(objective.params(), batch), sketch(objective.params(), batch._replace(y=2 - batch.y))
    )


def test_joint_sketch_has_class_counts_and_class_conditional_sums(
    objective: Objective, ragged: Clients
) -> None:
    batch = whole(ragged, 2)
    mean = sketch_of(objective, "joint", 8, KEY)(objective.params(), batch).mean(0).view(3, 5)
    u = features(objective, batch.x) @ projection(KEY, 5, 4, torch.device("cpu"))
    for label in range(3):
        of_class = batch.y == label
        assert mean[label, 0] == pytest.approx(float(of_class.float().mean()))
        torch.testing.assert_close(mean[label, 1:], u[of_class].sum(0) / len(u))


@pytest.mark.parametrize("kind", ["gradient", "features", "joint"])
def test_signature_is_mean_and_scatter_of_each_client(
    objective: Objective, ragged: Clients, kind: str
) -> None:
    program = signature(objective, kind, 6, KEY)  # type: ignore[arg-type]
    ids = torch.arange(len(ragged))
    got = (
        Simulator(ragged, chunk=4)
        .map(
            program,
            ids,
            per_client=ModelAssignment(stack([objective.params()]), torch.zeros_like(ids)),
            key=0,
        )
        .outputs
    )
    e = dimensions(objective, kind, 6)  # type: ignore[arg-type]
    sketch = sketch_of(objective, kind, 6, KEY)  # type: ignore[arg-type]
    for client in range(len(ragged)):
        samples = sketch(objective.params(), whole(ragged, client)).double()
        mean = samples.mean(0)
        torch.testing.assert_close(got["mean"][client], mean.float(), rtol=1e-4, atol=1e-6)
        scatter = (samples - mean).T @ (samples - mean)
        torch.testing.assert_close(
            symmetric(got["scatter"][client], e), scatter.float(), rtol=1e-4, atol=1e-5
        )


def test_projection_keeps_lengths_on_average() -> None:
    onto = projection(KEY, 300, 400, torch.device("cpu"))
    lengths = (torch.randn(50, 300, generator=torch.Generator().manual_seed(0)) @ onto).norm(
        dim=1
    ) / np.sqrt(300)
    assert float(lengths.mean()) == pytest.approx(1.0, abs=0.05)
    assert not torch.equal(onto, projection(KEY + 1, 300, 400, torch.device("cpu")))
