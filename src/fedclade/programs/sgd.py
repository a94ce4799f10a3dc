"""Local training by SGD."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fedclade.core.functional_model import Batch, Objective
from fedclade.core.local_training import LocalTraining
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
    """Local SGD from the model the client was given; it replies with the trained weights. Shared by
    most methods.
    """
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
    """One step of SGD as torch.optim.SGD takes it: v <- momentum v + (g + weight_decay w), w <- w -
    lr v.

    g is the gradient of the batch at the weights, or at those of `at`; `plus` is added to it. The
    weights' memory may be used for the result: what else needs them comes first.
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
    """How many plain steps so many steps with momentum amount to: the sum of what each step's
    gradient counts for in the end.

    The gradient of step s of τ enters all later steps too, (1 - ρ^(τ-s)) / (1 - ρ) times in all;
    without momentum this is τ.
    """
    if not momentum:
        return steps
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@serializable_program
def chain_training(first: AnyProgram, second: AnyProgram) -> ChainedProgram:
    """Two programs that each train a model: the second goes on with what the first has made of
    it.
    """
    return chain(first, second, _continue_from)


def _continue_from(broadcast: Tree, params: Tree, reply: Tree) -> tuple[Tree, Tree]:
    return reply, {}
