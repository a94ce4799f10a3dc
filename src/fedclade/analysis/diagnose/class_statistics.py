"""What a client sends for a diagnosis: its number of samples per class, and the mean of some
features per class.

This is Clade's joint signature with more features per class, and without a scatter between classes.
The features are a random projection of the input of the shared initial model's last layer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fedclade.core.batching import Batches
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.names import NO_NAMES, Names
from fedclade.core.program import Program
from fedclade.core.pytree import Tree, stack, tree_map
from fedclade.core.rng import fold_in
from fedclade.errors import InvalidInputError
from fedclade.programs.gradient_signature import projection, symmetric

Array = NDArray[np.float64]
FEATURES = 32  # d: the maximum for each sample


@dataclass(frozen=True)
class ClassStatistics:
    """What the server receives from M clients with C classes and d features. Without class labels C
    is 1.
    """

    counts: Array  # (M, C) samples
    sums: Array  # (M, C, d) of their features
    # (C, d, d) of the samples about the mean of their client's class, summed over all clients
    scatter: Array

    @property
    def sizes(self) -> Array:
        return np.asarray(self.counts.sum(1))

    @property
    def means(self) -> Array:
        """(M, C, d); 0 where a client has none of the class."""
        return np.asarray(self.sums / np.maximum(self.counts, 1)[..., None])

    @property
    def degrees(self) -> Array:
        """(C,) degrees of freedom of the scatter: samples less clients that have any."""
        return np.asarray(self.counts.sum(0) - (self.counts > 0).sum(0))

    def only(self, clients: NDArray[np.int64]) -> ClassStatistics:
        """The statistics of some of the clients. The scatter is known only as a sum over all
        clients, so it is scaled.
        """
        part = ClassStatistics(self.counts[clients], self.sums[clients], self.scatter)
        return replace(
            part, scatter=self.scatter * (part.degrees / np.maximum(self.degrees, 1))[:, None, None]
        )

    def merged(self, group: NDArray[np.int64]) -> ClassStatistics:
        """Each group as one client. The scatter remains the one within clients."""
        member = np.eye(group.max() + 1)[group]
        return replace(
            self, counts=member.T @ self.counts, sums=np.einsum("mg,mcd->gcd", member, self.sums)
        )


def class_statistics(
    fed: Federation, objective: Objective, classes: int, key: int, names: Names = NO_NAMES
) -> ClassStatistics:
    """The statistics of all clients with the objective's own model. Only sizes, counts and means
    are needed per client.
    """
    clients = len(fed.sizes)
    rows = ModelAssignment.all_same(stack([objective.params()]), clients)
    sum_scatter = SegmentSum(
        segment_ids=torch.zeros(clients, dtype=torch.int64),
        weights=torch.ones(clients),
        num_segments=1,
        keys=("scatter",),
    )
    results = fed.map(
        class_sums(objective, classes, fold_in(key, "projection")),
        torch.arange(clients),
        per_client=rows,
        key=key,
        reduce=sum_scatter,
    )
    if results.failures:
        client = names.client(results.failures[0].client)
        raise InvalidInputError(
            f"client {client}: its class statistics failed ({results.failures[0].reason}).", client
        )
    counts, sums = results.outputs["counts"].cpu().numpy(), results.outputs["sums"].cpu().numpy()
    return ClassStatistics(
        counts, sums, symmetric(results.sums["scatter"][0].cpu().double(), sums.shape[-1]).numpy()
    )


def class_sums(objective: Objective, classes: int, key: int) -> Program:
    """A program that computes a client's number of samples per class, the sum of their features,
    and their scatter about the class mean.
    """
    head = objective.head_layer()
    width, device = min(FEATURES, head.in_features), head.weight.device
    few = head.in_features <= FEATURES  # a random projection of few features may lose some
    project = (
        torch.eye(width, device=device) if few else projection(key, head.in_features, width, device)
    )

    def start(shared: Tree, mine: Tree, memory: Tree) -> tuple[Tree, Tree]:
        shapes = {"counts": (classes,), "sums": (classes, width), "outer": (classes, width, width)}
        return mine, {
            name: torch.zeros(shape, dtype=torch.float64, device=device)
            for name, shape in shapes.items()
        }

    def step(shared: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        h, _ = objective.features(const, batch.x)
        u = ((h.flatten(1, -2).mean(1) if h.ndim > 2 else h) @ project).double()
        label = batch.y if classes > 1 else torch.zeros(len(u), dtype=torch.int64, device=u.device)
        one_hot = F.one_hot(label, classes).double() * batch.weight[:, None]
        batch_sums = {
            "counts": one_hot.sum(0),
            "sums": one_hot.T @ u,
            "outer": torch.einsum("bc,bd,be->cde", one_hot, u, u),
        }
        return tree_map(torch.add, carry, batch_sums)

    def finish(shared: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        means = carry["sums"] / carry["counts"].clamp_min(1)[:, None]
        scatter = carry["outer"] - carry["sums"][:, :, None] * means[:, None]
        row, column = torch.triu_indices(width, width)
        return {
            "counts": carry["counts"],
            "sums": carry["sums"],
            "scatter": scatter[:, row, column],
        }, None

    return Program(start, step, finish, Batches.whole(), "class_sums")
