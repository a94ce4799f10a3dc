"""Clipping and noise: the sensitivities that docs/privacy.md states, the standard deviation they
need, and where noise comes from.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn

from fedclade import Simulator
from fedclade.core import Batch, ModelAssignment
from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Objective
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree, add_prefix, stack
from fedclade.data import Clients, from_arrays
from fedclade.methods._dp_signature import gaussian_sigma
from fedclade.models import MLP
from fedclade.programs import encoder_signature, gradient_signature
from fedclade.programs.gaussian_mechanism import MOMENT, SUM, after, clipped, noise_for, trace_of

KEY, SECRET = 123456789012345, 2**100 + 7
numbers = st.floats(-1e3, 1e3, allow_nan=False)


# --- clipping and sensitivity


def test_clipping_by_hand() -> None:
    given = torch.tensor(
        [[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [float("inf"), 1.0], [float("nan"), 1.0]]
    )
    expected = torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    torch.testing.assert_close(clipped(given, 1.0), expected)


@given(st.lists(numbers, min_size=1, max_size=6), st.floats(1e-3, 1e3))
def test_long_vectors_are_clipped_and_short_ones_do_not_change(
    values: list[float], clip: float
) -> None:
    vector = torch.tensor([values], dtype=torch.float64)
    short = clipped(vector, clip)
    assert float(short.norm()) <= clip * (1 + 1e-12)
    if float(vector.norm()) <= clip:
        assert torch.equal(short, vector)


def change(a: np.ndarray, b: np.ndarray, clip: float) -> float:
    """How far sum and upper triangle of the second moments move, in units of the sensitivity, when
    example a is replaced by b.
    """
    moments = np.outer(a, a) - np.outer(b, b)
    reply = np.concatenate(
        [(a - b) / (SUM * clip), moments[np.triu_indices(len(a))] / (MOMENT * clip**2)]
    )
    return float(np.linalg.norm(reply))


@given(
    st.integers(1, 5).flatmap(
        lambda e: st.tuples(*[st.lists(numbers, min_size=e, max_size=e)] * 2)
    ),
    st.floats(0.01, 100),
)
@settings(max_examples=500)
def test_one_example_moves_sum_and_moments_together_by_at_most_one(
    pair: tuple[list[float], list[float]], clip: float
) -> None:
    a, b = clipped(torch.tensor(pair, dtype=torch.float64), clip).numpy()
    assert change(a, b, clip) <= 1 + 1e-9


def test_the_sensitivity_is_reached() -> None:
    assert change(np.array([2.0, 0.0]), np.array([-2.0, 0.0]), clip=2.0) == 1.0


@pytest.mark.parametrize("clip", [0.1, 1.0, 30.0])
def test_replacing_an_example_moves_a_signature_by_at_most_its_sensitivity(clip: float) -> None:
    """The programs themselves, with so little noise that one sees through it."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(7, 6, generator=generator), torch.arange(7) % 3
    other = x.clone()
    other[3] = -50 * x[3]
    clients = from_arrays([(x, y), (other, y)])
    objective = Objective(MLP(5).build((6,), 3))
    replies = replies_of(
        gradient_signature.private_signature(objective, "gradient", 4, KEY, clip, 1e-12, SECRET),
        clients,
        objective,
    )
    one, two = replies["mean"].double()
    assert 0 < float((one - two).norm()) <= SUM * clip / 7 + 1e-6
    mean = replies_of(
        encoder_signature.private_signature(Encoder(nn.Flatten()), clip, 1e-12, SECRET), clients
    )["centres"][:, 0]
    assert 0 < float((mean[0] - mean[1]).norm()) <= SUM * clip / 7 + 1e-6


# --- the Gaussian mechanism


def delta_of(sigma: float, epsilon: float) -> float:
    """δ(ε) of Gaussian noise on a query of sensitivity 1 as the hockey-stick integral ∫ max(0, p -
    e^ε q), numerically.
    """
    z = np.linspace(-40 * sigma, 40 * sigma + 1, 2_000_001)
    p, q = stats.norm.pdf(z, 0, sigma), stats.norm.pdf(z, 1, sigma)
    return float(np.trapezoid(np.maximum(0, p - math.exp(epsilon) * q), z))


@pytest.mark.parametrize("epsilon", [0.1, 0.3, 1.0, 3.0, 10.0])
def test_sigma_gives_exactly_delta(epsilon: float) -> None:
    sigma = gaussian_sigma(epsilon, 1e-5)
    assert delta_of(sigma, epsilon) == pytest.approx(1e-5, rel=1e-4)


