"""Robust means of models: coordinate-wise median, trimmed mean, clipped mean.

Yin et al., Byzantine-Robust Distributed Learning, ICML 2018 (median and trimmed mean of each
coordinate); Karimireddy et al., Learning from History for Byzantine Robust Optimization, ICML 2021
(clipping around a center).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.core.federation import Aggregator
from fedclade.core.packed_tree import packed

TRIMMED_SHARE = 0.2  # the share of the models that is trimmed at each end


def robust_sums(
    aggregator: Aggregator, contributions: Tensor, models: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The sums that replace Σ_k contributions_kr model_k for each row r: the robust mean of the
    models with a positive weight in r, times the total weight of r.

    All models with a positive weight count equally, except in "clipped_mean".

    Args:
        aggregator: the robust mean.
        contributions: (K, rows) the weight of each model in each row.
        models: (K, …) the models.

    Returns:
        (rows, …) the sums in float64.
    """
    vectors = _vectors(models)
    sums = vectors.new_zeros(contributions.shape[1], vectors.shape[1])
    for row, weight in enumerate(contributions.T.to(vectors.device)):
        members = torch.nonzero(weight > 0).flatten()
        if len(members):
            mean = _robust_mean(aggregator, vectors[members], weight[members].double())
            sums[row] = mean * weight.sum()
    sizes = [value[0].numel() for value in models.values()]
    parts = zip(models.items(), torch.split(sums, sizes, 1), strict=True)
    return {name: part.reshape(len(sums), *value.shape[1:]) for (name, value), part in parts}


def _vectors(models: dict[str, Tensor]) -> Tensor:
    """The models as rows (K, P) in float64."""
    buffer = packed(models)
    return (
        buffer
        if buffer is not None
        else torch.cat([value.reshape(len(value), -1) for value in models.values()], 1)
    ).double()


def _robust_mean(aggregator: Aggregator, vectors: Tensor, weight: Tensor) -> Tensor:
    if aggregator == "median":
        return _median(vectors)
    if aggregator == "trimmed_mean":
        cut = int(TRIMMED_SHARE * len(vectors))
        return vectors.sort(0).values[cut : len(vectors) - cut].mean(0)
    center = _median(vectors)
    offsets = vectors - center
    norms = torch.linalg.vector_norm(offsets, dim=1)
    # Offsets longer than the median offset are clipped to its length.
    scale = torch.where(norms > 0, (_median(norms) / norms).clamp(max=1), 1.0)
    return center + (weight / weight.sum() * scale) @ offsets


def _median(values: Tensor) -> Tensor:
    """The median along the first axis; for an even count the mean of the two middle values."""
    ordered = values.sort(0).values
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2
