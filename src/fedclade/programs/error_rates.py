"""The error rates of several models on a client's samples."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from fedclade.core.batching import Batches
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.program import Program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree


@serializable_program
def error_rates(objective: Objective) -> Program:
    """The reply is `errors`: the share of wrong predictions of each model in `broadcast`, a stack.

    Args:
        objective: the model and its loss.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        first = next(iter(broadcast.values()))
        wrong = torch.zeros(len(first), dtype=torch.float64, device=first.device)
        return {}, {"wrong": wrong, "examples": wrong[0].clone()}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        def total(params: Tree) -> Tensor:
            wrong = (objective.outputs(params, batch.x).argmax(-1) != batch.y).double()
            return (wrong.flatten(1).mean(1) if wrong.ndim > 1 else wrong) @ batch.weight.double()

        return {
            "wrong": carry["wrong"] + vmap(total)(broadcast),
            "examples": carry["examples"] + batch.weight.sum(dtype=torch.float64),
        }

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return {"errors": (carry["wrong"] / carry["examples"]).float()}, None

    return Program(start, step, finish, Batches.whole(), "error_rates")
