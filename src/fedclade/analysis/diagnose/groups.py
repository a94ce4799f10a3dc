"""The number of groups and their members: the clustering of CladeGroups with several initial
models, and a test whether the groups explain the differences.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedclade.analysis.diagnose.class_statistics import ClassStatistics
from fedclade.analysis.diagnose.heterogeneity_kind import Evidence, gather_evidence
from fedclade.analysis.diagnose.hypothesis_tests import Difference
from fedclade.clustering.graph import canonical_labels
from fedclade.core.functional_model import Objective
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.rng import fold_in
from fedclade.engines.simulator import Simulator
from fedclade.methods.clade import Clade
from fedclade.methods.clade_groups import CladeGroups

Groups = NDArray[np.int64]
CLUSTERINGS = 3
CHANCE = 0.01  # a difference inside groups is significant below this p …
LEFT_OVER = 0.1  # … but it matters only above this share of the largest difference


@dataclass(frozen=True)
class Grouping:
    """The selected groups.

    Args:
        group: the group of each client; None if there are no groups.
        agree: the share of the clusterings with the same number of groups; 1 without groups.
    """

    group: Groups | None
    agree: float


def cluster(fed: Simulator, objectives: list[Objective], key: int) -> list[Groups]:
    """The groups that CladeGroups finds with each of these models, each with a different
    projection.
    """
    return [
        groups_of(CladeGroups(), fed, objective, fold_in(key, "groups", number))
        for number, objective in enumerate(objectives)
    ]


def cluster_and_merge(fed: Simulator, objectives: list[Objective], key: int) -> list[Groups]:
    """The same groups, but groups that differ in class shares alone are merged, as Clade does."""
    return [
        groups_of(Clade(), fed, objective, fold_in(key, "groups", number))
        for number, objective in enumerate(objectives)
    ]


def groups_of(method: CladeGroups, fed: Simulator, objective: Objective, key: int) -> Groups:
    """The groups that a method finds before its first round."""
    method, params = method.with_local_config(LocalTraining(objective)), objective.params()
    fed.init_client_state(method.initial_client_state(params))
    return canonical_labels(method.init(fed, params, key).cluster_ids.numpy())


def select_groups(
    clusterings: list[Groups],
    statistics: ClassStatistics,
    evidence: Evidence,
    rng: np.random.Generator,
    labels_too: bool = True,
) -> Grouping:
    """The clustering that explains the differences between clients; the most frequent number of
    groups wins. No groups if no clustering explains the differences.

    Dirichlet skew has no groups: the found groups are small, and clients still differ inside them.

    Args:
        clusterings: the groups of each client, several times.
        statistics: the statistics of the clients.
        evidence: the differences between all clients.
        rng: the randomness of the tests.
        labels_too: whether groups must explain differences in p(y) too, besides p(x | y).
    """
    explaining = [
        group for group in clusterings if _explains(group, statistics, evidence, rng, labels_too)
    ]
    if not explaining:
        return Grouping(None, 1.0)
    number, votes = max(
        Counter(int(group.max()) for group in explaining).items(),
        key=lambda vote: (vote[1], -vote[0]),
    )
    return Grouping(
        next(group for group in explaining if int(group.max()) == number), votes / len(clusterings)
    )


def _explains(
    group: Groups,
    statistics: ClassStatistics,
    evidence: Evidence,
    rng: np.random.Generator,
    labels_too: bool,
) -> bool:
    """Whether there are at least two groups, of at least two clients on average, whose clients are
    alike.
    """
    if not 2 <= int(group.max()) + 1 <= len(group) / 2:
        return False
    within = gather_evidence(statistics, rng, group)
    if not labels_too:
        return _explained(evidence.given_labels.share, within.given_labels)
    largest = max(evidence.labels.share, evidence.given_labels.share)
    labels = not evidence.labels_differ or _explained(largest, within.labels)
    return labels and _explained(largest, within.given_labels)


def _explained(largest: float, within: Difference) -> bool:
    return within.p > CHANCE or within.share <= LEFT_OVER * largest
