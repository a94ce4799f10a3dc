"""Choosing among models: a client takes the one under which its own training examples have the
least loss.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fedclade.core.functional_model import Objective
from fedclade.core.program import AnyProgram, ChainedProgram, Program, chain
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree
from fedclade.programs.evaluation import evaluate_losses


@serializable_program
@lru_cache(maxsize=32)
def choose(objective: Objective) -> Program:
    """Which of the models in `shared` (a stack) has the least loss: replies with its number, `row`,
    and nothing else.
    """
    every = evaluate_losses(objective)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return {"row": _least(carry["loss"])}, None

    return replace(every, finish=finish, name="choose")


@serializable_program
def choose_then(objective: Objective, train: AnyProgram, tell_loss: bool = False) -> ChainedProgram:
    """Choose as above, then `train` the chosen model, in one message: the reply has `row` too, and
    on request `loss`, the least one.
    """
    return chain(evaluate_losses(objective), train, _chosen_and_its_loss if tell_loss else _chosen)


def _chosen(broadcast: Tree, params: Tree, reply: Tree) -> tuple[Tree, Tree]:
    row = _least(reply["loss"])
    return {name: value.index_select(0, row[None])[0] for name, value in broadcast.items()}, {
        "row": row
    }


def _chosen_and_its_loss(broadcast: Tree, params: Tree, reply: Tree) -> tuple[Tree, Tree]:
    model, told = _chosen(broadcast, params, reply)
    return model, {**told, "loss": reply["loss"].min()}


def _least(loss: Tensor) -> Tensor:
    """A model that has run away is nobody's choice."""
    return torch.nan_to_num(loss, nan=torch.inf).argmin()