def test_sigma_is_below_the_classical_bound_where_that_holds() -> None:
    for epsilon in (0.01, 0.1, 0.5, 0.99):
        assert gaussian_sigma(epsilon, 1e-5) < math.sqrt(2 * math.log(1.25 / 1e-5)) / epsilon


@given(st.floats(1e-3, 500), st.floats(1e-12, 0.5))
def test_less_privacy_is_less_noise(epsilon: float, delta: float) -> None:
    sigma = gaussian_sigma(epsilon, delta)
    assert 0 < sigma < math.inf
    assert gaussian_sigma(epsilon * 1.1, delta) < sigma
    assert gaussian_sigma(epsilon, delta * 1.1) < sigma


# --- where noise comes from


def test_noise_is_standard_normal() -> None:
    noise = noise_for(trace_of("a"), SECRET, torch.zeros(200_000)).double().numpy()
    assert stats.kstest(noise, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 5 / len(noise) ** 0.5


def test_noise_depends_on_secret_query_and_data_only() -> None:
    x, y = torch.arange(6.0).view(3, 2), torch.tensor([0, 1, 2])
    trace = after(trace_of("gradient", 4, 1.0), x, y)
    assert torch.equal(
        trace, after(after(trace_of("gradient", 4, 1.0), x[:1], y[:1]), x[1:], y[1:])
    )  # other blocks
    others = [
        after(trace_of("gradient", 4, 2.0), x, y),
        after(trace_of("gradient", 41.0), x, y),
        after(trace_of("gradient", 4, 1.0), x, y.flip(0)),
        after(trace_of("gradient", 4, 1.0), x.flip(0), y),
        after(trace_of("gradient", 4, 1.0), x[:2], y[:2]),
    ]
    draws = [
        noise_for(trace, SECRET, x),
        noise_for(trace, SECRET + 1, x),
        *(noise_for(other, SECRET, x) for other in others),
    ]
    assert all(
        not torch.equal(one, two) for place, one in enumerate(draws) for two in draws[:place]
    )
    assert torch.equal(draws[0], noise_for(trace.clone(), SECRET, x))


def replies_of(
    program: AnyProgram,
    clients: Clients,
    objective: Objective | None = None,
    key: int = 0,
    **options: Any,
) -> Tree:
    ids = torch.arange(len(clients))
    each = (
        None
        if objective is None
        else ModelAssignment(stack([objective.params()]), torch.zeros_like(ids))
    )
    return Simulator(clients, **options).map(program, ids, per_client=each, key=key).outputs


@pytest.fixture
def objective() -> Objective:
    torch.manual_seed(0)
    return Objective(MLP(5).build((6,), 3))


def test_a_repeated_query_has_the_same_reply_for_any_key(
    objective: Objective, ragged: Clients
) -> None:
    def mean(secret: int, key: int, chunk: int | None = None, noise: float = 1.0) -> Tensor:
        program = gradient_signature.private_signature(
            objective, "gradient", 6, KEY, 1.0, noise, secret
        )
        return replies_of(program, ragged, objective, key, chunk=chunk)["mean"]

    assert torch.equal(mean(SECRET, key=0), mean(SECRET, key=1, chunk=2))
    assert not torch.equal(mean(SECRET, key=0), mean(SECRET + 1, key=0))
    # The same secret and less noise: with the same noise, the two replies would reveal the mean.
    exact, more, less = (
        mean(SECRET, 0, noise=1e-9),
        mean(SECRET, 0, noise=1.0),
        mean(SECRET, 0, noise=0.5),
    )
    assert not torch.allclose(more - exact, 2 * (less - exact), atol=1e-3)


# --- the replies


@pytest.mark.parametrize("kind", ["gradient", "features", "joint"])
def test_a_private_signature_is_mean_and_scatter_of_the_clipped_sketches_plus_noise(
    kind: Any, objective: Objective, ragged: Clients
) -> None:
    clip, e = 0.5, gradient_signature.dimensions(objective, kind, 6)
    quiet = replies_of(
        gradient_signature.private_signature(objective, kind, 6, KEY, clip, 1e-9, SECRET),
        ragged,
        objective,
    )
    for client in range(len(ragged)):
        rows = ragged.train[client]
        batch = Batch(ragged.x[rows], ragged.y[rows], torch.ones(len(rows)), torch.tensor(0))
        g = clipped(
            gradient_signature.sketch_of(objective, kind, 6, KEY)(
                objective.params(), batch
            ).double(),
            clip,
        )
        mean = g.mean(0)
        torch.testing.assert_close(quiet["mean"][client], mean.float(), rtol=1e-4, atol=1e-6)
        scatter = (g - mean).T @ (g - mean)
        torch.testing.assert_close(
            gradient_signature.symmetric(quiet["scatter"][client], e),
            scatter.float(),
            rtol=1e-4,
            atol=1e-6,
        )


def test_noise_has_the_requested_size_and_the_scatter_is_unbiased(
    objective: Objective,
) -> None:
    x = torch.randn(10, 6, generator=torch.Generator().manual_seed(3))
    one = from_arrays([(x, torch.arange(10) % 3)])
    clip, noise, e = 0.5, 2.0, 4

    def reply_with(noise: float, secret: int) -> Tree:
        program = gradient_signature.private_signature(
            objective, "gradient", e, KEY, clip, noise, secret
        )
        return {name: value[0] for name, value in replies_of(program, one, objective).items()}

    exact = reply_with(1e-9, 0)
    draws = [reply_with(noise, secret) for secret in range(400)]
    means, scatters = (
        torch.stack([draw[name] for draw in draws]).double() for name in ("mean", "scatter")
    )
    errors = (means - exact["mean"]) / (SUM * clip * noise / len(x))
    assert stats.kstest(errors.flatten().numpy(), "norm").pvalue > 1e-4
    standard_error = scatters.std(0) / len(draws) ** 0.5
    assert float(((scatters.mean(0) - exact["scatter"]) / standard_error).abs().max()) < 4.5


def test_a_private_centre_is_the_mean_of_the_clipped_embeddings(ragged: Clients) -> None:
    replies = replies_of(
        encoder_signature.private_signature(Encoder(nn.Flatten()), 0.5, 1e-9, SECRET), ragged
    )
    assert replies["centres"].shape == (len(ragged), 1, 6)
    assert replies["count"].tolist() == [1] * len(ragged)
    for client in range(len(ragged)):
        mean = clipped(ragged.x[ragged.train[client]].double(), 0.5).mean(0)
        torch.testing.assert_close(
            replies["centres"][client, 0], mean.float(), rtol=1e-4, atol=1e-6
        )


def test_an_example_that_breaks_the_encoder_does_not_show() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sqrt()

    clients = from_arrays([(torch.tensor([[0.25], [-1.0]]), torch.zeros(2))])
    replies = replies_of(
        encoder_signature.private_signature(Encoder(Root()), 1.0, 1e-9, SECRET), clients
    )
    assert float(replies["centres"]) == pytest.approx(
        0.25
    )  # (0.5 + 0) / 2, and the reply is not refused


def test_no_example_changes_the_embedding_of_another(ragged: Clients) -> None:
    """An encoder that looks at the whole batch sees one example at a time."""

    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0)

    replies = replies_of(
        encoder_signature.private_signature(Encoder(Centred()), 1.0, 1e-9, SECRET), ragged
    )
    assert float(replies["centres"].abs().max()) < 1e-6


