"""Local training by SGD."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fedclade.core.functional_model import Batch, Objective
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.program import (
    AnyProgram,
    ChainedProgram,
    Finish,
    Program,
    Start,
    Step,
    chain,
    natively_batched,
)
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix, tree_map


@serializable_program
def sgd(local: LocalTraining) -> Program:
    """Local SGD from the client's model. The reply is the trained weights. Most methods use it."""
    start, step, finish = _sgd(local.objective, local.momentum, local.weight_decay)
    return Program(start, step, finish, local.batches, "sgd", hyperparams={"lr": local.lr})


@lru_cache(maxsize=32)
def _sgd(objective: Objective, momentum: float, weight_decay: float) -> tuple[Start, Step, Finish]:
    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        carry = add_prefix("w", params)
        if momentum:
            carry |= add_prefix("v", tree_map(torch.zeros_like, params))
        return {}, carry

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        return sgd_step(objective, carry, batch, broadcast["lr"], momentum, weight_decay)

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return strip_prefix("w", carry), None

    return start, step, finish


def sgd_step(
    objective: Objective,
    carry: Tree,
    batch: Batch,
    lr: Tensor,
    momentum: float,
    weight_decay: float,
    plus: Tree | None = None,
    at: Tree | None = None,
) -> Tree:
    """One step of SGD as in torch.optim.SGD: v <- momentum v + (g + weight_decay w), w <- w - lr v.

    The result may use the memory of the weights: read them before this call.

    Args:
        objective: the objective.
        carry: the weights w under "w/" and, with momentum, the velocity v under "v/".
        batch: the batch.
        lr: the learning rate.
        momentum: the momentum.
        weight_decay: the weight decay.
        plus: a tree that is added to the gradient g.
        at: the weights at which g is taken; None for w.
    """
    w = strip_prefix("w", carry)
    at = w if at is None else at
    if weight_decay:
        decay = tree_map(lambda w: weight_decay * w, w)
        plus = decay if plus is None else tree_map(torch.add, plus, decay)
    if not momentum:
        base = w if plus is None else tree_map(lambda w, more: w - lr * more, w, plus)
        return add_prefix("w", objective.add_scaled_gradient(base, -lr, at, batch, overwrite=True))
    base = tree_map(lambda v: momentum * v, strip_prefix("v", carry))
    base = base if plus is None else tree_map(torch.add, base, plus)
    v = objective.add_scaled_gradient(base, torch.ones_like(lr), at, batch, overwrite=True)
    return add_prefix("w", tree_map(lambda w, v: w - lr * v, w, v)) | add_prefix("v", v)


def effective_steps(steps: Tensor, momentum: float) -> Tensor:
    """The number of plain steps that equals `steps` steps with momentum.

    The gradient of step s of τ also enters all later steps, with a total factor of
    (1 - ρ^(τ-s)) / (1 - ρ). The result is the sum of these factors; without momentum it is τ.
    """
    if not momentum:
        return steps
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@serializable_program
def chain_training(first: AnyProgram, second: AnyProgram) -> ChainedProgram:
    """Two programs that train a model: the second starts from the result of the first."""
    return chain(first, second, _continue_from)


def _continue_from(broadcast: Tree, params: Tree, reply: Tree) -> tuple[Tree, Tree]:
    return reply, {}
