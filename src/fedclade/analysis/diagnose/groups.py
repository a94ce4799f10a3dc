"""How many groups there are, and who is in which: Clade's grouping at several first models, and
whether the groups explain what differs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedclade.analysis.diagnose.class_statistics import ClassStatistics
from fedclade.analysis.diagnose.heterogeneity_kind import Evidence, gathered
from fedclade.analysis.diagnose.hypothesis_tests import Difference
from fedclade.clustering.graph import canonical_labels
from fedclade.core.federation import Federation
from fedclade.core.functional_model import Objective
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.rng import fold_in
from fedclade.methods.clade import Clade

Groups = NDArray[np.int64]
LOOKS = 3
CHANCE = 0.01  # below this a difference inside the groups is no accident …
LEFT_OVER = 0.1  # … but it matters only from this part of the largest difference on


@dataclass(frozen=True)
class Grouping:
    """found: the group of each client, None where there are none; agree: the part of the looks that
    found as many, 1 where there are none.
    """

    found: Groups | None
    agree: float


def looks(fed: Federation, objectives: list[Objective], key: int) -> list[Groups]:
    """The groups that Clade finds at each of these models, each time with another projection."""
    found = []
    for number, objective in enumerate(objectives):
        method = Clade().with_local_config(LocalTraining(objective))
        found.append(
            canonical_labels(
                method.init(
                    fed, objective.params(), fold_in(key, "groups", number)
                ).cluster_ids.numpy()
            )
        )
    return found


def judged(
    taken: list[Groups], statistics: ClassStatistics, evidence: Evidence, rng: np.random.Generator
) -> Grouping:
    """Of the groups that were found those that leave nothing to explain, by most looks; none where
    no look found such.

    Dirichlet skew has no groups: what is found is small, and clients still differ inside it.
    """
    held = [group for group in taken if _explains(group, statistics, evidence, rng)]
    if not held:
        return Grouping(None, 1.0)
    number, votes = max(
        Counter(int(group.max()) for group in held).items(), key=lambda vote: (vote[1], -vote[0])
    )
    return Grouping(next(group for group in held if int(group.max()) == number), votes / len(taken))


def _explains(
    group: Groups, statistics: ClassStatistics, evidence: Evidence, rng: np.random.Generator
) -> bool:
    """Whether there are some groups, not all as small as pairs, inside which clients are alike."""
    if not 2 <= int(group.max()) + 1 <= len(group) / 2:
        return False
    within = gathered(statistics, rng, group)
    whole = max(evidence.labels.share, evidence.given_labels.share)
    labels = not evidence.labels_differ or _explained(whole, within.labels)
    return labels and _explained(whole, within.given_labels)


def _explained(whole: float, within: Difference) -> bool:
    return within.p > CHANCE or within.share <= LEFT_OVER * whole
