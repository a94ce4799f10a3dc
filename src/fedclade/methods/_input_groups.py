"""Groups of clients whose inputs have one distribution."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedclade.core.federation import Federation, ModelAssignment
from fedclade.core.method_state import UNKNOWN
from fedclade.core.rng import fold_in
from fedclade.methods.clade_groups import CladeGroups, CladeGroupsState


def input_groups(method: CladeGroups, fed: Federation, base: CladeGroupsState, key: int) -> Tensor:
    """(clients,) groups of clients with the same p(x), or UNKNOWN, by signatures of kind
    "features".

    Args:
        method: the method, whose settings are used.
        fed: the clients.
        base: the groups, and the model at which signatures are taken.
        key: the randomness of this call.
    """
    ids = torch.nonzero(base.cluster_ids != UNKNOWN).flatten()
    key, by_inputs = fold_in(key, "inputs"), replace(method, signature="features")
    start = ModelAssignment.all_same(base.start, len(ids))
    replies = by_inputs._signatures(fed, start, ids, key)
    result = torch.full_like(base.cluster_ids, UNKNOWN)
    if len(replies.ids):
        start = ModelAssignment.all_same(base.start, len(replies.ids))
        result[replies.ids] = by_inputs._groups(fed, start, replies, key)
    return result
