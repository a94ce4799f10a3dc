"""Mixing models: weighted means from sums, mixing matrices, and their distinct rows.

A mixing matrix has a row for each model to make and a column for each model that goes in. Clients
of one group share a row, so what is stored is the distinct rows and an index, not a model for every
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
    sums: dict[str, Tensor], weight: Tensor, keep: dict[str, Tensor]
) -> dict[str, Tensor]:
    """sums / weight, row by row, in the dtype of `keep`; a row with no weight (nobody answered)
    keeps its old model.
    """
    if not sums:
        return keep
    empty = bool((weight <= 0).any())
    weight = weight.to(next(iter(sums.values())).device)
    whole = packed(sums)
    if whole is not None and not empty and list(sums) == list(keep):
        return unpacked((whole / weight[:, None]).to(next(iter(keep.values())).dtype), sums)
    result = {}
    for name, old in keep.items():
        total = sums[name]
        share = weight.view(-1, *[1] * (total.ndim - 1))
        new = (
            torch.where(share > 0, total / torch.where(share > 0, share, 1.0), old.to(total))
            if empty
            else total / share
        )
        result[name] = new.to(old.dtype)
    return result


def add(
    sums: dict[str, Tensor], weight: Tensor, matrix: Tensor, models: dict[str, Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Add `matrix @ models` (rows x models) to unnormalised sums: how absent clients enter, by
    their row of the old models.
    """
    matrix = matrix.double()
    more = {}
    for name, value in models.items():
        part = (
            matrix.to(value.device) @ value.reshape(len(value), math.prod(value.shape[1:])).double()
        ).view(len(matrix), *value.shape[1:])
        more[name] = sums[name] + part if sums else part
    return more, weight + matrix.sum(1).to(weight.device)


def mean_by_row(
    models: dict[str, Tensor],
    row: Tensor,
    weight: Tensor,
    keep: dict[str, Tensor],
    average: Aggregator = "mean",
) -> dict[str, Tensor]:
    """The weighted mean of the models that go to each row of `keep`; a row to which none goes keeps
    its old model.
    """
    return weighted_mean(
        *_sums(F.one_hot(row, len(next(iter(keep.values())))).T * weight, models, average), keep
    )


def _sums(
    matrix: Tensor, models: dict[str, Tensor], average: Aggregator
) -> tuple[dict[str, Tensor], Tensor]:
    """`matrix @ models`, or what takes its place where the average is another than the mean; and
    the weight of each row.
    """
    if average == "mean":
        return add({}, torch.zeros(len(matrix), dtype=torch.float64), matrix, models)
    return robust_sums(average, matrix.T, models), matrix.double().sum(1)


def mix(
    matrix: Tensor, models: dict[str, Tensor], average: Aggregator = "mean"
) -> dict[str, Tensor]:
    """Row-normalised mixing: result_i = sum_j matrix_ij model_j / sum_j matrix_ij. Every row must
    have some weight.
    """
    weight = matrix.double().sum(1)
    wrong = (weight <= 0) | (matrix < 0).any(1)
    if bool(wrong.any()):
        raise ValueError(
            f"mixing matrix: row {int(wrong.nonzero()[0])} has no weight or a negative one"
        )
    sums, weight = _sums(matrix, models, average)
    return weighted_mean(
        sums,
        weight,
        keep={
            name: value.new_zeros((len(matrix), *value.shape[1:])) for name, value in models.items()
        },
    )


def distinct_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows of a mixing matrix, and for each client which of them is its own: matrix ==
    rows[index].
    """
    rows, index = torch.unique(matrix, dim=0, return_inverse=True)
    return rows, index
