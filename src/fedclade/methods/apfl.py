"""APFL: each client uses a mixture of its own model and the shared one, and learns how much."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedclade.core.federation import Federation, ModelAssignment
from fedclade.core.functional_model import Batch
from fedclade.core.local_sgd import (
    clip_gradient,
    initial_optimizer_state,
    loss_gradient,
    per_client,
    sgd,
    sgd_step,
    step_along,
)
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.method_state import State
from fedclade.core.program import Program, natively_batched, without_steps
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix, tree_map
from fedclade.errors import require
from fedclade.methods.base import check_choices
from fedclade.methods.fedavg import FedAvg, fedavg_round
from fedclade.programs.output_mixture import (
    ALPHA,
    SHARED,
    OutputMixture,
    adaptive_output_mixture,
    serve_output_mixture,
)
from fedclade.programs.own_model import OWN, TRAINED, trained_client_state, untrained_client_state


def mixed(alpha: Tensor, own: Tree, shared: Tree) -> Tree:
    """α v + (1 - α) w, of one client or of a stack of clients."""
    return tree_map(
        lambda v, w: w + per_client(alpha, v) * (v - w), own, {name: shared[name] for name in own}
    )


@serializable_program
def adaptive_mixture(local: LocalTraining) -> Program:
    """Trains w, v and α in the same batches. v and α stay in the client's state; the reply is w.

    Args:
        local: the objective and the settings of SGD.
    """
    train, objective = sgd(local), local.objective

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        v = strip_prefix(OWN, memory)
        trained = {name: v[name] for name in objective.trained}
        carry = train.start(broadcast, tree_map(torch.clone, params), {})[1] | add_prefix("v", v)
        carry |= add_prefix("own_optimizer", initial_optimizer_state(local, trained))
        return {TRAINED: memory[TRAINED]}, carry | {ALPHA: memory[ALPHA]}

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        lr, alpha = broadcast["lr"], carry[ALPHA]
        w, v = strip_prefix("w", carry), strip_prefix("v", carry)
        gradient, statistics = loss_gradient(objective, mixed(alpha, v, w), batch)
        difference = torch.stack(
            [((v[name] - w[name]) * g).flatten(alpha.ndim).sum(-1) for name, g in gradient.items()]
        ).sum(0)
        of_v = tree_map(lambda g: per_client(alpha, g) * g, gradient)
        if local.clip_norm:
            of_v = clip_gradient(of_v, local.clip_norm, alpha.ndim)
        own, own_state = step_along(
            local,
            {name: v[name] for name in gradient},
            strip_prefix("own_optimizer", carry),
            of_v,
            lr,
        )
        shared, velocity = sgd_step(
            objective,
            w,
            strip_prefix("optimizer", carry),
            batch,
            lr,
            momentum=local.momentum,
            weight_decay=local.weight_decay,
            clip_norm=local.clip_norm,
        )
        return {
            **add_prefix("w", shared),
            **add_prefix("optimizer", velocity),
            **add_prefix("v", {name: (own | statistics)[name] for name in v}),
            **add_prefix("own_optimizer", own_state),
            ALPHA: (alpha - lr * difference).clamp(0, 1),
        }

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        own = trained_client_state(strip_prefix("v", carry), const[TRAINED])
        return strip_prefix("w", carry), own | {ALPHA: carry[ALPHA]}

    return replace(
        train, start=start, step=step, finish=finish, name="adaptive_mixture", rng_stream="sgd"
    )


@serializable_program
def serve_mixture() -> Program:
    """The reply is α v + (1 - α) w with the current w; w if the client never trained."""

    def mixture(params: Tree, memory: Tree) -> Tree:
        alpha = memory[ALPHA] * memory[TRAINED]
        return params | mixed(alpha, strip_prefix(OWN, memory), params)

    return without_steps(mixture, "mixture")


@dataclass(frozen=True)
class APFL(FedAvg):
    """w is FedAvg's model. Client i has a model v_i of its own and a number α_i. It trains both in
    the same batches at the mixture v̄_i = α_i v_i + (1 - α_i) w_i, where w_i is its copy of w:

        v_i <- v_i - η α_i ∇F_i(v̄_i),   α_i <- α_i - η ⟨v_i - w_i, ∇F_i(v̄_i)⟩, cut to [0, 1].

    v_i and α_i stay with the client, which uses α_i v_i + (1 - α_i) w. A client that never trained
    uses w.

    This is the paper's algorithm: weights are mixed. In the authors' code outputs are mixed
    (`mix = "outputs"`): with L_i the loss of the outputs α_i h(x; v_i) + (1 - α_i) h(x; w_i), a
    batch is a step of w_i, then v_i <- v_i - η ∇_v L_i; and once a round, after the first batch,

        α_i <- α_i - η (⟨v_i - w_i, α_i ∇_v L_i + (1 - α_i) ∇_w L_i⟩ + 0.02 α_i), cut to [0, 1].

    The client then predicts with α_i h(x; v_i) + (1 - α_i) h(x; w).

    Args:
        alpha: α_i before the first training.
        mix: what is mixed: "weights" or "outputs".

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.APFL(alpha=0.25), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "apfl"
    title: ClassVar[str] = "APFL: a mixture of an own and the shared model, with learned shares"
    paper: ClassVar[str] = (
        "Deng, Kamani and Mahdavi, Adaptive Personalized Federated Learning, arXiv 2003.13461"
    )
    no_guarded_layer: ClassVar[str] = "gives each client its own model already"
    needs_sgd: ClassVar[str] = "is defined by steps along a gradient"

    alpha: float = 0.5
    mix: Literal["weights", "outputs"] = "weights"

    def __post_init__(self) -> None:
        check_choices(self)
        require(0 <= self.alpha <= 1, "method.alpha", self.alpha, "must be from 0 to 1")

    def why_no_own_batch_norm(self) -> str:
        return "has a whole model of its own for each client"

    def initial_client_state(self, params: Tree) -> Tree:
        return untrained_client_state(params) | {ALPHA: torch.tensor(float(self.alpha))}

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        train = adaptive_mixture if self.mix == "weights" else adaptive_output_mixture
        return fedavg_round(fed, train(self.local), state, cohort, key)

    def assign_models(self, state: State, ids: Tensor) -> ModelAssignment:
        assignment = super().assign_models(state, ids)
        if self.mix == "weights":
            return assignment
        shared = {f"{SHARED}.{name}": value for name, value in assignment.models.items()}
        return replace(assignment, models=shared)

    def personalization_program(self) -> Program:
        return serve_mixture() if self.mix == "weights" else serve_output_mixture()

    def served_module(self, module: nn.Module, weights: Tree | None = None) -> nn.Module:
        return module if self.mix == "weights" else OutputMixture(module)
