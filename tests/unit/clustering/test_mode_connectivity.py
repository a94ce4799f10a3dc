"""Mode connectivity: the chain and its mean, the parts of its loss, the independence of pairs, and
curves between modules.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from fedclade.clustering import mode_connectivity
from fedclade.clustering.mode_connectivity import (
    Models,
    Paths,
    chain,
    chain_mean,
    curve_losses,
    fit_bends,
    losses_along,
    midpoint,
    midpoint_rule,
)
from fedclade.core.functional_model import Objective
from fedclade.errors import InvalidInputError
from fedclade.models import MLP

many = settings(max_examples=50, deadline=None)
numbers = st.floats(-100, 100, width=32)
places = st.floats(0, 1, width=32)


def linear(params: Models, x: Tensor) -> Tensor:
    return x @ params["w"]


@st.composite
def stacks(draw: st.DrawFn, count: int) -> list[Models]:
    """Stacks of three linear models with four inputs and two outputs."""
    return [
        {"w": torch.from_numpy(draw(hnp.arrays("float32", (3, 4, 2), elements=numbers)))}
        for _ in range(count)
    ]


def mlps(count: int, spread: float = 0.3) -> tuple[Objective, Models, Tensor]:
    """An objective, some models around its parameters, and inputs."""
    torch.manual_seed(0)
    objective = Objective(MLP(8).build((6,), 3))
    models = {
        name: value + spread * torch.randn(count, *value.shape)
        for name, value in objective.params().items()
    }
    return objective, models, torch.rand(20, 6)


def close(a: Models, b: Models, tolerance: float = 1e-5) -> bool:
    return a.keys() == b.keys() and all(
        torch.allclose(a[name], b[name], rtol=1e-5, atol=tolerance) for name in a
    )


# the chain


def test_the_chain_of_a_number() -> None:
    a, bend, b = ({"w": torch.tensor([value])} for value in (2.0, 10.0, 4.0))
    # u = ⅛: 2 (⅛ · 10 + ⅜ · 2) = 4; u = ¾: 2 (¼ · 4 + ¼ · 10) = 7
    for u, expected in ((0.0, 2.0), (0.125, 4.0), (0.5, 10.0), (0.75, 7.0), (1.0, 4.0)):
        assert chain(a, bend, b, u)["w"].item() == pytest.approx(expected)
    assert chain_mean(a, bend, b)["w"].item() == pytest.approx((2 + 2 * 10 + 4) / 4)


@many
@given(stacks(3), places)
def test_the_printed_formula(models: list[Models], u: float) -> None:
    a, bend, b = (model["w"] for model in models)
    expected = 2 * (u * bend + (0.5 - u) * a) if u < 0.5 else 2 * ((u - 0.5) * b + (1 - u) * bend)
    assert torch.allclose(chain(*models, u)["w"], expected, atol=1e-3)


@many
@given(stacks(2), places)
def test_with_the_midpoint_as_bend_the_chain_is_straight(models: list[Models], u: float) -> None:
    a, b = models
    assert torch.allclose(
        chain(a, midpoint(a, b), b, u)["w"], (1 - u) * a["w"] + u * b["w"], atol=1e-4
    )


@many
@given(stacks(3))
def test_the_mean_is_that_of_many_points(models: list[Models]) -> None:
    # The chain is straight on both sides of ½, so the midpoint rule with an even number of parts is
    # exact.
    points = torch.stack([chain(*models, u)["w"] for u in midpoint_rule(10)])
    assert torch.allclose(chain_mean(*models)["w"], points.mean(0), atol=1e-3)


def test_points_are_symmetric_and_inside() -> None:
    for count in (1, 2, 5, 8):
        points = midpoint_rule(count)
        assert [1 - u for u in reversed(points)] == pytest.approx(points)
        assert 0 < min(points) <= max(points) < 1


# the loss


@many
@given(stacks(3), hnp.arrays("float32", (5, 4), elements=st.floats(0, 1, width=32)), places)
def test_a_bend_changes_only_the_distance_from_the_mean_of_the_ends(
    models: list[Models], inputs: np.ndarray, u: float
) -> None:
    x, (a, bend, b) = torch.from_numpy(inputs), models
    point, start, end = (x @ stack["w"] for stack in (chain(a, bend, b, u), a, b))
    expected = (point - (start + end) / 2).square().mean((1, 2)) + (start - end).square().mean(
        (1, 2)
    ) / 4
    assert torch.allclose(
        losses_along(linear, a, bend, b, x, [u])[0], expected, rtol=1e-3, atol=1e-2
    )


def test_at_the_ends_no_bend_matters() -> None:
    objective, models, x = mlps(4)
    a, b = (
        {name: value[part] for name, value in models.items()} for part in (slice(0, 2), slice(2, 4))
    )
    straight, far = midpoint(a, b), {name: value + 7 for name, value in a.items()}
    ends = losses_along(objective.outputs, a, straight, b, x, [0.0, 1.0])
    assert torch.allclose(ends, losses_along(objective.outputs, a, far, b, x, [0.0, 1.0]))
    assert torch.allclose(ends[0], ends[1])
    assert (losses_along(objective.outputs, a, far, b, x, [0.5]) > ends).all()


def test_a_path_has_no_direction() -> None:
    objective, models, x = mlps(2)
    forward, backward = (
        Paths(objective.outputs, {name: value[order] for name, value in models.items()}, x, 5)
        for order in ([0, 1], [1, 0])
    )
    assert forward.scores().item() == pytest.approx(backward.scores().item(), rel=1e-4)


# fitting


def test_fitting_lowers_the_loss_of_every_pair() -> None:
    objective, models, x = mlps(4)
    pairs = Paths(objective.outputs, models, x, 0).pairs
    a, b = ({name: value[end] for name, value in models.items()} for end in pairs.T)
    straight, bend = midpoint(a, b), fit_bends(objective.outputs, a, b, x, 50, 1e-2)
    linear, bent = (
        losses_along(objective.outputs, a, middle, b, x, midpoint_rule(8)).mean(0)
        for middle in (straight, bend)
    )
    assert (bent < 0.95 * linear).all()


def test_the_path_without_steps_is_straight() -> None:
    objective, models, x = mlps(2)
    a, b = ({name: value[[row]] for name, value in models.items()} for row in (0, 1))
    assert close(fit_bends(objective.outputs, a, b, x, 0), midpoint(a, b), 0)


def test_pairs_do_not_affect_each_other() -> None:
    objective, models, x = mlps(5)
    together = Paths(objective.outputs, models, x, 8)
    scores = together.scores()
    for number, pair in enumerate(together.pairs):
        alone = Paths(
            objective.outputs, {name: value[pair] for name, value in models.items()}, x, 8
        )
        assert alone.scores().item() == pytest.approx(scores[number].item(), rel=1e-4)
        assert close(alone.mean(torch.arange(2)), together.mean(pair))


@pytest.mark.parametrize(
    ("block_bytes", "cache_bytes"), [(1, 2**30), (1, 0), (2**30, 0), (30_000, 3_000)]
)
def test_neither_blocks_nor_the_cache_change_a_result(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int, cache_bytes: int
) -> None:
    objective, models, x = mlps(6)
    plain = Paths(objective.outputs, models, x, 8)
    scores, some = plain.scores(), torch.tensor([0, 2, 3, 5])
    monkeypatch.setattr(mode_connectivity, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(mode_connectivity, "CACHE_BYTES", cache_bytes)
    blocks, fit = [], mode_connectivity.fit_bends
    monkeypatch.setattr(
        mode_connectivity,
        "fit_bends",
        lambda *args: blocks.append(len(args[1]["fc1.bias"])) or fit(*args),
    )
    other = Paths(objective.outputs, models, x, 8)
    assert torch.allclose(other.scores(), scores, rtol=1e-5)
    assert sum(blocks) == 15
    assert max(blocks) == min(15, max(1, block_bytes // other.bytes_of_a_pair))
    assert close(other.mean(some), plain.mean(some))
    # Bends that were not cached were fitted again.
    assert (sum(blocks) == 15) == (cache_bytes == 2**30)


def test_bends_between_diverged_models_are_finite() -> None:
    objective, models, x = mlps(3)
    models = {
        name: value.clone().index_fill_(0, torch.tensor(1), 1e30) for name, value in models.items()
    }
    diverged = Paths(objective.outputs, models, x, 3)
    assert not diverged.scores().isfinite().all()
    assert diverged.cluster(100).tolist() == [0, 1, 0]
    assert all(value.isfinite().all() for value in diverged.mean(torch.arange(3)).values())
    assert Paths(
        objective.outputs, {name: value * 1e30 for name, value in models.items()}, x, 0
    ).cluster(100).tolist() == [0, 1, 2]


# clusters and their means


def on_a_line(*weights: float) -> Paths:
    """Models w x with x = 1, connected by straight paths."""
    return Paths(linear, {"w": torch.tensor(weights)[:, None, None]}, torch.ones(1, 1), 0)


def test_scores_of_a_linear_model_by_hand() -> None:
    # The loss at u is ½ (u² + (1 − u)²) (w_k − w_l)²; at u = 1/16, 3/16, …, 15/16 the mean of u² is
    # 680 / 8 / 256 = 85 / 256, and so is the mean of (1 − u)².
    assert on_a_line(0.0, 1.0, 3.0).scores().tolist() == pytest.approx(
        [85 / 256, 9 * 85 / 256, 4 * 85 / 256]
    )


def test_pairs_up_to_the_percentile_are_connected() -> None:
    # Squared distances of the six pairs of 0, 1, 3, 7: 1, 9, 49, 4, 36, 16; sorted 1, 4, 9, 16, 36,
    # 49.
    line = on_a_line(0.0, 1.0, 3.0, 7.0)
    assert line.cluster(0).tolist() == [0, 0, 1, 2]
    assert line.cluster(19).tolist() == [0, 0, 1, 2]  # below 4
    assert line.cluster(20).tolist() == [0, 0, 0, 1]  # 4 itself: place 1 of 0 … 5
    assert line.cluster(59).tolist() == [0, 0, 0, 1]
    assert line.cluster(60).tolist() == [0, 0, 0, 0]
    assert line.cluster(100).tolist() == [0, 0, 0, 0]


def test_clusters_are_numbered_by_first_appearance() -> None:
    assert on_a_line(5.0, 0.0, 5.5, 0.1, 5.2).cluster(35).tolist() == [0, 1, 0, 1, 0]


def test_equal_scores_give_one_cluster() -> None:
    assert on_a_line(2.0, 2.0, 2.0).cluster(5).tolist() == [0, 0, 0]


def test_a_single_model() -> None:
    line = on_a_line(2.0)
    assert (line.scores().tolist(), line.cluster(50).tolist()) == ([], [0])
    assert line.mean(torch.tensor([0]))["w"].item() == 2.0


@many
@given(stacks(1), st.lists(st.integers(0, 2), min_size=1, unique=True))
def test_the_mean_along_straight_paths_is_the_plain_mean(
    models: list[Models], members: list[int]
) -> None:
    rows = torch.tensor(members)
    mean = Paths(linear, models[0], torch.ones(1, 4), 0).mean(rows)["w"]
    assert torch.allclose(mean, models[0]["w"][rows].mean(0), rtol=1e-6, atol=1e-5)


def test_the_mean_of_a_cluster_uses_the_bends_of_all_its_pairs() -> None:
    objective, models, x = mlps(4)
    paths = Paths(objective.outputs, models, x, 6)
    paths.scores()
    inside = torch.tensor([[0, 1], [0, 3], [1, 3]])
    a, b = ({name: value[end] for name, value in models.items()} for end in inside.T)
    bend = fit_bends(objective.outputs, a, b, x, 6)
    expected = {name: value.mean(0) for name, value in chain_mean(a, bend, b).items()}
    mean = paths.mean(torch.tensor([0, 1, 3]))
    assert close(mean, expected)
    # The bends are not straight.
    assert not close(mean, {name: value[[0, 1, 3]].mean(0) for name, value in models.items()})


# curves


def modules() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    return tuple(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)) for _ in range(2)
    )  # type: ignore[return-value]


def test_curves_between_two_modules() -> None:
    a, b = modules()
    x = torch.rand(30, 6)
    curves = curve_losses(a, b, x, steps=200, points=5)
    assert curves.u.tolist() == [0, 0.25, 0.5, 0.75, 1]
    apart = (a.eval()(x) - b.eval()(x)).square().mean()
    for curve in (curves.linear, curves.bent):
        assert curve[[0, 4]].tolist() == pytest.approx([apart.item() / 2] * 2, rel=1e-5)
    assert (curves.bent[1:4] < curves.linear[1:4]).all()


def test_curves_do_not_change_the_modules() -> None:
    a, b = modules()
    before = [value.clone() for value in (*a.parameters(), *b.parameters())]
    curve_losses(a, b, torch.rand(3, 6), steps=2, points=2)
    after = [*a.parameters(), *b.parameters()]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert a.training
    assert all(value.grad is None and value.requires_grad for value in after)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"model_b": nn.Linear(6, 3)}, "model_b"),
        ({"steps": -1}, "steps"),
        ({"points": 1}, "points"),
    ],
)
def test_curves_need_modules_of_one_architecture_and_valid_numbers(
    arguments: dict[str, Any], field: str
) -> None:
    a, b = modules()
    with pytest.raises(InvalidInputError, check=lambda error: error.field == field):
        curve_losses(**{"model_a": a, "model_b": b, "inputs": torch.rand(3, 6), **arguments})
