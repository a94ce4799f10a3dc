"""The kind of heterogeneity, from the differences between clients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclade.analysis.diagnose import concept_shift, hypothesis_tests
from fedclade.analysis.diagnose.class_statistics import ClassStatistics
from fedclade.analysis.diagnose.hypothesis_tests import Difference

Kind: TypeAlias = Literal[
    "iid",
    "quantity skew",
    "label skew",
    "feature shift",
    "feature shift in groups",
    "feature shift of individuals",
    "concept shift",
    "target shift",
]
Groups = NDArray[np.int64]

# A difference counts if it is significant and large enough to matter. Tuned on seeds that are not
# reported (docs/diagnosis.md).
LABELS_P, LABELS_SHARE = 0.01, 0.01
INPUTS_P, INPUTS_SHARE, GIVEN_LABELS_SHARE = 1e-3, 0.002, 0.02
UNEQUAL_SIZES = 0.3
RENAMED = 0.75
PAIRS = 300  # largest number of pairs of clients or groups that are compared for permuted labels
RESAMPLES, RESAMPLED_SHARE = 20, 0.8


@dataclass(frozen=True)
class Evidence:
    """The differences between clients.

    Attributes:
        labels: the difference in p(y).
        inputs: the difference in p(x).
        given_labels: the difference in p(x | y).
        renamed: the share of the difference in p(x | y) that permuted labels explain; None if not
            computed.
        sizes: the standard deviation of the clients' sizes over their mean.
        classes: the number of classes; 1 without class labels.
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

    @property
    def is_mixture(self) -> bool:
        return self.labels_differ and self.given_labels_differ and self.classes > 1

    def kinds(self) -> tuple[Kind, ...]:
        """The kinds; several for a mixture. Unequal sizes are a kind only if nothing else
        differs.
        """
        if self.classes == 1:
            return ("feature shift",) if self.inputs_differ else self._only_sizes()
        if self.given_labels_differ:
            # If inputs are alike, their meaning differs, and different labels are a consequence.
            if not self.inputs_differ:
                return ("concept shift",)
            renamed = self.labels_differ and self.renamed is not None and self.renamed >= RENAMED
            shift: Kind = "concept shift" if renamed else "feature shift"
            return (shift, "label skew") if self.labels_differ else (shift,)
        return ("label skew",) if self.labels_differ else self._only_sizes()

    def sizes_of(self, kinds: tuple[Kind, ...]) -> dict[str, float]:
        """The size of each of these kinds, and of quantity skew if sizes differ: the share of the
        variance between clients, or the standard deviation of the sizes over their mean.
        """
        given = self.inputs.share if self.classes == 1 else self.given_labels.share
        size = {"label skew": self.labels.share, "quantity skew": self.sizes, "iid": 0.0}
        found: dict[str, float] = {
            kind: size.get(kind, given) for kind in kinds if kind != "target shift"
        }
        return found | ({"quantity skew": self.sizes} if self.sizes_differ else {})

    def power(self) -> float:
        """The probability that a relevant difference would have been found, where none was."""
        labels = 1.0 if self.labels_differ or self.classes == 1 else self.labels.power
        return labels if self.given_labels_differ else labels * self.given_labels.power

    def _only_sizes(self) -> tuple[Kind, ...]:
        return ("quantity skew",) if self.sizes_differ else ("iid",)


def gather_evidence(
    statistics: ClassStatistics, rng: np.random.Generator, group: Groups | None = None
) -> Evidence:
    """The differences between all clients, or between clients of the same group; `renamed` is not
    computed yet.
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
    """Add `renamed` if p(x | y) differs. Compares groups if there are any, because they have more
    data than clients.
    """
    if not evidence.given_labels_differ:
        return evidence
    return replace(
        evidence,
        renamed=concept_shift.explained(
            statistics if group is None else statistics.merged(group), PAIRS, rng
        ),
    )


def confidence(
    evidence: Evidence, statistics: ClassStatistics, rng: np.random.Generator, group: Groups | None
) -> float:
    """How often a random subset of the clients gives the same kinds, as (same + 1) / (draws + 2),
    which is never 1. It is halved if a relevant difference could not have been found (`power`).
    """
    kinds, clients, same = evidence.kinds(), len(statistics.counts), 0
    for _ in range(RESAMPLES):
        subset = np.sort(rng.permutation(clients)[: max(2, round(RESAMPLED_SHARE * clients))])
        part, subset_groups = (
            statistics.only(subset),
            None if group is None else np.unique(group[subset], return_inverse=True)[1],
        )
        same += with_renamed(gather_evidence(part, rng), part, subset_groups, rng).kinds() == kinds
    return (same + 1) / (RESAMPLES + 2) * (1 + evidence.power()) / 2
