"""From what differs to what kind of federation it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclade.analysis.diagnose import concept_shift, hypothesis_tests
from fedclade.analysis.diagnose.class_statistics import ClassStatistics
from fedclade.analysis.diagnose.hypothesis_tests import Difference

Kind: TypeAlias = Literal[
    "iid", "quantity skew", "label skew", "feature shift", "concept shift", "target shift"
]
Groups = NDArray[np.int64]

# What counts as a difference: more than chance gives, and enough to matter. Measured on seeds that
# are not reported (docs/diagnosis.md).
LABELS_P, LABELS_SHARE = 0.01, 0.01
INPUTS_P, INPUTS_SHARE, GIVEN_LABELS_SHARE = 1e-3, 0.002, 0.02
UNEQUAL_SIZES = 0.3
RENAMED = 0.75
PAIRS = 300  # of clients or groups that are compared for renamed labels
RESAMPLED, PART = 20, 0.8


@dataclass(frozen=True)
class Evidence:
    """What differs between clients. `renamed`: the part of the difference in p(x | y) that other
    names for labels would explain.
    """

    labels: Difference
    inputs: Difference
    given_labels: Difference
    renamed: float | None
    sizes: float
    classes: int

    @property
    def labels_differ(self) -> bool:
        return self.labels.p <= LABELS_P and self.labels.share >= LABELS_SHARE

    @property
    def inputs_differ(self) -> bool:
        return self.inputs.p <= INPUTS_P and self.inputs.share >= INPUTS_SHARE

    @property
    def given_labels_differ(self) -> bool:
        return self.given_labels.p <= INPUTS_P and self.given_labels.share >= GIVEN_LABELS_SHARE

    @property
    def sizes_differ(self) -> bool:
        return self.sizes >= UNEQUAL_SIZES

    def kinds(self) -> tuple[Kind, ...]:
        """More than one for a mixture. Unequal sizes are a kind only where nothing else differs."""
        if self.classes == 1:
            return ("feature shift",) if self.inputs_differ else self._only_sizes()
        if self.given_labels_differ:
            # Where inputs are alike it is what they mean that differs; that labels differ too is
            # then a consequence.
            if not self.inputs_differ:
                return ("concept shift",)
            renamed = self.labels_differ and self.renamed is not None and self.renamed >= RENAMED
            shift: Kind = "concept shift" if renamed else "feature shift"
            return (shift, "label skew") if self.labels_differ else (shift,)
        return ("label skew",) if self.labels_differ else self._only_sizes()

    def power(self) -> float:
        """How likely a difference that matters would have been found, if it is said that there is
        none.
        """
        labels = 1.0 if self.labels_differ or self.classes == 1 else self.labels.power
        return labels if self.given_labels_differ else labels * self.given_labels.power

    def _only_sizes(self) -> tuple[Kind, ...]:
        return ("quantity skew",) if self.sizes_differ else ("iid",)


def gathered(
    statistics: ClassStatistics, rng: np.random.Generator, group: Groups | None = None
) -> Evidence:
    """The evidence of differences between all clients, or between those of one group; `renamed` is
    not asked yet.
    """
    return Evidence(
        hypothesis_tests.of_labels(statistics.counts, rng, group),
        hypothesis_tests.of_inputs(statistics, group),
        hypothesis_tests.of_inputs_given_labels(statistics, group),
        None,
        hypothesis_tests.of_sizes(statistics.sizes),
        statistics.counts.shape[1],
    )


def with_renamed(
    evidence: Evidence, statistics: ClassStatistics, group: Groups | None, rng: np.random.Generator
) -> Evidence:
    """Asked only where p(x | y) differs. Between groups, of which more is known than of clients,
    where there are any.
    """
    if not evidence.given_labels_differ:
        return evidence
    return replace(
        evidence,
        renamed=concept_shift.explained(
            statistics if group is None else statistics.merged(group), PAIRS, rng
        ),
    )


def sureness(
    evidence: Evidence, statistics: ClassStatistics, rng: np.random.Generator, group: Groups | None
) -> float:
    """How often some of the clients, drawn at random, give the same kinds, (same + 1) / (draws +
    2), so that it is never quite certain; and where nothing was found, whether anything could have
    been: without that it is a coin's toss.
    """
    kinds, clients, same = evidence.kinds(), len(statistics.counts), 0
    for _ in range(RESAMPLED):
        who = np.sort(rng.permutation(clients)[: max(2, round(PART * clients))])
        part, inner = (
            statistics.only(who),
            None if group is None else np.unique(group[who], return_inverse=True)[1],
        )
        same += with_renamed(gathered(part, rng), part, inner, rng).kinds() == kinds
    return (same + 1) / (RESAMPLED + 2) * (1 + evidence.power()) / 2
