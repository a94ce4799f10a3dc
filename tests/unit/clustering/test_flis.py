"""FLIS's predictions and clusters, against loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedclade.clustering import flis
from fedclade.clustering.cosine import cosine
from fedclade.clustering.flis import (
    cluster_centroids,
    cluster_predictions,
    nearest_cluster,
    predictions,
    similarity_graph,
)
from fedclade.errors import InvalidInputError


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
    predicted = predictions(linear, models, x, labels).view(count, samples, classes)
    for place in range(count):
        outputs = linear({name: value[place] for name, value in models.items()}, x)
        assert torch.equal(predicted[place].argmax(1), outputs.argmax(1))
        expected = (
            outputs.softmax(1)
            if labels == "soft"
            else F.one_hot(outputs.argmax(1), classes).float()
        )
        torch.testing.assert_close(predicted[place], expected)


@pytest.mark.parametrize("labels", ["onehot", "soft"])
def test_predictions_in_blocks_of_models_and_samples(
    labels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, x = some_models(7), torch.randn(11, 2, generator=torch.Generator().manual_seed(1))
    whole, sizes = predictions(linear, models, x, labels), []

    def spy(model: dict[str, Tensor], x: Tensor) -> Tensor:
        sizes.append(len(x))
        return linear(model, x)

    monkeypatch.setattr(flis, "MODELS_PER_CHUNK", 2)
    monkeypatch.setattr(flis, "SAMPLES_PER_CHUNK", 4)
    torch.testing.assert_close(predictions(spy, models, x, labels), whole)
    assert sizes == [4, 4, 3] * 4  # 2, 2, 2 and 1 models


def test_a_model_that_overflows_has_finite_predictions() -> None:
    models = {"weight": torch.tensor([[[3e38, 0.0], [3e38, 3e38]]]), "bias": torch.zeros(1, 2)}
    for labels in ("onehot", "soft"):
        predicted = predictions(linear, models, torch.tensor([[3.0, -3.0]]), labels)
        assert bool(predicted.isfinite().all())  # outputs are infinity, and infinity − infinity
        assert float(predicted.sum()) == pytest.approx(1)


@pytest.mark.parametrize(
    "outputs",
    [lambda m, x: x[:, :1], lambda m, x: x[:, 0], lambda m, x: x[:, :, None].expand(-1, -1, 2)],
)
def test_outputs_without_two_classes_are_refused(outputs: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"\(5,") as caught:
        predictions(
            lambda m, x: outputs(m, x) + 0 * m["bias"][0],
            some_models(3),
            torch.ones(5, 2),
            "onehot",
        )
    assert caught.value.field == "model.outputs"


def some_predictions(
    clients: int, samples: int, seed: int, classes: int = 3
) -> tuple[Tensor, Tensor]:
    """Predicted classes, of which every second client shares many, and their one-hot rows."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randint(0, classes, (2, samples), generator=generator)
    noise = torch.randint(0, classes, (clients, samples), generator=generator)
    classes_of = torch.where(
        torch.rand(clients, samples, generator=generator) < 0.5,
        base[torch.arange(clients) % 2],
        noise,
    )
    return classes_of, F.one_hot(classes_of, classes).flatten(1).float()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 3000), st.integers(0, 10**6), st.data())
def test_similarity_is_the_share_of_equal_predictions(
    clients: int, samples: int, seed: int, data: st.DataObject
) -> None:
    predicted, rows = some_predictions(clients, samples, seed)
    share = (predicted[:, None] == predicted).double().mean(2)
    equal = (predicted[:, None] == predicted).sum(2)
    assert torch.equal(cosine(rows), equal.double() / samples)  # exactly
    count = data.draw(st.integers(0, samples))
    # A share of exactly β counts.
    assert torch.equal(similarity_graph(rows, count / samples), equal >= count)
    beta = data.draw(st.floats(0, 1))
    if bool(((share - beta).abs() > 1e-8).all()):
        assert torch.equal(similarity_graph(rows, beta), share >= beta)


def test_equal_soft_predictions_are_related_at_beta_one() -> None:
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
def test_clusters_are_merged_while_their_similarity_is_at_least_beta(
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
    labels = cluster_predictions(rows, beta, linkage_)
    assert sorted(map(sorted, groups)) == [
        torch.nonzero(labels == c).flatten().tolist() for c in range(len(groups))
    ]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 10), st.integers(1, 5), st.integers(0, 10**6), st.booleans())
def test_the_nearest_cluster_has_the_highest_mean_similarity(
    clients: int, late: int, seed: int, soft: bool
) -> None:
    _, rows = some_predictions(clients + late, 50, seed)
    if soft:
        rows = rows + torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed))
    cluster = torch.arange(clients) % 2
    similarity = cosine(rows)[clients:, :clients]
    scores = torch.stack([similarity[:, cluster == c].mean(1) for c in range(2)], 1)
    labels = nearest_cluster(rows[clients:], cluster_centroids(rows[:clients], cluster))
    for place in range(late):
        assert float(scores[place, labels[place]]) == pytest.approx(
            float(scores[place].max()), abs=1e-6
        )
