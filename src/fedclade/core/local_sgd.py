"""Local training by SGD, Adam or AdamW."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedclade.core.batching import Part
from fedclade.core.functional_model import Batch, ClientStackedBatch, Objective
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.program import AnyProgram, ChainedProgram, Program, chain, natively_batched
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix, tree_map

# Of Adam and AdamW, as in torch.optim.
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


@serializable_program
def sgd(
    local: LocalTraining, only: tuple[str, ...] | None = None, part: Part = "all", stream: str = ""
) -> Program:
    """Local training from the client's model, by SGD or by `local.optimizer`. The reply is the
    trained weights. Most methods use it.

    `carry` has the weights under "w/" and the optimizer's state under "optimizer/".

    Args:
        local: the objective and the settings of the optimizer.
        only: the parameters to train; the others stay as they are. None for all.
        part: the client's samples to train on, see `Batches`.
        stream: the name of the random stream; "" for "sgd".
    """

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        state = initial_optimizer_state(local, params, only)
        return {}, add_prefix("w", params) | add_prefix("optimizer", state)

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        params, state = optimizer_step(
            local,
            strip_prefix("w", carry),
            strip_prefix("optimizer", carry),
            batch,
            broadcast["lr"],
            only=only,
        )
        return add_prefix("w", params) | add_prefix("optimizer", state)

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return strip_prefix("w", carry), None

    return Program(
        start,
        step,
        finish,
        replace(local.batches, part=part),
        "sgd",
        hyperparams={"lr": local.lr},
        rng_stream=stream,
    )


def initial_optimizer_state(
    local: LocalTraining, params: Tree, only: tuple[str, ...] | None = None
) -> Tree:
    """The state of a client's optimizer before the first step.

    Args:
        local: the optimizer and its settings.
        params: the weights of one client, or of a stack of clients.
        only: the parameters that are trained; None for all.
    """
    trained = [name for name in local.objective.trained if only is None or name in only]
    if local.optimizer == "sgd":
        of = params if only is None else {name: params[name] for name in trained}
        return initial_velocity(of, local.momentum)
    zeros = {name: torch.zeros_like(params[name]) for name in trained}
    bias = next(iter(zeros.values()))
    ones = bias.new_ones(bias.shape[: bias.ndim - local.objective.ndim_of(next(iter(zeros)))])
    return {
        **add_prefix("mean", zeros),
        **add_prefix("square", tree_map(torch.zeros_like, zeros)),
        "beta1_power": ones,
        "beta2_power": ones.clone(),
    }


def optimizer_step(
    local: LocalTraining,
    params: Tree,
    state: Tree,
    batch: Batch,
    lr: Tensor,
    *,
    plus: Tree | None = None,
    only: tuple[str, ...] | None = None,
    gradient_scale: Tensor | None = None,
) -> tuple[Tree, Tree]:
    """One step of the client's optimizer, as torch.optim defines it.

    The results may use the memory of `params`: read `params` before this call.

    Args:
        local: the objective, the optimizer and its settings.
        params: the weights, and running statistics, which the batch updates.
        state: the optimizer's state, as `initial_optimizer_state` and this function return it.
        batch: the batch of one client, or a `ClientStackedBatch`.
        lr: the learning rate.
        plus: a tree that is added to the gradient, where it has a value.
        only: the parameters and running statistics that change; None for all.
        gradient_scale: a factor of the loss's gradient, one per client; None for 1.

    Returns:
        The new weights and the new state.
    """
    if local.optimizer == "sgd" and only is None:
        return sgd_step(
            local.objective,
            params,
            state,
            batch,
            lr,
            momentum=local.momentum,
            weight_decay=local.weight_decay,
            clip_norm=local.clip_norm,
            plus=plus,
            gradient_scale=gradient_scale,
        )
    gradient, statistics = loss_gradient(
        local.objective,
        params,
        batch,
        plus=plus,
        clip_norm=local.clip_norm,
        only=only,
        gradient_scale=gradient_scale,
    )
    after, state = step_along(local, {name: params[name] for name in gradient}, state, gradient, lr)
    return params | after | statistics, state


def step_along(
    local: LocalTraining, w: Tree, state: Tree, gradient: Tree, lr: Tensor
) -> tuple[Tree, Tree]:
    """One step of the client's optimizer along a gradient that is known, with weight decay.

    Args:
        local: the optimizer and its settings.
        w: the weights.
        state: the optimizer's state, as `initial_optimizer_state` and this function return it.
        gradient: the gradient, one tensor for each weight.
        lr: the learning rate.

    Returns:
        The new weights and the new state.
    """
    if local.weight_decay and local.optimizer != "adamw":
        gradient = tree_map(lambda g, w: g + local.weight_decay * w, gradient, w)
    elif local.weight_decay:
        w = tree_map(lambda w: w * (1 - lr * local.weight_decay), w)
    if local.optimizer == "sgd":
        if local.momentum:
            gradient = tree_map(lambda v, g: local.momentum * v + g, state, gradient)
        after = tree_map(lambda w, v: w - lr * v, w, gradient)
        return after, gradient if local.momentum else {}
    mean = tree_map(lambda m, g: BETA1 * m + (1 - BETA1) * g, strip_prefix("mean", state), gradient)
    square = tree_map(
        lambda v, g: BETA2 * v + (1 - BETA2) * g * g, strip_prefix("square", state), gradient
    )
    power1, power2 = BETA1 * state["beta1_power"], BETA2 * state["beta2_power"]

    def moved(w: Tensor, m: Tensor, v: Tensor) -> Tensor:
        size, root = per_client(lr / (1 - power1), w), per_client((1 - power2).sqrt(), w)
        return w - size * m / (v.sqrt() / root + EPSILON)

    return tree_map(moved, w, mean, square), {
        **add_prefix("mean", mean),
        **add_prefix("square", square),
        "beta1_power": power1,
        "beta2_power": power2,
    }


def loss_gradient(
    objective: Objective,
    at: Tree,
    batch: Batch,
    *,
    plus: Tree | None = None,
    clip_norm: float = 0.0,
    only: tuple[str, ...] | None = None,
    gradient_scale: Tensor | None = None,
) -> tuple[Tree, Tree]:
    """The gradient of the loss of a batch.

    Args:
        objective: the objective.
        at: the weights and running statistics.
        batch: the batch of one client, or a `ClientStackedBatch`.
        plus: a tree that is added to the gradient, where it has a value.
        clip_norm: the largest norm of the gradient; 0 for no limit.
        only: the parameters and running statistics to return; None for all.
        gradient_scale: a factor of the loss's gradient, one per client; None for 1.

    Returns:
        The gradient, and the new running statistics.
    """
    zeros = {name: torch.zeros_like(at[name]) for name in objective.trained}
    base = {**zeros, **{name: value.clone() for name, value in (plus or {}).items()}}
    after = objective.add_scaled_gradient(
        base | {name: at[name].clone() for name in objective.statistics},
        batch.weight.new_ones(()) if gradient_scale is None else gradient_scale,
        at,
        batch,
        overwrite=True,
    )
    if only is not None:
        after = {name: value for name, value in after.items() if name in only}
    gradient = {name: after[name] for name in zeros if name in after}
    if clip_norm:
        axes = 1 if isinstance(batch, ClientStackedBatch) else 0
        gradient = clip_gradient(gradient, clip_norm, axes)
    return gradient, {name: after[name] for name in objective.statistics if name in after}


def clip_gradient(gradient: Tree, clip_norm: float, axes: int = 0) -> Tree:
    """The gradient, shortened to a norm of at most `clip_norm` as torch's clip_grad_norm_ does.

    Args:
        gradient: the gradient of one client, or of a stack of clients.
        clip_norm: the largest norm.
        axes: the number of axes of clients: 1 for a stack.
    """
    squares = [g.square().flatten(axes).sum(-1) for g in gradient.values()]
    norm = torch.stack(squares).sum(0).sqrt()
    factor = (clip_norm / (norm + 1e-6)).clamp_max(1.0)
    return tree_map(lambda g: g * per_client(factor, g), gradient)


def _added(tree: Tree, plus: Tree) -> Tree:
    """The tree plus another one, which may lack some names."""
    return {name: value + plus[name] if name in plus else value for name, value in tree.items()}


def per_client(value: Tensor, tensor: Tensor) -> Tensor:
    """One number, or one per client, in a shape that broadcasts with `tensor`.

    Args:
        value: the number of one client, or (K,) of a stack of clients.
        tensor: a tensor of one client, or of a stack of clients.
    """
    return value.view(*value.shape, *[1] * (tensor.ndim - value.ndim))


def initial_velocity(params: Tree, momentum: float) -> Tree:
    """The velocity before the first step: zeros, or an empty tree without momentum.

    Args:
        params: the weights.
        momentum: the momentum of SGD.
    """
    return tree_map(torch.zeros_like, params) if momentum else {}


def sgd_step(
    objective: Objective,
    params: Tree,
    velocity: Tree,
    batch: Batch,
    lr: Tensor,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    clip_norm: float = 0.0,
    plus: Tree | None = None,
    at: Tree | None = None,
    gradient_scale: Tensor | None = None,
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
        clip_norm: the largest norm of g; 0 for no limit.
        plus: a tree that is added to the gradient g, where it has a value.
        at: the weights at which g is taken; None for w.
        gradient_scale: a factor of the loss's gradient, one per client; None for 1.

    Returns:
        The new weights and the new velocity.
    """
    at = params if at is None else at
    statistics = {name: params[name] for name in objective.statistics}
    w = {name: value for name, value in params.items() if name not in statistics}
    clipped: Tree | None = None
    if clip_norm:
        clipped, statistics = loss_gradient(
            objective,
            at,
            batch,
            plus=plus,
            clip_norm=clip_norm,
            gradient_scale=gradient_scale,
        )
        plus = clipped
    if weight_decay:
        decay = tree_map(lambda w: weight_decay * w, w)
        more = plus or {}
        plus = {
            name: value + more[name] if name in more else value for name, value in decay.items()
        }
    velocity = tree_map(lambda v: momentum * v, {name: velocity[name] for name in w if momentum})
    base, scale = (velocity, torch.ones_like(lr)) if momentum else (w, -lr)
    if plus is not None:
        base = _added(base, {name: scale * plus[name] for name in base if name in plus})
    if clipped is None:
        if gradient_scale is not None:
            scale = scale * gradient_scale
        base = objective.add_scaled_gradient(base | statistics, scale, at, batch, overwrite=True)
        statistics = {name: base.pop(name) for name in statistics}
    if momentum:
        return tree_map(lambda w, v: w - lr * v, w, base) | statistics, base
    return base | statistics, {}


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
