"""FLUX's signature: means and standard deviations of a client's projected features."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fedclade.core.batching import Batches
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.program import Program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, tree_map
from fedclade.errors import require
from fedclade.programs.gradient_signature import projection

NO_SAMPLES = -1.0  # for a label with fewer than two samples


@serializable_program
def latent_descriptor(objective: Objective, key: int, labelled: bool) -> Program:
    """The features are projected to C numbers, as many as there are classes. The reply is `inputs`
    (2, C), their means and their standard deviations; and if `labelled` also `labels` (2, C, C),
    the same for the samples of each label.

    Args:
        objective: the model and its loss.
        key: the randomness of the projection.
        labelled: whether labels are used.
    """
    head = objective.head_layer()
    classes = head.out_features
    onto = projection(key, head.in_features, classes, head.weight.device)

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        rows = 1 + classes * labelled  # all samples, and each label
        zero = torch.zeros(rows, classes, dtype=torch.float64, device=onto.device)
        return params, {"count": zero[:, 0], "sum": zero, "square": zero.clone()}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        h, _ = objective.features(const, batch.x)
        u = ((h.flatten(1, -2).mean(1) if h.ndim > 2 else h) @ onto).double()
        weight = batch.weight.double()[None]
        if labelled:
            require(
                batch.y.ndim == 1 and not batch.y.is_floating_point(),
                "method.name",
                "flux",
                "needs one class label for each sample",
            )
            weight = torch.cat([weight, F.one_hot(batch.y, classes).T * weight])
        block = {"count": weight.sum(1), "sum": weight @ u, "square": weight @ u.square()}
        return tree_map(torch.add, carry, block)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        count = carry["count"][:, None]
        mean = carry["sum"] / count.clamp_min(1)
        deviation = (carry["square"] / count.clamp_min(1) - mean.square()).clamp_min(0).sqrt()
        both = torch.stack([mean, deviation])
        few = (count < 2).expand_as(mean)
        by_label = torch.where(few, NO_SAMPLES, both)[:, 1:]
        reply = {"inputs": both[:, 0].float()}
        return reply | ({"labels": by_label.float()} if labelled else {}), None

    return Program(start, step, finish, Batches.whole(), "latent_descriptor")
