"""Server optimizers: FedAvgM, Nesterov, FedAdagrad, FedAdam and FedYogi, and the mean of models
over rounds.

Hsu et al., Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019 (FedAvgM); Reddi et al., Adaptive Federated Optimization, ICLR 2021, Algorithm
2 (the others). With w the model of a cluster and Δ the difference between the mean of its clients'
models and w:

    FedAvgM:   m <- β m + Δ,              w <- w + η m
    Nesterov:  m <- β m + Δ,              w <- w + η (Δ + β m)
    others:    m <- β1 m + (1 - β1) Δ,    w <- w + η m / (√v + τ),    v = τ² at first
    FedAdagrad:    v <- v + Δ²
    FedAdam:       v <- β2 v + (1 - β2) Δ²
    FedYogi:       v <- v - (1 - β2) Δ² sign(v - Δ²)

η is `server.lr`; β and β1 are `server.momentum`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from fedclade.core.federation import Federation, ServerOptimizer, ServerUpdate
from fedclade.core.method_state import State
from fedclade.core.pytree import Tree, add_prefix, strip_prefix
from fedclade.errors import InvalidInputError

S = TypeVar("S", bound=State)

MOMENTUM, BETA2, TAU = 0.9, 0.99, 1e-3
NESTEROV_MOMENTUM = 0.7  # chosen with a prototype of Clade on digits, seeds 0 to 2
LR: dict[ServerOptimizer, float] = {  # measured, see docs/experiments.md
    "fedavg": 1.0,
    "fedavgm": 1.0,
    "nesterov": 1.0,
    "fedadagrad": 0.3,
    "fedadam": 0.03,
    "fedyogi": 0.03,
}
POWER = 8  # of the weights t^8 in the mean over rounds


def update_models(fed: Federation, state: S, means: Tree) -> S:
    """The state with the new model of each cluster, by the server's optimizer.

    Running statistics are those of the mean. A parameter whose mean equals its old value, because
    no client of the cluster replied, does not change, and neither do its moments.

    Args:
        fed: the federation, for `server_update`.
        state: the state before the update, whose clusters are those of `means`.
        means: (rows, …) the mean of the models of each cluster; the old model if no client replied.
    """
    update = fed.server_update
    if update.is_mean:
        return replace(state, models=means)
    has_changed = {
        name: (means[name] != old).reshape(len(old), -1).any(1)
        for name, old in state.models.items()
    }
    trained_rows = torch.stack(list(has_changed.values())).any(0)
    if not trained_rows.any():
        return state
    server_state = state.server_state or initial_server_state(update, state.models)
    first, second = strip_prefix("m", server_state), strip_prefix("v", server_state)
    models = dict(means)
    for name in first:
        w, rows = state.models[name], _like(has_changed[name], means[name])
        m, v = first[name], second.get(name)
        delta = means[name] - w
        new_m, new_v, step = _step(update, m, v, delta)
        models[name] = torch.where(rows, w + step, w)
        first[name] = torch.where(rows, new_m, m)
        if v is not None and new_v is not None:
            second[name] = torch.where(rows, new_v, v)
    new_state = add_prefix("m", first) | add_prefix("v", second)
    if update.serve_mean:
        rounds = server_state["rounds"] + trained_rows
        share = torch.where(trained_rows, _shares(rounds), 0.0)
        served = {
            name: torch.lerp(mean, models[name], _like(share.to(mean.dtype), mean))
            for name, mean in strip_prefix("mean", server_state).items()
        }
        new_state |= add_prefix("mean", served) | {"rounds": rounds}
    return replace(state, models=models, server_state=new_state)


def initial_server_state(update: ServerUpdate, models: Tree) -> Tree:
    """The server's state of models that have not been updated yet: moments of zero, v = τ².

    Args:
        update: the optimizer.
        models: (rows, …) the models.
    """
    state: Tree = {}
    trained = {name: value for name, value in models.items() if name not in update.statistics}
    if update.optimizer != "fedavg":
        state |= add_prefix("m", {name: torch.zeros_like(w) for name, w in trained.items()})
    if update.optimizer in ("fedadagrad", "fedadam", "fedyogi"):
        v = {name: torch.full_like(w, TAU**2) for name, w in trained.items()}
        state |= add_prefix("v", v)
    if update.serve_mean:
        first = next(iter(models.values()))
        state |= add_prefix("mean", {name: value.clone() for name, value in models.items()})
        state["rounds"] = torch.zeros(len(first), dtype=torch.int64, device=first.device)
    return state


def _step(
    update: ServerUpdate, m: Tensor, v: Tensor | None, delta: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The new moments, and the step of the model."""
    lr = LR[update.optimizer] if update.lr is None else update.lr
    is_nesterov = update.optimizer == "nesterov"
    default = NESTEROV_MOMENTUM if is_nesterov else MOMENTUM
    beta = default if update.momentum is None else update.momentum
    if v is None:
        m = beta * m + delta
        return m, None, lr * (delta + beta * m if is_nesterov else m)
    m, square = beta * m + (1 - beta) * delta, delta.square()
    if update.optimizer == "fedadagrad":
        v = v + square
    elif update.optimizer == "fedadam":
        v = BETA2 * v + (1 - BETA2) * square
    else:
        v = v - (1 - BETA2) * square * torch.sign(v - square)
    return m, v, lr * m / (v.sqrt() + TAU)


def _shares(rounds: Tensor) -> Tensor:
    """(rows,) t^8 / Σ_{s ≤ t} s^8, the weight of the newest model in the mean of t models."""
    totals = [sum((s / t) ** POWER for s in range(1, t + 1)) or 1.0 for t in rounds.tolist()]
    return 1 / torch.tensor(totals, dtype=torch.float64, device=rounds.device)


def _like(rows: Tensor, tensor: Tensor) -> Tensor:
    """One value per row, in a shape that broadcasts with `tensor`."""
    return rows.view(-1, *[1] * (tensor.ndim - 1))


def served_state(state: S) -> S:
    """The state whose models are those that clients use: the means over the rounds if the server
    keeps them (`serve_mean`), else the models themselves.
    """
    mean = strip_prefix("mean", state.server_state)
    return replace(state, models={name: mean[name] for name in state.models}) if mean else state


def require_updated(fed: Federation, before: State, after: State) -> None:
    """Raise `InvalidInputError` if a method made new models without `update_models`, so that the
    setting would have no effect.

    Args:
        fed: the federation of the method.
        before: the state before a round.
        after: the state after it.
    """
    update = fed.server_update
    if update.is_mean or after.server_state or _is_same(before.models, after.models):
        return
    field, value = "server.optimizer", str(update.optimizer)
    if update.optimizer == "fedavg":
        field, value = "server.serve", "mean"
    raise InvalidInputError(
        f"{field} = '{value}': the method does not apply it. Make its new models with"
        " fedclade.aggregation.update_models.",
        field,
    )


def _is_same(first: Tree, second: Tree) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )
