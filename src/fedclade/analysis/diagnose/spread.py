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
from fedclade.clustering.linkage import LinkageMatrix, weighted_ward
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.functional_model import Objective
from fedclade.core.pytree import stack
from fedclade.core.rng import fold_in
from fedclade.programs.gradient_signature import dimensions, signature, symmetric

Array = NDArray[np.float64]
NUMBERS = 128  # of a signature
DEGREES_PER_NUMBER = 8  # to whiten it well
DRAWS, FEWEST, MOST = 40, 8, 300  # trees of individuals; clients of a tree
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
    directions, variances = between_clients(z, n)

    def steps_of(own: NDArray[np.int64], rng: np.random.Generator) -> Array:
        """The widest steps of random trees in which clients with the same number are alike."""
        steps = np.empty(DRAWS)
        for draw in range(DRAWS):
            noise = rng.normal(size=z.shape) / np.sqrt(n)[:, None]
            center = rng.normal(size=(int(own.max()) + 1, len(variances))) * np.sqrt(variances)
            steps[draw] = widest_step(weighted_ward(center[own] @ directions.T + noise, n))
        return steps

    steps = steps_of(np.arange(len(z)), rng)
    grouped = steps_of(np.arange(len(z)) % GROUPS, rng.spawn(1)[0])
    p = float((1 + (steps >= step).sum()) / (1 + DRAWS))
    power = float((grouped > np.quantile(steps, 1 - BY_CHANCE)).mean())
    return Spread(step, float(np.median(steps)), float(steps.max()), p, power)


def between_clients(z: Array, n: Array) -> tuple[Array, Array]:
    """(d, k) the directions in which clients differ by more than noise, and (k,) their variances.

    The covariance of noise has eigenvalues up to (1 + sqrt(d / (M - 1)))². Larger ones are those of
    a spiked covariance, and their bias is known.
    """
    clients, d = z.shape
    center = (n[:, None] * z).sum(0) / n.sum()
    deviation = np.sqrt(n)[:, None] * (z - center)
    values, vectors = np.linalg.eigh(deviation.T @ deviation / (clients - 1))
    aspect = d / (clients - 1)
    is_spike = values > (1 + np.sqrt(aspect)) ** 2
    middle = values[is_spike] + 1 - aspect
    true = (middle + np.sqrt(np.maximum(middle**2 - 4 * values[is_spike], 0))) / 2
    return vectors[:, is_spike], np.maximum(true - 1, 0) / n.mean()


def widest_step(tree: LinkageMatrix) -> float:
    """The largest ratio of successive merge heights in the upper half of the tree."""
    heights = tree[:, 2]
    down = np.maximum(heights[::-1], 1e-12 * max(float(heights[-1]), 1e-300))
    ratios = (down[:-1] / down[1:])[: max(1, (len(heights) + 1) // 2)]
    return float(ratios.max())
