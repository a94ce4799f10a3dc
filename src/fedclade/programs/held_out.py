"""A client chooses among models by their loss on samples that it did not train on."""

from __future__ import annotations

import torch

from fedclade.core.batching import WHOLE_BLOCK, Batches
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.program import Program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, strip_prefix


@serializable_program
def least_loss(objective: Objective, values: tuple[float, ...], default: int = 0) -> Program:
    """The reply "chosen" is the value whose model has the least loss on the held-out samples. The
    model of value number m is in the parameters, under "m/".

    Args:
        objective: the model and its loss.
        values: the values to choose from.
        default: the number of the value of a client without held-out samples.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        device = next(iter(params.values())).device
        loss = torch.zeros(len(values), dtype=torch.float64, device=device)
        return params, {"loss": loss, "examples": torch.zeros((), device=device)}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        losses = [
            objective.example_loss(
                objective.outputs(strip_prefix(str(number), const), batch.x), batch.y
            )
            for number in range(len(values))
        ]
        sums = torch.stack([(loss * batch.weight).sum(dtype=torch.float64) for loss in losses])
        return {"loss": carry["loss"] + sums, "examples": carry["examples"] + batch.weight.sum()}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        # A model whose training diverged has no loss; it is never chosen.
        loss = carry["loss"].nan_to_num(nan=torch.inf, posinf=torch.inf)
        numbers = torch.tensor(values, device=loss.device)
        best = numbers.index_select(0, loss.argmin()[None])[0]
        return {"chosen": torch.where(carry["examples"] > 0, best, numbers[default])}, None

    batches = Batches(WHOLE_BLOCK, shuffle=False, part="held_out")
    return Program(start, step, finish, batches, "least_loss")
