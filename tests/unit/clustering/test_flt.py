"""FLT's clustering: the 2-D embedding, its fallback to PCA, and related clients."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedclade.clustering import flt
from fedclade.clustering.flt import (
    Manifold,
    cluster_signatures,
    embed,
    embed_centers,
    mixing_matrix,
    nearest_signature,
    pca,
)
from fedclade.clustering.set_distances import distances
from fedclade.core import pca as pca_module
from fedclade.errors import FedcladeWarning, InvalidInputError


def blobs(groups: int, size: int, dimensions: int = 8, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.repeat(20 * rng.normal(size=(groups, dimensions)), size, 0) + rng.normal(
        size=(groups * size, dimensions)
    )


def with_umap(monkeypatch: pytest.MonkeyPatch, fit: Any) -> None:
    """A stand-in for the package umap: the real one compiles for many seconds."""
    module = ModuleType("umap")
    module.UMAP = lambda **_: SimpleNamespace(fit_transform=fit)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "umap", module)


def test_pca_keeps_the_distances_of_points_in_a_plane() -> None:
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(9, 2)))[0]
    points = rng.normal(size=(30, 2)) @ axes.T + 5
    embedded = pca(points)
    apart = [np.linalg.norm(x[:, None] - x[None], axis=-1) for x in (points, embedded)]
    np.testing.assert_allclose(apart[1], apart[0], atol=1e-9)
    assert embedded[:, 0].var() >= embedded[:, 1].var()


def test_pca_has_one_sign() -> None:
    points = blobs(3, 5)
    turned = pca(-points)
    np.testing.assert_allclose(turned, -pca(points), atol=1e-9)
    loadings = np.linalg.lstsq(points - points.mean(0), pca(points), rcond=None)[0]
    assert (loadings[np.abs(loadings).argmax(0), [0, 1]] > 0).all()


def test_pca_of_many_points_is_that_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    points = blobs(5, 40, dimensions=30).astype(np.float32)
    few = pca(points)
    monkeypatch.setattr(pca_module, "PRODUCTS_FROM", 1)
    np.testing.assert_allclose(pca(points), few, atol=1e-9)
    np.testing.assert_allclose(
        pca(points[:, :1]),
        np.pad(points[:, :1] - points[:, :1].mean(dtype=float), ((0, 0), (0, 1))),
        atol=1e-9,
    )


@pytest.mark.parametrize("shape", [(1, 5), (2, 5), (4, 1), (3, 2)])
def test_pca_of_few_points_or_dimensions_is_padded(shape: tuple[int, int]) -> None:
    embedded = pca(np.random.default_rng(0).normal(size=shape))
    assert embedded.shape == (shape[0], 2)
    assert np.isfinite(embedded).all()


def test_none_leaves_points_as_they_are() -> None:
    points = blobs(2, 3)
    assert embed(points, "none") is points


def pca_with_warning(points: np.ndarray) -> str:
    """Check that `embed` uses PCA and warns about the manifold. Returns the warning."""
    with pytest.warns(FedcladeWarning) as caught:
        np.testing.assert_array_equal(embed(points), pca(points))
    (warning,) = (record.message for record in caught)
    assert isinstance(warning, FedcladeWarning)
    assert warning.field == "manifold"
    assert "PCA" in str(warning)
    return str(warning)


def test_too_few_points_for_umap_are_embedded_by_pca_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "umap", None)  # it is not imported
    assert "30 points" in pca_with_warning(blobs(2, 15))


@pytest.mark.parametrize(
    "error",
    [TypeError("k must be less than n"), np.linalg.LinAlgError("singular"), RuntimeError("ARPACK")],
)
def test_if_umap_fails_pca_is_used_and_the_warning_has_the_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fit(points: np.ndarray) -> np.ndarray:
        raise error

    with_umap(monkeypatch, fit)
    warning = pca_with_warning(blobs(2, 20))
    assert type(error).__name__ in warning
    assert str(error) in warning


def test_if_coordinates_are_not_finite_pca_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fit(points: np.ndarray) -> np.ndarray:
        embedded = points[:, :2].copy()
        embedded[[3, 7], 1] = np.nan
        return embedded

    with_umap(monkeypatch, fit)
    assert "2 of 40 points" in pca_with_warning(blobs(2, 20))


def test_the_error_without_umap_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(InvalidInputError, match="pip install umap-learn") as caught:
        embed(blobs(2, 20))
    assert caught.value.field == "manifold"


def test_umap_gives_the_same_embedding_for_the_same_seed_and_separates_distant_groups() -> None:
    """The neighbor graph of four blobs has four components. That is no reason to use PCA."""
    points = blobs(4, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        embedded, again, other = (embed(points, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(embedded, again)
    assert not np.array_equal(embedded, other)
    apart = np.linalg.norm(embedded[:, None] - embedded[None], axis=-1)
    same = np.repeat(np.arange(4), 20)[:, None] == np.repeat(np.arange(4), 20)
    assert apart[same].max() < apart[~same].min()


@pytest.mark.parametrize("kind", ["umap", "pca"])
def test_the_embedding_has_u_dimensions(kind: Manifold) -> None:
    points = np.random.default_rng(0).normal(size=(40, 6))
    assert embed(points, kind, dim=3).shape == (40, 3)
    # The third axis is used: the distances in three dimensions are not those of the first two.
    assert embed(points, kind, dim=3)[:, 2].std() > 0.1


def test_padding_is_not_embedded(monkeypatch: pytest.MonkeyPatch) -> None:
    centers = np.arange(24.0).reshape(3, 4, 2)
    counts = np.array([1, 4, 2])
    calls = []
    monkeypatch.setattr(flt, "embed", lambda points, *_: calls.append(points) or points + 100)
    points = embed_centers(centers, counts, "umap", 0)
    assert len(calls[0]) == 7
    for client, count in enumerate(counts):
        np.testing.assert_array_equal(points[client, :count], centers[client, :count] + 100)
        assert (points[client, count:] == 0).all()


def lines(*positions: float) -> tuple[np.ndarray, np.ndarray]:
    """One center for each client, on a line."""
    return np.array(positions)[:, None, None], np.ones(len(positions), dtype=np.int64)


def test_clients_strictly_closer_than_gamma_are_related() -> None:
    centers, counts = lines(0.0, 1.0, 1.9, 5.0)
    groups, related = cluster_signatures(
        centers, counts, "none", "matching", "threshold", 1.0, None, 0
    )
    assert related is not None
    assert related.toarray().astype(int).tolist() == [
        [1, 0, 0, 0],
        [0, 1, 1, 0],
        [0, 1, 1, 0],
        [0, 0, 0, 1],
    ]
    assert groups.tolist() == [0, 1, 1, 2]


def test_groups_by_gap_and_by_number_have_no_graph() -> None:
    centers, counts = lines(0.0, 0.2, 7.0, 7.1, 14.0)
    assert cluster_signatures(centers, counts, "none", "matching", "gap", 1.0, None, 0)[
        0
    ].tolist() == [
        0,
        0,
        1,
        1,
        2,
    ]
    groups, related = cluster_signatures(
        centers, counts, "none", "matching", "threshold", 1.0, 2, 0
    )
    assert (len(set(groups.tolist())), related) == (2, None)
    assert cluster_signatures(centers, counts, "none", "matching", "threshold", 1.0, 99, 0)[
        0
    ].tolist() == [
        0,
        1,
        2,
        3,
        4,
    ]


def test_the_rows_of_a_chain_are_three() -> None:
    """0 is related to 1 and 1 to 2, but 0 not to 2: one component, three rows."""
    centers, counts = lines(0.0, 0.9, 1.8)
    groups, related = cluster_signatures(
        centers, counts, "none", "matching", "threshold", 1.0, None, 0
    )
    rows, row = mixing_matrix(groups, related)
    assert groups.tolist() == [0, 0, 0]
    assert rows[row].int().tolist() == [[1, 1, 0], [1, 1, 1], [0, 1, 1]]
    rows, row = mixing_matrix(groups, None)
    assert (rows.int().tolist(), row.tolist()) == ([[1, 1, 1]], [0, 0, 0])


def test_clients_that_share_a_row_share_a_model() -> None:
    centers, counts = lines(*[0.0] * 4, *[9.0] * 3)
    rows, row = mixing_matrix(
        *cluster_signatures(centers, counts, "none", "matching", "threshold", 1.0, None, 0)
    )
    assert len(rows) == 2
    assert torch.equal(rows[row], row[:, None] == row)


@pytest.mark.parametrize("kind", ["matching", "min", "chamfer"])
@pytest.mark.parametrize(("new", "known"), [(1, 1), (2, 130), (70, 65), (3, 600)])
def test_the_nearest_signature_has_the_least_of_all_distances(
    kind: Any, new: int, known: int
) -> None:
    rng = np.random.default_rng(new)
    centers = rng.normal(size=(new + known, 3, 4))
    counts = rng.integers(1, 4, size=new + known)
    expected = distances(centers, counts, kind)[:new, new:].argmin(1)
    np.testing.assert_array_equal(
        nearest_signature(centers[:new], counts[:new], centers[new:], counts[new:], kind), expected
    )


def test_the_first_of_equally_near_signatures_is_returned() -> None:
    centers, counts = lines(0.0)
    known, known_counts = lines(*[2.0] * 300, *[1.0] * 300)  # in several blocks
    assert nearest_signature(centers, counts, known, known_counts, "min").tolist() == [300]


@pytest.mark.parametrize("seed", range(5))
def test_groups_without_the_graph_are_the_components_of_the_graph(seed: int) -> None:
    rng = np.random.default_rng(seed)
    centers, counts = rng.normal(size=(60, 3, 2)) * 3, rng.integers(1, 4, 60)
    options = ("none", "min", "threshold", 0.4, None, 0)
    with_graph, related = cluster_signatures(centers, counts, *options)
    without, nothing = cluster_signatures(centers, counts, *options, graph=False)
    assert related is not None
    assert nothing is None
    assert 1 < len(np.unique(with_graph)) < 60
    assert without.tolist() == with_graph.tolist()


def test_umap_leaves_torchs_threads_as_they_were() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        embed(np.random.default_rng(0).normal(size=(40, 3)), "umap")
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
