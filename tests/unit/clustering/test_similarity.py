"""Cosine similarity, CFL's bipartition and the separation gap, FLIS's predictions and clusters,
against loops and all bipartitions.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform
from torch import Tensor

from fedclade.clustering import similarity as room
from fedclade.clustering.similarity import (
    bipartition,
    cluster_centroids,
    cluster_predictions,
    cosine,
    nearest_cluster,
    predictions,
    separation_gap,
    similarity_graph,
)
from fedclade.errors import InvalidInputError

Floats = NDArray[np.float64]


@st.composite
def similarities(draw: st.DrawFn, least: int = 2, most: int = 8, ties: bool = True) -> Floats:
    clients, seed = draw(st.integers(least, most)), draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    coarse = ties and draw(st.booleans())
    upper = np.triu(
        (
            rng.integers(-2, 3, (clients, clients)) / 2
            if coarse
            else rng.uniform(-1, 1, (clients, clients))
        ),
        1,
    )
    return np.asarray(upper + upper.T + np.eye(clients))


# --- cosine


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.float64]),
    st.data(),
)
def test_cosine_is_that_of_each_pair(
    clients: int, parameters: int, seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    updates = torch.randn(
        clients, parameters, generator=torch.Generator().manual_seed(seed), dtype=dtype
    )
    updates *= torch.tensor(
        data.draw(
            st.lists(st.sampled_from([0.0, 1e-30, 1.0, 1e30]), min_size=clients, max_size=clients)
        )
    )[:, None]
    got = cosine(updates)
    assert got.dtype == torch.float64
    for i, j in np.ndindex(clients, clients):
        a, b = updates[i].double(), updates[j].double()
        norms = float(a.norm() * b.norm())
        expected = 1.0 if i == j else float(a @ b) / norms if norms > 0 else 0.0
        assert float(got[i, j]) == pytest.approx(expected, abs=1e-12)
    assert torch.equal(got, got.T)
    assert bool((got.diagonal() == 1).all())
    assert float(got.abs().max()) <= 1


def test_cosine_by_slabs_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = torch.randn(5, 103, generator=torch.Generator().manual_seed(0))
    whole = cosine(updates)
    monkeypatch.setattr(room, "SLAB", 50)  # ten parameters of five clients
    torch.testing.assert_close(cosine(updates), whole, rtol=0, atol=1e-14)
    monkeypatch.setattr(room, "SLAB", 1)
    torch.testing.assert_close(cosine(updates), whole, rtol=0, atol=1e-14)


def test_cosine_by_hand() -> None:
    updates = torch.tensor([[3.0, 4.0], [4.0, 3.0], [0.0, 0.0], [-3.0, -4.0]])
    expected = [[1, 0.96, 0, -1], [0.96, 1, 0, -0.96], [0, 0, 1, 0], [-1, -0.96, 0, 1]]
    torch.testing.assert_close(cosine(updates), torch.tensor(expected, dtype=torch.float64))


def test_cosine_of_updates_too_small_to_square() -> None:
    tiny = torch.tensor([[3e-200, 4e-200], [4e200, 3e200]], dtype=torch.float64)
    assert float(cosine(tiny)[0, 1]) == pytest.approx(0.96)


@pytest.mark.parametrize(
    "updates",
    [
        torch.zeros(3),
        torch.zeros(0, 3),
        torch.tensor([[1.0, float("nan")]]),
        torch.tensor([[float("inf")]]),
    ],
)
def test_cosine_refuses(updates: Tensor) -> None:
    with pytest.raises(InvalidInputError, match="updates"):
        cosine(updates)


# --- bipartition


def cross(similarity: Floats, side: NDArray[np.bool_]) -> float:
    return max(
        float(similarity[i, j]) for i, j in product(np.flatnonzero(side), np.flatnonzero(~side))
    )


@settings(max_examples=150, deadline=None)
@given(similarities())
def test_single_is_the_best_of_all_bipartitions(similarity: Floats) -> None:
    side, most = bipartition(similarity)
    sides = [
        np.array([False, *rest])
        for rest in product([False, True], repeat=len(similarity) - 1)
        if any(rest)
    ]
    assert most == min(cross(similarity, other) for other in sides)
    assert most == cross(similarity, side)
    assert side.dtype == bool
    assert not side[0]


@settings(max_examples=30, deadline=None)
@given(similarities(least=20, most=60, ties=False))
def test_single_is_single_linkage_at_two(similarity: Floats) -> None:
    tree = linkage(squareform(1 - similarity, checks=False), "single")
    side, most = bipartition(similarity)
    assert most == pytest.approx(1 - tree[-1, 2])
    low = {*_leaves(tree, int(tree[-1, 0]))}
    assert set(np.flatnonzero(side).tolist()) in (low, set(range(len(side))) - low)


def _leaves(tree: Floats, node: int) -> list[int]:
    clients = len(tree) + 1
    return (
        [node]
        if node < clients
        else [leaf for part in tree[node - clients, :2] for leaf in _leaves(tree, int(part))]
    )


@settings(max_examples=80, deadline=None)
@given(similarities(ties=False))
def test_complete_joins_the_clusters_whose_least_similarity_is_greatest(similarity: Floats) -> None:
    clusters = [[i] for i in range(len(similarity))]
    while len(clusters) > 2:
        pairs = [(a, b) for a in range(len(clusters)) for b in range(a)]
        a, b = max(
            pairs,
            key=lambda p: min(similarity[i, j] for i in clusters[p[0]] for j in clusters[p[1]]),
        )
        clusters[b] += clusters.pop(a)
    side, most = bipartition(similarity, "complete")
    assert set(np.flatnonzero(~side).tolist()) == set(next(c for c in clusters if 0 in c))
    assert most == cross(similarity, side)


@pytest.mark.parametrize("linkage_", ["single", "complete"])
def test_two_planted_groups(linkage_: Any) -> None:
    group = np.random.default_rng(0).permutation(np.arange(30) % 2)
    noise = np.random.default_rng(1).uniform(-0.1, 0.1, (30, 30))
    similarity = np.where(group[:, None] == group, 0.7, 0.2) + (noise + noise.T)
    side, most = bipartition(similarity, linkage_)
    assert np.array_equal(side, group != group[0])
    assert most == similarity[group == 0][:, group == 1].max()


def test_single_follows_a_chain_where_complete_does_not() -> None:
    place = np.array([0, 1, 2.1, 3.3, 4.6, 6.1])
    similarity = -np.abs(place[:, None] - place)
    side, most = bipartition(similarity)
    assert side.tolist() == [False] * 5 + [True]
    assert most == pytest.approx(-1.5)
    side, most = bipartition(similarity, "complete")
    assert side.tolist() == [False] * 4 + [True] * 2
    assert most == pytest.approx(-1.3)


@pytest.mark.parametrize("linkage_", ["single", "complete"])
def test_equal_similarities_are_split_all_the_same(linkage_: Any) -> None:
    side, most = bipartition(np.full((4, 4), 0.5), linkage_)
    assert 0 < side.sum() < 4
    assert most == 0.5


@pytest.mark.parametrize(
    ("similarity", "linkage_", "message"),
    [
        (np.ones((1, 1)), "single", "at least two"),
        (np.ones((2, 3)), "single", "shape"),
        (np.array([[1, np.nan], [np.nan, 1]]), "single", "finite"),
        (np.array([[1, 0.5], [0.4, 1]]), "single", "symmetric"),
        (np.ones((2, 2)), "ward", "linkage = 'ward'"),
    ],
)
def test_bipartition_refuses(similarity: Floats, linkage_: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        bipartition(similarity, linkage_)


# --- separation gap


@settings(max_examples=100, deadline=None)
@given(similarities(least=1), st.data())
def test_gap_is_that_of_a_loop_over_pairs(similarity: Floats, data: st.DataObject) -> None:
    groups = data.draw(
        st.lists(st.integers(0, 2), min_size=len(similarity), max_size=len(similarity))
    )
    inside, across = [1.0], [-1.0]
    for i, j in product(range(len(groups)), repeat=2):
        if i != j:
            (inside if groups[i] == groups[j] else across).append(float(similarity[i, j]))
    assert separation_gap(similarity, np.array(groups)) == min(inside) - max(across)


def test_gap_by_hand() -> None:
    similarity = np.array([[1, 0.8, 0.1], [0.8, 1, 0.3], [0.1, 0.3, 1]])
    assert separation_gap(similarity, np.array([0, 0, 1])) == pytest.approx(0.5)
    assert separation_gap(similarity, np.array([0, 1, 1])) == pytest.approx(-0.5)
    assert separation_gap(similarity, np.array([0, 0, 0])) == pytest.approx(1.1)  # nothing across
    assert separation_gap(similarity, np.array([0, 1, 2])) == pytest.approx(0.2)  # nothing inside


def test_a_gap_above_zero_keeps_the_bipartition_inside_groups() -> None:
    """CFL's guarantee: with g(α) > 0 no group is on both sides."""
    rng = np.random.default_rng(3)
    group = rng.integers(0, 4, 25)
    base = rng.uniform(-0.2, 0.2, (25, 25))
    similarity = np.where(group[:, None] == group, 0.6, 0.1) + base + base.T
    similarity = np.where(
        group[:, None] == group, np.maximum(similarity, 0.6), np.minimum(similarity, 0.5)
    )
    assert separation_gap(similarity, group) > 0
    side, _ = bipartition(similarity)
    assert not set(group[side]) & set(group[~side])


