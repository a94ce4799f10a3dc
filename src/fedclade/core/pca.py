"""Principal component analysis with deterministic signs."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# From this many samples on, the axes come from the d × d matrix of products: the same up to
# rounding, in a thirtieth of the time.
PRODUCTS_FROM = 10_000


class PrincipalAxes(NamedTuple):
    """The first axes of some samples, in float64 on the CPU, in order of decreasing variance."""

    mean: Tensor  # (d,)
    axes: Tensor  # (components, d) unit vectors; zeros beyond min(n, d)
    singular_values: Tensor  # (components,) of the centered samples

    def project(self, x: Tensor) -> Tensor:
        """(n, d) -> (n, components)."""
        return (x.to(self.mean) - self.mean) @ self.axes.T


def principal_axes(x: Tensor, components: int) -> PrincipalAxes:
    """PCA of the samples x (n, d). The sign of an axis makes its largest loading positive."""
    x = x.cpu().double()
    mean = x.mean(0)
    values, axes = _singular(x - mean)
    values, axes = values[:components], axes[:components]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    missing = components - len(values)
    return PrincipalAxes(
        mean, F.pad(axes * largest.sign(), (0, 0, 0, missing)), F.pad(values, (0, missing))
    )


def _singular(centered: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values in decreasing order, and the right singular vectors in rows."""
    samples, dimensions = centered.shape
    if samples < PRODUCTS_FROM or samples < dimensions:
        _, values, axes = torch.linalg.svd(centered, full_matrices=False)
        return values, axes
    squares, vectors = torch.linalg.eigh(centered.T @ centered)
    return squares.clamp_min(0).sqrt().flip(0), vectors.T.flip(0)
