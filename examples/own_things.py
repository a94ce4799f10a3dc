r"""A data set, a partition, a model and a method of your own, named on the command line:

    fedclade run quickstart --import examples/own_things.py \
        --set data.name=moons --set partition.name=halves \
        --set model.name=tiny --set method.name=even
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from sklearn.datasets import make_moons
from torch import Tensor, nn

import fedclade as fc
from fedclade.aggregation import weighted_mean
from fedclade.core import Federation, ModelAssignment, SegmentSum, State, Tree, sgd, stack


@fc.register("dataset", "moons")
def moons() -> fc.data.Dataset:
    """Two half moons."""
    x, y = make_moons(1000, noise=0.1, random_state=0)
    return fc.data.dataset(x[:800], y[:800], x[800:], y[800:], name="moons")


@fc.register("partition", "halves")
@dataclass(frozen=True)
class Halves:
    """Two groups: the left half of the plane and the right half."""

    name: ClassVar[str] = "halves"

    def split(self, data: fc.data.Dataset, clients: int, rng: np.random.Generator) -> fc.data.Split:
        sides = [
            np.flatnonzero(data.x_train[:, 0].numpy() > 0.5),
            np.flatnonzero(data.x_train[:, 0].numpy() <= 0.5),
        ]
        groups = np.arange(clients) % 2
        shares = [
            np.array_split(rng.permutation(side), np.sum(groups == group))
            for group, side in enumerate(sides)
        ]
        return fc.data.Split(
            train=[shares[group][client // 2] for client, group in enumerate(groups)], groups=groups
        )


@fc.register("model", "tiny")
@dataclass(frozen=True)
class Tiny:
    """One small hidden layer."""

    width: int = 8

    def build(self, shape: Sequence[int], classes: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(shape[0], self.width), nn.Tanh(), nn.Linear(self.width, classes)
        )


@fc.register("method", "even")
@dataclass(frozen=True)
class Even(fc.Method):
    """The mean of the replying clients' weights, each with the same weight."""

    title: ClassVar[str] = "FedAvg in which small clients count as much as large ones"
    paper: ClassVar[str] = "an example"
    client_disclosure: ClassVar[str] = "the trained weights, once a round"
    server_visibility: ClassVar = "sum"

    def init(self, fed: Federation, params: Tree, key: int) -> State:
        return State(
            models=stack([params]), cluster_ids=torch.zeros(len(fed.sizes), dtype=torch.int64)
        )

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        cluster = state.cluster_ids[cohort]
        even = SegmentSum(
            segment_ids=cluster,
            weights=torch.ones(len(cohort)),
            num_segments=len(state),
            robust_ok=True,
        )
        results = fed.map(
            sgd(self.local),
            cohort,
            per_client=ModelAssignment(state.models, cluster),
            key=key,
            reduce=even,
        )
        return replace(
            state, models=weighted_mean(results.sums, results.total_weight, fallback=state.models)
        )

    def add_clients(self, fed: Federation, state: State, ids: Tensor, key: int) -> State:
        state = state.with_num_clients(len(fed.sizes))
        return replace(state, cluster_ids=state.cluster_ids.index_fill(0, ids, 0))


if __name__ == "__main__":
    print(__doc__)
