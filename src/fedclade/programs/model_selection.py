"""Selection of a model: a client takes the one with the least loss on its training examples."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedclade.core.functional_model import Objective
from fedclade.core.program import AnyProgram, ChainedProgram, Program, chain
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree
from fedclade.programs.evaluation import evaluate_losses


@serializable_program
def choose(objective: Objective) -> Program:
    """The index of the model in `broadcast` (a stack) with the least loss. The reply is `row`."""
    evaluate = evaluate_losses(objective)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return {"row": _least(carry["loss"])}, None

    return replace(evaluate, finish=finish, name="choose")


@serializable_program
def choose_then(
    objective: Objective, train: AnyProgram, report_loss: bool = False
) -> ChainedProgram:
    """Choose a model as `choose` does, then `train` it, in one message. The reply also has `row`.

    Args:
        objective: the model and its loss.
        train: the program that trains the chosen model.
        report_loss: whether the reply also has the least `loss`.
    """
    return chain(
        evaluate_losses(objective), train, _chosen_and_its_loss if report_loss else _chosen
    )


def _chosen(broadcast: Tree, params: Tree, reply: Tree) -> tuple[Tree, Tree]:
    row = _least(reply["loss"])
    return {name: value.index_select(0, row[None])[0] for name, value in broadcast.items()}, {
        "row": row
    }


def _chosen_and_its_loss(broadcast: Tree, params: Tree, reply: Tree) -> tuple[Tree, Tree]:
    model, choice = _chosen(broadcast, params, reply)
    return model, {**choice, "loss": reply["loss"].min()}


def _least(loss: Tensor) -> Tensor:
    """The index of the least loss. A model with the loss NaN is never chosen."""
    return torch.nan_to_num(loss, nan=torch.inf).argmin()
