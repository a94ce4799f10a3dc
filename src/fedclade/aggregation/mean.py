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
from fedclade.errors import InvalidInputError


def weighted_mean(
    sums: dict[str, Tensor], weights: Tensor, fallback: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The weighted means of models: sums / weights, row by row, in the dtype of `fallback`.

    Args:
        sums: (rows, …) for each parameter Σ_k w_k model_k, as in `ClientResults.sums`; empty if no
            client replied.
        weights: (rows,) Σ_k w_k, as in `ClientResults.total_weight`.
        fallback: (rows, …) the models of the rows without weight, to which no client replied.
    """
    if not sums:
        return fallback
    empty = bool((weights <= 0).any())
    weights = weights.to(next(iter(sums.values())).device)
    buffer = packed(sums)
    dtypes = {value.dtype for value in fallback.values()}
    if buffer is not None and not empty and list(sums) == list(fallback) and len(dtypes) == 1:
        return unpacked((buffer / weights[:, None]).to(dtypes.pop()), sums)
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
    """Add `matrix @ models` to unnormalized sums, and the row sums of `matrix` to their weights.
    With it, absent clients contribute their latest models.

    Args:
        sums: (rows, …) the sums so far; empty for zeros.
        weights: (rows,) the sums of the weights so far.
        matrix: (rows, models) the weight of each model in each row.
        models: (models, …) the models to add.

    Returns:
        The new sums in float64, and their weights.
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
    """The weighted mean of the models of each segment.

    Args:
        models: (K, …) the models.
        segment_ids: (K,) the segment of each model.
        weights: (K,) the weight of each model.
        fallback: (segments, …) the result for empty segments.
        aggregator: the mean, or the robust mean to use instead.
    """
    members = F.one_hot(segment_ids, len(next(iter(fallback.values())))).T
    return weighted_mean(*_weighted_sums(members * weights, models, aggregator), fallback)


def _weighted_sums(
    matrix: Tensor, models: dict[str, Tensor], aggregator: Aggregator
) -> tuple[dict[str, Tensor], Tensor]:
    """`matrix @ models` or the robust sums that replace it, and the weight of each row."""
    if aggregator == "mean":
        zeros = torch.zeros(len(matrix), dtype=torch.float64)
        return add_weighted_models({}, zeros, matrix, models)
    return robust_sums(aggregator, matrix.T, models), matrix.double().sum(1)


def mix_models(
    matrix: Tensor, models: dict[str, Tensor], aggregator: Aggregator = "mean"
) -> dict[str, Tensor]:
    """Row-normalized mixing: result_i = Σ_j matrix_ij model_j / Σ_j matrix_ij.

    Args:
        matrix: (rows, K) the weight of each model in each row. No weight is negative, and the
            weights of each row have a positive sum.
        models: (K, …) the models.
        aggregator: the mean, or the robust mean to use instead.
    """
    invalid = (matrix.double().sum(1) <= 0) | (matrix < 0).any(1)
    if bool(invalid.any()):
        raise InvalidInputError(
            f"matrix: row {int(invalid.nonzero()[0])} has no weight or a negative weight. Every row"
            " needs weights of at least 0 with a positive sum.",
            "matrix",
        )
    zeros = {
        name: value.new_zeros((len(matrix), *value.shape[1:])) for name, value in models.items()
    }
    return weighted_mean(*_weighted_sums(matrix, models, aggregator), fallback=zeros)


def unique_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of a mixing matrix, and the index of each client's row: matrix ==
    rows[index].
    """
    rows, index = torch.unique(matrix, dim=0, return_inverse=True)
    return rows, index