def test_weights_of_the_encoder_are_part_of_the_query(ragged: Clients) -> None:
    encoder = Encoder(nn.Linear(6, 2))
    program, weights = (
        encoder_signature.private_signature(encoder, 1.0, 1.0, SECRET),
        encoder.weights(),
    )

    def centres(weights: Tree) -> Tensor:
        return (
            Simulator(ragged)
            .map(
                program, torch.arange(len(ragged)), broadcast=add_prefix("encoder", weights), key=0
            )
            .outputs["centres"]
        )

    nudged = weights | {"bias": weights["bias"] + 1e-6}
    assert torch.equal(centres(weights), centres(weights))
    assert not torch.allclose(centres(weights), centres(nudged), atol=1e-2)


def test_more_data_of_a_client_change_the_noise(ragged: Clients) -> None:
    """Else the difference of two answers would be the newcomer, in clear."""
    x = ragged.x[ragged.train[2]]
    y = torch.zeros(len(x), dtype=torch.int64)
    less, more = from_arrays([(x[:-1], y[:-1])]), from_arrays([(x, y)])
    program = encoder_signature.private_signature(Encoder(nn.Flatten()), 1.0, 1.0, SECRET)
    sums = [
        float(len(clients.x)) * replies_of(program, clients)["centres"][0, 0]
        for clients in (less, more)
    ]
    assert float((sums[1] - sums[0]).norm()) > 1.1  # an example alone is no longer than 1
