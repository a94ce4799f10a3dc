"""The server's part of class priors: how much the clients' class shares differ, and which groups
differ in nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedclade.clustering.clade import whitening_matrix
from fedclade.clustering.class_shares import concentration, merge_by_class_means
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import UNKNOWN
from fedclade.core.pytree import Tree
from fedclade.core.rng import fold_in
from fedclade.errors import InvalidInputError
from fedclade.methods._clade_groups_state import CladeGroupsState
from fedclade.methods.base import is_classification
from fedclade.programs.class_prior import class_statistics, keep_class_offset

NUMBERS_PER_CLASS = 8  # of a class-conditional mean


@dataclass(frozen=True)
class ClassShares:
    """What the server learns about classes.

    Args:
        prior: (classes,) π, everybody's class shares.
        kappa: κ; infinite if the clients' class shares differ by chance, or without class labels.
        merged: (groups,) the merged group of each group.
    """

    prior: Tensor
    kappa: float
    merged: Tensor


def class_bias(objective: Objective) -> str:
    """The name of the bias of the last linear layer; "" if the model cannot have a class prior."""
    if not is_classification(objective):
        return ""
    names = (name for name in head_names(objective) if name.endswith("bias"))
    return next((name for name in names if name in objective.trained), "")


def head_names(objective: Objective) -> tuple[str, ...]:
    """The names of the last linear layer's parameters; none if it is frozen."""
    try:
        return objective.head_param_names()
    except InvalidInputError:
        return ()


def learn_class_shares(
    fed: Federation, objective: Objective, base: CladeGroupsState, key: int, noise_ratio: float
) -> ClassShares:
    """Class shares from sums over each group. Each client keeps its offset o_i.

    Args:
        fed: the clients.
        objective: the model and its loss.
        base: the groups, and the model that gives the features.
        key: the randomness of this call.
        noise_ratio: how far above the noise the cost of a merge must be.
    """
    unmerged = torch.arange(len(base))
    ids = torch.nonzero(base.cluster_ids != UNKNOWN).flatten()
    statistics = _statistics(fed, objective, base, ids, key) if class_bias(objective) else {}
    if not statistics or not bool(statistics["counts"].sum() > 0):
        return ClassShares(torch.ones(1), math.inf, unmerged)
    counts = statistics["counts"]
    moments = (
        float(statistics[name].sum())
        for name in ("same_class", "counts_squared", "n_squared", "noise")
    )
    kappa = concentration(counts.sum(0).numpy(), *moments)
    shares = counts.sum(0).clamp_min(0.5)
    prior = (shares / shares.sum()).float()
    had_offsets = math.isfinite(float(getattr(base, "kappa", math.inf)))
    keep_offsets(fed, ids, prior, kappa, key, had_offsets)
    if len(base) < 2:
        return ClassShares(prior, kappa, unmerged)
    freedom = max(1.0, float(statistics["freedom"].sum()))
    merged = merge_by_class_means(
        counts.numpy(),
        statistics["sum"].numpy(),
        whitening_matrix(statistics["scatter"].sum(0).numpy(), freedom),
        fold_in(key, "merge"),
        noise_ratio,
    )
    return ClassShares(prior, kappa, torch.from_numpy(merged))


def _statistics(
    fed: Federation, objective: Objective, base: CladeGroupsState, ids: Tensor, key: int
) -> Tree:
    """The sums of `class_statistics` over each group."""
    program = class_statistics(
        objective, NUMBERS_PER_CLASS, fold_in(int(base.signature_key), "classes")
    )
    by_group = SegmentSum(
        segment_ids=base.cluster_ids[ids], weights=torch.ones(len(ids)), num_segments=len(base)
    )
    start = ModelAssignment.all_same(base.start, len(ids))
    sums = fed.map(program, ids, per_client=start, key=key, reduce=by_group).sums
    return {name: value.double().cpu() for name, value in sums.items()}


def keep_offsets(
    fed: Federation,
    ids: Tensor,
    prior: Tensor,
    kappa: float,
    key: int,
    had_offsets: bool = False,
) -> None:
    """Each of these clients keeps its offset o_i: 0 if κ is infinite.

    Args:
        fed: the clients.
        ids: the clients.
        prior: π.
        kappa: κ.
        key: the randomness of this call.
        had_offsets: whether clients may have other offsets than 0.
    """
    if (math.isfinite(kappa) or had_offsets) and len(ids):
        broadcast = {"prior": prior, "kappa": torch.tensor(kappa)}
        fed.map(keep_class_offset(len(prior)), ids, broadcast=broadcast, key=key)
