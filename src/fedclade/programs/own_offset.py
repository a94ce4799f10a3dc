"""An offset of its own for each client, of the features or of the outputs of a shared model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.func import grad

from fedclade.core.batching import Batches
from fedclade.core.functional_model import Batch, Objective, share_of
from fedclade.core.local_sgd import clip_gradient, loss_gradient, sgd, step_along
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.program import Program, natively_batched, without_steps
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix
from fedclade.errors import InvalidInputError

Space: TypeAlias = Literal["features", "outputs"]

OFFSET = "offset"
"""The name of u_i in a client's state."""
MEAN = "mean"
"""The name of z̄ among the tensors that a client receives."""


@dataclass(frozen=True)
class Head:
    """The names of the weight W and the bias b of the last linear layer."""

    weight: str
    bias: str

    @classmethod
    def of(cls, objective: Objective) -> Head:
        names = [name for name in objective.head_param_names() if name in objective.trained]
        shapes = {name: objective.ndim_of(name) for name in names}
        if sorted(shapes.values()) != [1, 2]:
            raise InvalidInputError(
                "model: this method needs a last linear layer whose weight and bias are trained."
                " Use another model, or another method.",
                "model",
            )
        return cls(*sorted(names, key=lambda name: -shapes[name]))

    def shifted(self, w: Tree, own: Tensor, space: Space) -> Tree:
        """The model whose last bias is b + W u_i, or b + o_i."""
        shift = own if space == "outputs" else (w[self.weight] * own[..., None, :]).sum(-1)
        return w | {self.bias: w[self.bias] + shift}


def _rows(h: Tensor) -> Tensor:
    """A row of features for each sample."""
    return h.flatten(1, -2).mean(1) if h.ndim > 2 else h


@serializable_program
def mean_features(objective: Objective) -> Program:
    """The reply is `mean`: the mean of the client's features."""

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        zero = next(iter(params.values())).new_zeros(objective.head_layer().in_features)
        return params, {"sum": zero, "examples": zero[0]}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        z = _rows(objective.features(const, batch.x)[0])
        return {
            "sum": carry["sum"] + batch.weight @ z,
            "examples": carry["examples"] + batch.weight.sum(),
        }

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return {MEAN: carry["sum"] / carry["examples"]}, None

    return Program(start, step, finish, Batches.whole(), "mean_features")


@serializable_program
def sgd_with_own_offset(
    local: LocalTraining, space: Space, kappa: float, momentum: float
) -> Program:
    """`sgd` of the model with the client's offset, which is trained in the same batches by SGD
    without momentum and stays in the client's state.

    Args:
        local: the objective and the settings of SGD.
        space: what the offset is added to.
        kappa: κ.
        momentum: the weight of a batch in the running mean of the features.
    """
    train, objective = sgd(local), local.objective
    head = Head.of(objective)

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        w = {name: value for name, value in params.items() if name != MEAN}
        const, carry = train.start(broadcast, w, {})
        carry = carry | {OFFSET: memory[OFFSET]}
        if not kappa:
            return const, carry
        mean = params[MEAN]
        return const | {MEAN: mean}, carry | {"gap": torch.zeros_like(mean)}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        w, own, lr = strip_prefix("w", carry), carry[OFFSET], broadcast["lr"]
        gradient, statistics = loss_gradient(objective, head.shifted(w, own, space), batch)
        error = gradient[head.bias]
        of_own = error
        gap: Tree = {}
        if space == "features":  # the outputs are W (z + u) + b
            of_own = (w[head.weight] * error[..., None]).sum(-2)
            by_offset = error[..., None] * own[..., None, :]
            gradient = gradient | {head.weight: gradient[head.weight] + by_offset}
        if kappa:
            pull, gap = _pull(w, const[MEAN], carry["gap"], batch)
            gradient = {name: value + pull[name] for name, value in gradient.items()}
        if local.clip_norm:
            gradient = clip_gradient(gradient, local.clip_norm, of_own.ndim - 1)
        after, velocity = step_along(
            local,
            {name: w[name] for name in gradient},
            strip_prefix("optimizer", carry),
            gradient,
            lr,
        )
        return {
            **add_prefix("w", {name: (after | statistics)[name] for name in w}),
            **add_prefix("optimizer", velocity),
            OFFSET: own - lr * of_own,
            **gap,
        }

    def _pull(w: Tree, mean: Tensor, old: Tensor, batch: Batch) -> tuple[Tree, Tree]:
        """The gradient of the regularizer, and the running mean of the features minus z̄."""

        def penalty(trained: Tree) -> tuple[Tensor, Tensor]:
            z = _rows(objective.features(w | trained, batch.x)[0])
            gap = (1 - momentum) * old + momentum * (share_of(batch.weight) @ z - mean)
            return kappa / 2 * gap.square().sum(), gap.detach()

        pull, gap = grad(penalty, has_aux=True)({name: w[name] for name in objective.trained})
        return pull, {"gap": gap}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        return strip_prefix("w", carry), {OFFSET: carry[OFFSET]}

    if not kappa:  # the regularizer's gradient is of one client
        for function in (start, step, finish):
            natively_batched(function)
    return replace(
        train, start=start, step=step, finish=finish, name="sgd_with_own_offset", rng_stream="sgd"
    )


@serializable_program
def add_own_offset(objective: Objective, space: Space) -> Program:
    """The reply is the model with the client's offset in its last bias.

    Args:
        objective: the model and its loss.
        space: what the offset is added to.
    """
    head = Head.of(objective)
    return without_steps(
        lambda params, memory: head.shifted(params, memory[OFFSET], space), "add_own_offset"
    )