def test_gap_refuses() -> None:
    with pytest.raises(InvalidInputError, match=r"groups\.shape"):
        separation_gap(np.ones((3, 3)), np.array([0, 1]))


# --- predictions


def linear(model: dict[str, Tensor], x: Tensor) -> Tensor:
    return x @ model["weight"].T + model["bias"]


def some_models(count: int, classes: int = 3, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(count, classes, 2, generator=generator),
        "bias": torch.randn(count, classes, generator=generator),
    }


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(2, 4),
    st.integers(0, 10**6),
    st.sampled_from(["onehot", "soft"]),
)
def test_predictions_are_those_of_each_model(
    count: int, samples: int, classes: int, seed: int, labels: Literal["onehot", "soft"]
) -> None:
    models, x = (
        some_models(count, classes, seed),
        torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed)),
    )
    got = predictions(linear, models, x, labels).view(count, samples, classes)
    for place in range(count):
        outputs = linear({name: value[place] for name, value in models.items()}, x)
        assert torch.equal(got[place].argmax(1), outputs.argmax(1))
        expected = (
            outputs.softmax(1)
            if labels == "soft"
            else F.one_hot(outputs.argmax(1), classes).float()
        )
        torch.testing.assert_close(got[place], expected)


@pytest.mark.parametrize("labels", ["onehot", "soft"])
def test_predictions_in_blocks_of_models_and_samples(
    labels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, x = some_models(7), torch.randn(11, 2, generator=torch.Generator().manual_seed(1))
    whole, seen = predictions(linear, models, x, labels), []

    def spy(model: dict[str, Tensor], x: Tensor) -> Tensor:
        seen.append(len(x))
        return linear(model, x)

    monkeypatch.setattr(room, "MODELS", 2)
    monkeypatch.setattr(room, "SAMPLES", 4)
    torch.testing.assert_close(predictions(spy, models, x, labels), whole)
    assert seen == [4, 4, 3] * 4  # 2, 2, 2 and 1 models


def test_a_model_that_overflows_predicts_something_all_the_same() -> None:
    models = {"weight": torch.tensor([[[3e38, 0.0], [3e38, 3e38]]]), "bias": torch.zeros(1, 2)}
    for labels in ("onehot", "soft"):
        got = predictions(linear, models, torch.tensor([[3.0, -3.0]]), labels)
        assert bool(got.isfinite().all())  # outputs are infinity, and infinity − infinity
        assert float(got.sum()) == pytest.approx(1)


@pytest.mark.parametrize(
    "outputs",
    [lambda m, x: x[:, :1], lambda m, x: x[:, 0], lambda m, x: x[:, :, None].expand(-1, -1, 2)],
)
def test_predictions_are_of_classes(outputs: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"shape of its outputs = \(5.*two classes or more"):
        predictions(
            lambda m, x: outputs(m, x) + 0 * m["bias"][0],
            some_models(3),
            torch.ones(5, 2),
            "onehot",
        )


def some_predictions(
    clients: int, samples: int, seed: int, classes: int = 3
) -> tuple[Tensor, Tensor]:
    """Classes, of which neighbours share many, and one-hot rows."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(0, classes, (2, samples), generator=generator)
    noise = torch.randint(0, classes, (clients, samples), generator=generator)
    told = torch.where(
        torch.rand(clients, samples, generator=generator) < 0.5,
        base[torch.arange(clients) % 2],
        noise,
    )
    return told, F.one_hot(told, classes).flatten(1).float()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3000), st.integers(0, 10**6), st.data())
def test_alike_is_the_share_of_equal_predictions(
    clients: int, samples: int, seed: int, data: st.DataObject
) -> None:
    told, rows = some_predictions(clients, samples, seed)
    share = (told[:, None] == told).double().mean(2)
    equal = (told[:, None] == told).sum(2)
    assert torch.equal(cosine(rows), equal.double() / samples)  # to the last digit
    counted = data.draw(st.integers(0, samples))
    assert torch.equal(
        similarity_graph(rows, counted / samples), equal >= counted
    )  # a share of β itself counts
    beta = data.draw(st.floats(0, 1))
    if bool(((share - beta).abs() > 1e-8).all()):
        assert torch.equal(similarity_graph(rows, beta), share >= beta)


def test_equal_soft_predictions_are_alike_at_one() -> None:
    soft = torch.rand(3, 997, generator=torch.Generator().manual_seed(0)).repeat(4, 1)
    assert torch.equal(
        similarity_graph(soft, 1.0), (torch.arange(12) % 3)[:, None] == torch.arange(12) % 3
    )


MEASURE: dict[str, Callable[[list[float]], Any]] = {
    "average": np.mean,
    "single": np.max,
    "complete": np.min,
}


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(0, 10**6), st.sampled_from([*MEASURE]), st.floats(0.01, 0.99))
def test_clusters_are_joined_while_they_are_alike(
    clients: int, seed: int, linkage_: Any, beta: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(clients, 40, generator=generator) ** 4  # no two similarities are equal
    similarity, groups = cosine(rows).numpy(), [[i] for i in range(clients)]
    while len(groups) > 1:
        pairs = [(a, b) for a in range(len(groups)) for b in range(a)]
        score = {
            (a, b): MEASURE[linkage_]([similarity[i, j] for i in groups[a] for j in groups[b]])
            for a, b in pairs
        }
        a, b = max(pairs, key=score.__getitem__)
        if score[a, b] < beta:
            break
        groups[b] += groups.pop(a)
    got = cluster_predictions(rows, beta, linkage_)
    assert sorted(map(sorted, groups)) == [
        torch.nonzero(got == c).flatten().tolist() for c in range(len(groups))
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 10), st.integers(1, 5), st.integers(0, 10**6), st.booleans())
def test_most_alike_is_the_cluster_of_the_highest_mean_similarity(
    clients: int, late: int, seed: int, soft: bool
) -> None:
    _, rows = some_predictions(clients + late, 50, seed)
    if soft:
        rows = rows + torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed))
    cluster = torch.arange(clients) % 2
    similarity = cosine(rows)[clients:, :clients]
    scores = torch.stack([similarity[:, cluster == c].mean(1) for c in range(2)], 1)
    got = nearest_cluster(rows[clients:], cluster_centroids(rows[:clients], cluster))
    for place in range(late):
        assert float(scores[place, got[place]]) == pytest.approx(
            float(scores[place].max()), abs=1e-6
        )
