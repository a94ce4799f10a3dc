"""Whether clients differ in groups or each in its own way.

The tree of the clients' signatures is compared with trees of individuals: Gaussian clients with the
same covariance between clients, which has no groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.clustering.clade import rank, whitening_matrix
from fedclade.clustering.individuals import DRAWS, FEWEST, MOST, random_steps, widest_step
from fedclade.clustering.linkage import weighted_ward
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.functional_model import Objective
from fedclade.core.pytree import stack
from fedclade.core.rng import fold_in
from fedclade.programs.gradient_signature import dimensions, signature, symmetric

Array = NDArray[np.float64]
NUMBERS = 128  # of a signature
DEGREES_PER_NUMBER = 8  # to whiten it well
GROUPS = 4  # of the trees that measure the power
BY_CHANCE = 0.2  # groups if fewer of the trees of individuals have a wider step


@dataclass(frozen=True)
class Spread:
    """The widest step of the tree: the largest ratio of successive merge heights.

    Attributes:
        step: of the clients.
        typical: the median of trees of individuals.
        largest: the maximum of trees of individuals.
        p: how often individuals have as wide a step.
        power: how often groups with the same covariance between clients would count as groups.
    """

    step: float
    typical: float
    largest: float
    p: float
    power: float = 1.0

    @property
    def is_grouped(self) -> bool:
        return self.p <= BY_CHANCE


def measure_spread(
    fed: Federation, objective: Objective, key: int, rng: np.random.Generator
) -> Spread | None:
    """The spread of the clients' signatures at this model; None with too few clients or samples.

    Args:
        fed: the clients; of many, a random subset.
        objective: the model.
        key: the randomness of the signatures.
        rng: draws the individuals.
    """
    order = np.random.default_rng(key).permutation(len(fed.sizes))[:MOST]
    ids = torch.from_numpy(np.sort(order))
    size = dimensions(objective, "gradient", NUMBERS)
    replies = fed.map(
        signature(objective, "gradient", NUMBERS, fold_in(key, "projection")),
        ids,
        per_client=ModelAssignment.all_same(stack([objective.params()]), len(ids)),
        key=key,
        reduce=SegmentSum(
            segment_ids=torch.zeros_like(ids),
            weights=torch.ones(len(ids)),
            num_segments=1,
            keys=("scatter",),
        ),
    )
    if len(replies.ids) < FEWEST:
        return None
    n = fed.sizes[replies.ids].double().numpy()
    mean = replies.outputs["mean"].double().cpu().numpy()
    scatter = symmetric(replies.sums["scatter"].cpu(), size).numpy()[0]
    degrees = float(n.sum()) - len(n)
    used = min(rank(scatter), int(degrees / DEGREES_PER_NUMBER))
    if used < 2:
        return None
    return spread_of(mean[:, :used] @ whitening_matrix(scatter[:used, :used], degrees), n, rng)


def spread_of(z: Array, n: Array, rng: np.random.Generator) -> Spread:
    """Compare the tree of these clients with trees of individuals.

    Args:
        z: (M, d) the clients' means, in units of the sampling noise at n = 1.
        n: (M,) the sizes.
        rng: draws the individuals.
    """
    step = widest_step(weighted_ward(z, n))
    steps = random_steps(z, n, np.arange(len(z)), rng)
    grouped = random_steps(z, n, np.arange(len(z)) % GROUPS, rng.spawn(1)[0])
    p = float((1 + (steps >= step).sum()) / (1 + DRAWS))
    power = float((grouped > np.quantile(steps, 1 - BY_CHANCE)).mean())
    return Spread(step, float(np.median(steps)), float(steps.max()), p, power)
