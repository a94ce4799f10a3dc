"""Weighted means of models: from sums, by segments, and by the rows of a mixing matrix.

A mixing matrix has a row for each resulting model and a column for each input model. Clients of one
group have equal rows, so only the distinct rows and an index are stored, not a model for every
client.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.aggregation.robust import robust_sums
from fedclade.core.federation import Aggregator
from fedclade.core.packed_tree import packed, unpacked


def weighted_mean(
    sums: dict[str, Tensor], weights: Tensor, fallback: dict[str, Tensor]
) -> dict[str, Tensor]:
    """sums / weights, row by row, in the dtype of `fallback`; a row with no weight (no client
    replied) takes the model of `fallback`.
    """
    if not sums:
        return fallback
    empty = bool((weights <= 0).any())
    weights = weights.to(next(iter(sums.values())).device)
    buffer = packed(sums)
    if buffer is not None and not empty and list(sums) == list(fallback):
        return unpacked((buffer / weights[:, None]).to(next(iter(fallback.values())).dtype), sums)
    result = {}
    for name, old in fallback.items():
        total = sums[name]
        weight = weights.view(-1, *[1] * (total.ndim - 1))
        mean = (
            torch.where(weight > 0, total / torch.where(weight > 0, weight, 1.0), old.to(total))
            if empty
            else total / weight
        )
        result[name] = mean.to(old.dtype)
    return result


def add_weighted_models(
    sums: dict[str, Tensor], weights: Tensor, matrix: Tensor, models: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Add `matrix @ models` (rows x models) to unnormalised sums, and the row sums of `matrix` to
    their weights. So absent clients contribute their last models.
    """
    matrix = matrix.double()
    result = {}
    for name, value in models.items():
        part = (
            matrix.to(value.device) @ value.reshape(len(value), math.prod(value.shape[1:])).double()
        ).view(len(matrix), *value.shape[1:])
        result[name] = sums[name] + part if sums else part
    return result, weights + matrix.sum(1).to(weights.device)


def segment_mean(
    models: dict[str, Tensor],
    segment_ids: Tensor,
    weights: Tensor,
    fallback: dict[str, Tensor],
    aggregator: Aggregator = "mean",
) -> dict[str, Tensor]:
    """The weighted mean of the models of each segment, a row of `fallback`; an empty segment keeps
    that row.
    """
    members = F.one_hot(segment_ids, len(next(iter(fallback.values())))).T
    return weighted_mean(*_weighted_sums(members * weights, models, aggregator), fallback)


def _weighted_sums(
    matrix: Tensor, models: dict[str, Tensor], aggregator: Aggregator
) -> tuple[dict[str, Tensor], Tensor]:
    """`matrix @ models`, or the robust sums that replace it; and the weight of each row."""
    if aggregator == "mean":
        zeros = torch.zeros(len(matrix), dtype=torch.float64)
        return add_weighted_models({}, zeros, matrix, models)
    return robust_sums(aggregator, matrix.T, models), matrix.double().sum(1)


def mix_models(
    matrix: Tensor, models: dict[str, Tensor], aggregator: Aggregator = "mean"
) -> dict[str, Tensor]:
    """Row-normalised mixing: result_i = sum_j matrix_ij model_j / sum_j matrix_ij. Every row must
    have some weight.
    """
    invalid = (matrix.double().sum(1) <= 0) | (matrix < 0).any(1)
    if bool(invalid.any()):
        raise ValueError(
            f"mixing matrix: row {int(invalid.nonzero()[0])} has no weight or a negative one"
        )
    zeros = {
        name: value.new_zeros((len(matrix), *value.shape[1:])) for name, value in models.items()
    }
    return weighted_mean(*_weighted_sums(matrix, models, aggregator), fallback=zeros)


def unique_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of a mixing matrix, and the index of each client's row among them:
    matrix == rows[index].
    """
    rows, index = torch.unique(matrix, dim=0, return_inverse=True)
    return rows, index
