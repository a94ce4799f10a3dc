"""Per-FedAvg: a shared model that each client adapts by one gradient step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from fedclade.core.batching import Batches
from fedclade.core.federation import Federation
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.local_sgd import sgd, sgd_step
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.method_state import State
from fedclade.core.program import Program, natively_batched
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix, tree_map
from fedclade.errors import require
from fedclade.methods.base import check_choices
from fedclade.methods.fedavg import FedAvg, fedavg_round

Variant: TypeAlias = Literal["first-order", "hessian-free"]
DELTA = 1e-3  # δ of the hessian-free variant


@serializable_program
def meta_sgd(local: LocalTraining, alpha: float, variant: Variant) -> Program:
    """SGD on the loss after one more gradient step. Each step uses two batches, three in the
    hessian-free variant.

    Args:
        local: the objective and the settings of SGD.
        alpha: α, the learning rate of the additional step.
        variant: how the second derivative is treated.
    """
    train, objective = sgd(local), local.objective

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        w, alpha = strip_prefix("w", carry), broadcast["alpha"]
        ahead, second = objective.add_scaled_gradient(w, -alpha, w, batch.member(0)), None
        if variant == "hessian-free":
            g = objective.gradient(ahead, batch.member(1))
            up, down = (
                objective.gradient(w | {n: move(w[n], g[n]) for n in g}, batch.member(2))
                for move in (_forward, _back)
            )
            second = tree_map(lambda up, down: -alpha * (up - down) / (2 * DELTA), up, down)
        params, velocity = sgd_step(
            objective,
            w,
            strip_prefix("optimizer", carry),
            batch.member(1),
            broadcast["lr"],
            momentum=local.momentum,
            weight_decay=local.weight_decay,
            clip_norm=local.clip_norm,
            plus=second,
            at=ahead,
        )
        return add_prefix("w", params) | add_prefix("optimizer", velocity)

    return replace(
        train,
        step=step,
        batches=replace(local.batches, group=2 if variant == "first-order" else 3),
        name="meta_sgd",
        rng_stream="sgd",
        hyperparams={**train.hyperparams, "alpha": alpha},
    )


def _forward(w: Tensor, g: Tensor) -> Tensor:
    return w + DELTA * g


def _back(w: Tensor, g: Tensor) -> Tensor:
    return w - DELTA * g


@serializable_program
def adapt(objective: Objective, alpha: float) -> Program:
    """One gradient step on all of the client's training examples: w - α ∇f_i(w).

    Args:
        objective: the model and its loss.
        alpha: α.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        total = {name: torch.zeros_like(params[name]) for name in objective.trained}
        return params, total | {
            "examples": torch.zeros((), device=next(iter(params.values())).device)
        }

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        total, count = {name: carry[name] for name in objective.trained}, batch.examples
        return objective.add_scaled_gradient(total, count, const, batch, overwrite=True) | {
            "examples": carry["examples"] + count
        }

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        adapted = {
            name: const[name] - broadcast["alpha"] * carry[name] / carry["examples"]
            for name in objective.trained
        }
        return const | adapted, None

    return Program(start, step, finish, Batches.whole(), "adapt", hyperparams={"alpha": alpha})


@dataclass(frozen=True)
class PerFedAvg(FedAvg):
    """The shared model w minimizes the mean of f_i(w - α ∇f_i(w)), the clients' losses after one
    local gradient step. In each local step client i computes w̃ = w - α ∇f_i(w; D1), and then w <- w
    - β ∇f_i(w̃; D2), where β is `local.lr`. D1, D2 and D3 are successive batches of
    `local.batch_size`.

    A client uses, and is evaluated with, the adapted model w - α ∇f_i(w), with the gradient on all
    its training examples. A client with a single batch uses it for both steps. With α = 0 it is
    FedAvg on every second batch.

    Args:
        alpha: α.
        variant: "first-order" omits the second derivative, as above. "hessian-free" approximates it
            by differences: with g = ∇f_i(w̃; D2), w <- w - β (g - α [∇f_i(w + δg; D3) -
            ∇f_i(w - δg; D3)] / 2δ).

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.PerFedAvg(alpha=0.05), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "per_fedavg"
    title: ClassVar[str] = "Per-FedAvg: a shared model that each client adapts by one gradient step"
    paper: ClassVar[str] = (
        "Fallah, Mokhtari and Ozdaglar, Personalized Federated Learning with Theoretical"
        " Guarantees, NeurIPS 2020"
    )
    no_guarded_layer: ClassVar[str] = "adapts its model on all samples of a client"
    needs_sgd: ClassVar[str] = "is defined by steps along a gradient"

    alpha: float = 0.01
    variant: Variant = "first-order"

    def __post_init__(self) -> None:
        check_choices(self)
        require(self.alpha >= 0, "method.alpha", self.alpha, "must be at least 0")

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        return fedavg_round(fed, meta_sgd(self.local, self.alpha, self.variant), state, cohort, key)

    def personalization_program(self) -> Program:
        return adapt(self.local.objective, self.alpha)
