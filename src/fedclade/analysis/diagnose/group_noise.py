"""When the noise of differential privacy hides the groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedclade.analysis.diagnose.groups import Groups, groups_of
from fedclade.core.functional_model import Objective
from fedclade.core.rng import fold_in
from fedclade.engines.simulator import Simulator
from fedclade.methods.clade_groups import CladeGroups
from fedclade.training.metrics import adjusted_rand

EPSILONS = (10.0, 3.0, 1.0, 0.3)
SAME = 0.9  # groups with at least this adjusted Rand index are the same


@dataclass(frozen=True)
class GroupNoise:
    """What noise does to the groups.

    Attributes:
        least_epsilon: the least tried `signature_epsilon` with which, and with all larger ones,
            CladeGroups finds the groups; None if it does with none.
        hidden_at: the largest tried one with which it does not; None if it does with all.
        fewest: the number of clients of the smallest group.
    """

    least_epsilon: float | None
    hidden_at: float | None
    fewest: int


def measure_noise(fed: Simulator, objective: Objective, group: Groups, key: int) -> GroupNoise:
    """Search the groups again with less and less `signature_epsilon`, until they are not found.

    Args:
        fed: the clients.
        objective: the model of the signatures.
        group: the group of each client.
        key: the randomness of signatures and noise.
    """
    least: float | None = None
    hidden: float | None = None
    for number, epsilon in enumerate(EPSILONS):
        method = CladeGroups(signature_epsilon=epsilon, secret=fold_in(key, "noise", number))
        found = groups_of(method, fed, objective, fold_in(key, "groups", number))
        index = adjusted_rand(torch.from_numpy(group), torch.from_numpy(found))
        if index is None or index < SAME:
            hidden = epsilon
            break
        least = epsilon
    return GroupNoise(least, hidden, int(np.bincount(group).min()))
