"""A mixture of the outputs of a client's own model and of the shared one: training as in the code
of APFL's authors, and predictions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.func import grad

from fedclade.core.functional_model import Batch
from fedclade.core.inputs import outputs_tensor
from fedclade.core.local_sgd import (
    clip_gradient,
    initial_optimizer_state,
    sgd,
    sgd_step,
    step_along,
)
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.module_copy import copy_sharing, frozen_parameters
from fedclade.core.program import Program, without_steps
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix, tree_map
from fedclade.programs.own_model import OWN, TRAINED, trained_client_state

ALPHA = "alpha"
"""The name of α in a client's state."""

SHARED = "shared"
"""The prefix of the shared model in an `OutputMixture`; that of the own one is `OWN`."""

PULL = 0.02  # of α toward 0


class OutputMixture(nn.Module):
    """α h(x; v) + (1 - α) h(x; w): outputs are mixed, not weights.

    Args:
        module: a model of the form of h.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        frozen = frozen_parameters(module)
        self.own = copy_sharing(module, frozen)
        self.shared = copy_sharing(module, frozen)
        device = next(module.parameters()).device
        self.alpha = nn.Parameter(torch.full((), 0.5, device=device))

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        own = outputs_tensor(self.own(*args, **kwargs), self.own)
        shared = outputs_tensor(self.shared(*args, **kwargs), self.shared)
        return self.alpha * own + (1 - self.alpha) * shared


@serializable_program
def adaptive_output_mixture(local: LocalTraining) -> Program:
    """In each batch a step of w along ∇F(w), then one of v along ∇_v L, where L is the loss of the
    outputs α h(v) + (1 - α) h(w). After the first batch also a step of α along
    ⟨v - w, α ∇_v L + (1 - α) ∇_w L⟩ + 0.02 α. v and α stay in the client's state; the reply is w.

    Args:
        local: the objective and the settings of SGD.
    """
    train, objective = sgd(local), local.objective

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        v = strip_prefix(OWN, memory)
        trained = {name: v[name] for name in objective.trained}
        carry = train.start(broadcast, tree_map(torch.clone, params), {})[1] | add_prefix("v", v)
        carry |= add_prefix("own_optimizer", initial_optimizer_state(local, trained))
        return {TRAINED: memory[TRAINED]}, carry | {
            ALPHA: memory[ALPHA],
            "is_first": torch.ones_like(memory[ALPHA]),
        }

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        lr, alpha, v = broadcast["lr"], carry[ALPHA], strip_prefix("v", carry)
        w, velocity = sgd_step(
            objective,
            strip_prefix("w", carry),
            strip_prefix("optimizer", carry),
            batch,
            lr,
            momentum=local.momentum,
            weight_decay=local.weight_decay,
            clip_norm=local.clip_norm,
        )

        def loss(own: Tree, shared: Tree) -> tuple[Tensor, Tree]:
            outputs, statistics = objective.training_outputs(
                v | own, batch.x, batch.key, batch.weight
            )
            others, _ = objective.training_outputs(w | shared, batch.x, batch.key, batch.weight)
            losses = objective.example_loss(alpha * outputs + (1 - alpha) * others, batch.y)
            return (losses * batch.weight).sum() / batch.weight.sum(), statistics

        trained = [{name: tree[name] for name in objective.trained} for tree in (v, w)]
        (of_v, of_w), statistics = grad(loss, argnums=(0, 1), has_aux=True)(*trained)
        along = clip_gradient(of_v, local.clip_norm) if local.clip_norm else of_v
        own, own_state = step_along(
            local, trained[0], strip_prefix("own_optimizer", carry), along, lr
        )
        slope = PULL * alpha + sum(
            ((own[name] - w[name]) * (alpha * of_v[name] + (1 - alpha) * of_w[name])).sum()
            for name in objective.trained
        )
        return {
            **add_prefix("w", w),
            **add_prefix("optimizer", velocity),
            **add_prefix("v", {name: (own | statistics)[name] for name in v}),
            **add_prefix("own_optimizer", own_state),
            ALPHA: (alpha - lr * carry["is_first"] * slope).clamp(0, 1),
            "is_first": torch.zeros_like(alpha),
        }

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        own = trained_client_state(strip_prefix("v", carry), const[TRAINED])
        return strip_prefix("w", carry), own | {ALPHA: carry[ALPHA]}

    return replace(
        train,
        start=start,
        step=step,
        finish=finish,
        name="adaptive_output_mixture",
        rng_stream="sgd",
    )


@serializable_program
def serve_output_mixture() -> Program:
    """The parameters of a client's `OutputMixture`; α is 0 if the client never trained."""

    def mixture(params: Tree, memory: Tree) -> Tree:
        own = add_prefix(OWN, strip_prefix(OWN, memory))
        parts = {name.replace("/", ".", 1): value for name, value in own.items()}
        return params | parts | {ALPHA: memory[ALPHA] * memory[TRAINED]}

    return without_steps(mixture, "output_mixture")
