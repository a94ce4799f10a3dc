"""Means that a few bad models cannot spoil: coordinate median, trimmed mean, clipped mean.

Yin et al., Byzantine-Robust Distributed Learning, ICML 2018 (median, trimmed mean, by coordinates);
Karimireddy et al., Learning from History for Byzantine Robust Optimization, ICML 2021 (clipping
around a centre).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.core.federation import Aggregator
from fedclade.core.packed_tree import packed

TRIMMED = 0.2  # of the models, at each end


def robust_sums(average: Aggregator, give: Tensor, models: dict[str, Tensor]) -> dict[str, Tensor]:
    """For each row r of `give` (K, rows) its total weight times the robust mean of the models (K,
    …) that give to it, in float64.

    So the sums take the place of Σ_k give_kr model_k wherever they are divided by the weight. Who
    gives little counts as much as who gives much, except in "clipped_mean": a weight is no vote.
    """
    vectors = _vectors(models)
    means = vectors.new_zeros(give.shape[1], vectors.shape[1])
    for row, weight in enumerate(give.T.to(vectors.device)):
        members = torch.nonzero(weight > 0).flatten()
        if len(members):
            means[row] = _mean(average, vectors[members], weight[members].double()) * weight.sum()
    sizes = [value[0].numel() for value in models.values()]
    parts = zip(models.items(), torch.split(means, sizes, 1), strict=True)
    return {name: part.reshape(len(means), *value.shape[1:]) for (name, value), part in parts}


def _vectors(models: dict[str, Tensor]) -> Tensor:
    """(K, P) in float64."""
    whole = packed(models)
    return (
        whole
        if whole is not None
        else torch.cat([value.reshape(len(value), -1) for value in models.values()], 1)
    ).double()


def _mean(average: Aggregator, vectors: Tensor, weight: Tensor) -> Tensor:
    if average == "median":
        return _median(vectors)
    if average == "trimmed_mean":
        cut = int(TRIMMED * len(vectors))
        return vectors.sort(0).values[cut : len(vectors) - cut].mean(0)
    centre = _median(vectors)
    away = vectors - centre
    length = torch.linalg.vector_norm(away, dim=1)
    # Half of the clients stay as they are; the others come as near as the median one.
    shorter = torch.where(length > 0, (_median(length) / length).clamp(max=1), 1.0)
    return centre + (weight / weight.sum() * shorter) @ away


def _median(values: Tensor) -> Tensor:
    """Along the first axis; of an even number the mean of the two in the middle."""
    ordered = values.sort(0).values
    return (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2
