"""Local training by SGD."""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.core.functional_model import Batch, Objective
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.program import AnyProgram, ChainedProgram, Program, chain, natively_batched
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix, tree_map


@serializable_program
def sgd(local: LocalTraining) -> Program:
    """Local SGD from the client's model. The reply is the trained weights. Most methods use it.

    `carry` has the weights under "w/" and, with momentum, their velocity under "v/".

    Args:
        local: the objective and the settings of SGD.
    """

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        velocity = initial_velocity(local.objective, params, local.momentum)
        return {}, add_prefix("w", params) | add_prefix("v", velocity)

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        params, velocity = sgd_step(
            local.objective,
            strip_prefix("w", carry),
            strip_prefix("v", carry),
            batch,
            broadcast["lr"],
            momentum=local.momentum,
            weight_decay=local.weight_decay,
        )
        return add_prefix("w", params) | add_prefix("v", velocity)

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return strip_prefix("w", carry), None

    return Program(start, step, finish, local.batches, "sgd", hyperparams={"lr": local.lr})


def initial_velocity(objective: Objective, params: Tree, momentum: float) -> Tree:
    """The velocity before the first step: zeros, or an empty tree without momentum."""
    return {name: torch.zeros_like(params[name]) for name in objective.trained if momentum}


def sgd_step(
    objective: Objective,
    params: Tree,
    velocity: Tree,
    batch: Batch,
    lr: Tensor,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    plus: Tree | None = None,
    at: Tree | None = None,
) -> tuple[Tree, Tree]:
    """One step of SGD as in torch.optim.SGD: v <- momentum v + (g + weight_decay w), w <- w - lr v.

    The results may use the memory of `params`: read `params` before this call.

    Args:
        objective: the objective.
        params: the weights w, and running statistics, which the batch updates.
        velocity: the velocity v, as `initial_velocity` and this function return it.
        batch: the batch of one client, or a `ClientStackedBatch`.
        lr: the learning rate.
        momentum: the momentum.
        weight_decay: the weight decay.
        plus: a tree that is added to the gradient g.
        at: the weights at which g is taken; None for w.

    Returns:
        The new weights and the new velocity.
    """
    at = params if at is None else at
    statistics = {name: params[name] for name in objective.statistics}
    w = {name: value for name, value in params.items() if name not in statistics}
    if weight_decay:
        decay = tree_map(lambda w: weight_decay * w, w)
        plus = decay if plus is None else tree_map(torch.add, decay, plus)
    if not momentum:
        base = w if plus is None else tree_map(lambda w, more: w - lr * more, w, plus)
        return objective.add_scaled_gradient(base | statistics, -lr, at, batch, overwrite=True), {}
    base = tree_map(lambda v: momentum * v, velocity)
    base = base if plus is None else tree_map(torch.add, base, plus)
    after = objective.add_scaled_gradient(
        base | statistics, torch.ones_like(lr), at, batch, overwrite=True
    )
    velocity = {name: after[name] for name in velocity}
    return tree_map(lambda w, v: w - lr * v, w, velocity) | {
        name: after[name] for name in statistics
    }, velocity


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
