"""Robust means: a few bad models have little effect."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedclade.aggregation.robust import robust_sums
from fedclade.core.federation import Aggregator

HOW = pytest.mark.parametrize("average", ["median", "trimmed_mean", "clipped_mean"])


def one_row(average: Aggregator, values: list[float], weight: list[float] | None = None) -> float:
    weights = torch.tensor(weight or [1.0] * len(values))[:, None]
    sums = robust_sums(average, weights, {"w": torch.tensor(values)[:, None]})
    return float(sums["w"] / weights.sum())


def test_by_hand() -> None:
    assert one_row("median", [1, 5, 100]) == 5
    assert one_row("median", [1, 5, 7, 100]) == 6
    assert one_row("trimmed_mean", [0, 1, 2, 6, 1000]) == 3  # one of five at each end
    assert one_row("trimmed_mean", [1, 2, 6]) == 3  # a fifth of three is none
    # The median is 2; the distances 2, 1, 0, 1, 98 have the median 1: 0 moves to 1, 100 to 3.
    assert one_row("clipped_mean", [0, 1, 2, 3, 100]) == pytest.approx((1 + 1 + 2 + 3 + 3) / 5)
    # Weights count: 100 has six times the weight, and is still clipped to 3.
    assert one_row("clipped_mean", [0, 1, 2, 3, 100], [1, 1, 1, 1, 6]) == pytest.approx(
        (1 + 1 + 2 + 3 + 6 * 3) / 10
    )


def test_each_row_has_its_own_models_and_its_whole_weight() -> None:
    weights = torch.tensor([[2.0, 0.0], [3.0, 0.0], [4.0, 1.0], [0.0, 5.0]], dtype=torch.float64)
    models = {
        "w": torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]], [[9.0, 0.0]], [[5.0, 6.0]]]),
        "b": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    }
    sums = robust_sums("median", weights, models)
    assert sums["w"].tolist() == [[[9 * 3.0, 9 * 2.0]], [[6 * 7.0, 6 * 3.0]]]
    assert sums["b"].tolist() == [9 * 2.0, 6 * 3.5]
    assert sums["w"].dtype == torch.float64


def test_a_row_without_models_is_zero() -> None:
    assert robust_sums("median", torch.tensor([[1.0, 0.0]]), {"w": torch.ones(1, 2)})[
        "w"
    ].tolist() == [[1, 1], [0, 0]]


models_of = st.integers(1, 9).flatmap(
    lambda count: st.integers(0, 2**31 - 1).map(lambda seed: (count, seed))
)


def drawn(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


@HOW
@given(models_of)
@settings(deadline=None, max_examples=60)
def test_a_robust_mean_ignores_the_order_and_moves_with_the_models(
    average: Aggregator, count_and_seed: tuple[int, int]
) -> None:
    count, seed = count_and_seed
    models, weights = drawn(count, seed), torch.ones(count, 1)
    mean = robust_sums(average, weights, {"w": models})["w"] / count
    reversed_mean = robust_sums(average, weights, {"w": models.flip(0)})["w"] / count
    moved = robust_sums(average, weights, {"w": 2 * models + 5})["w"] / count
    assert torch.allclose(mean, reversed_mean, atol=1e-6)
    assert torch.allclose(2 * mean + 5, moved, atol=1e-4)
    assert torch.allclose(
        robust_sums(average, weights, {"w": models[:1].expand_as(models)})["w"] / count,
        models[:1].double(),
    )


@HOW
@given(st.integers(0, 2**31 - 1), st.sampled_from([1e3, 1e6, 1e9]))
@settings(deadline=None, max_examples=40)
def test_a_fifth_of_bad_models_moves_it_no_farther_than_the_good_models_are_apart(
    average: Aggregator, seed: int, size: float
) -> None:
    models = drawn(10, seed)
    models[:2] = size
    mean = (robust_sums(average, torch.ones(10, 1), {"w": models})["w"] / 10)[0]
    good = models[2:].double()
    assert bool((mean - good.mean(0)).norm() <= 2 * (good - good.mean(0)).norm(dim=1).max())
