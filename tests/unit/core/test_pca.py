"""Principal axes, by hand and against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

from fedclade.core import pca
from fedclade.core.pca import principal_axes


def test_axes_by_hand() -> None:
    """Four points on the long axis (3, -4) / 5 and the short one (4, 3) / 5 around (1, 2)."""
    long, short = torch.tensor([3.0, -4.0]) / 5, torch.tensor([4.0, 3.0]) / 5
    x = torch.tensor([1.0, 2.0]) + torch.stack([10 * long, -10 * long, short, -short])
    mean, axes, values = principal_axes(x, 3)
    torch.testing.assert_close(mean, torch.tensor([1.0, 2.0]).double())
    expected = torch.stack([-long, short, torch.zeros(2)])  # the largest loading is positive
    torch.testing.assert_close(axes, expected.double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(values, torch.tensor([200.0, 2.0, 0.0]).double().sqrt())


@pytest.mark.parametrize("products_from", [10**6, 1])
@pytest.mark.parametrize("shape", [(50, 6), (6, 50)])
def test_axes_are_those_of_scikit_learn(
    shape: tuple[int, int], products_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pca, "PRODUCTS_FROM", products_from)
    x = np.random.default_rng(0).normal(size=shape) * np.arange(1, shape[1] + 1) + 7
    fitted = PCA(4, svd_solver="full").fit(x)
    mean, axes, values = principal_axes(torch.from_numpy(x), 4)
    np.testing.assert_allclose(mean, fitted.mean_)
    np.testing.assert_allclose(values, fitted.singular_values_)
    sign = np.sign((axes.numpy() * fitted.components_).sum(1, keepdims=True))
    np.testing.assert_allclose(axes, sign * fitted.components_, atol=1e-9)


def test_projections_have_the_singular_values_as_norms() -> None:
    x = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    fitted = principal_axes(x, 3)
    torch.testing.assert_close(fitted.project(x).norm(dim=0), fitted.singular_values)
