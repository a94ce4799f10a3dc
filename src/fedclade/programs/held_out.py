"""Losses and scores of models on samples that the client did not train on."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedclade.core.batching import WHOLE_BLOCK, Batches
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.program import AnyProgram, Program, chain
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


@serializable_program
def held_out_score(objective: Objective) -> Program:
    """The sum of the scores of the held-out samples, of their squares, and their number. The score
    of a sample is the share of its labels that the model predicts; for numbers, the negative loss.

    Args:
        objective: the model and its loss.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        zero = torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
        return params, {"score": zero, "square": zero.clone(), "examples": zero.clone()}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        outputs, y = objective.outputs(const, batch.x), batch.y
        if not y.is_floating_point() and outputs.shape[:-1] == y.shape:
            score = (
                (outputs.argmax(-1) == y).double().flatten(1).mean(1)
                if y.ndim > 1
                else (outputs.argmax(-1) == y).double()
            )
        else:
            score = -objective.example_loss(outputs, y).double()
        weight = batch.weight.double()
        block = {
            "score": (score * weight).sum(),
            "square": (score.square() * weight).sum(),
            "examples": weight.sum(),
        }
        return {name: carry[name] + value for name, value in block.items()}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return carry, None

    batches = Batches(WHOLE_BLOCK, shuffle=False, part="held_out")
    return Program(start, step, finish, batches, "held_out_score")


@serializable_program
def accuracy_of_all(objective: Objective) -> Program:
    """The reply is `accuracy`: the mean score of all samples, see `held_out_score`."""
    score = held_out_score(objective)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return {"accuracy": (carry["score"] / carry["examples"]).float()}, None

    return replace(score, finish=finish, batches=Batches.whole(), name="accuracy")


@serializable_program
def accuracy_then(objective: Objective, train: AnyProgram) -> AnyProgram:
    """The accuracy of the received model on all samples, and its training. The reply has both.

    Args:
        objective: the model and its loss.
        train: the training.
    """
    return chain(accuracy_of_all(objective), train, lambda _, params, accuracy: (params, accuracy))


@serializable_program
def train_then(train: AnyProgram, program: AnyProgram) -> AnyProgram:
    """A program on the model that another one has trained.

    Args:
        train: the training; its reply is a model.
        program: the program.
    """
    return chain(train, program, lambda _, params, trained: (trained, {}))
