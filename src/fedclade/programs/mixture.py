"""Mixtures of models: training by EM, and predictions."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import vmap

from fedclade.core.batching import Batches
from fedclade.core.functional_model import Batch, ClientStackedBatch, Objective
from fedclade.core.inputs import outputs_tensor
from fedclade.core.local_sgd import initial_optimizer_state, optimizer_step
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.module_copy import copy_sharing, frozen_parameters
from fedclade.core.program import Program, natively_batched
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, stack, strip_prefix
from fedclade.core.rng import hash_bits
from fedclade.programs.client_slots import SLOTS, slot_rows, write_rows

SHARES = "label_shares"
"""The name of C_y(m) of FedRC among the tensors that a client receives and sends."""
_LEAST = 1e-30  # above 0, since a weight of 0 marks padding


class Mixture(nn.Module):
    """log Σ_m π_m softmax h_m(x): probabilities are mixed, not outputs.

    Args:
        module: a model of the form of the h_m.
        components: K.
    """

    def __init__(self, module: nn.Module, components: int) -> None:
        super().__init__()
        shared = frozen_parameters(module)
        self.components = nn.ModuleList(copy_sharing(module, shared) for _ in range(components))
        device = next(module.parameters()).device
        self.pi = nn.Parameter(torch.full((components,), 1 / components, device=device))

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        parts = [outputs_tensor(h(*args, **kwargs), h) for h in self.components]
        log_p = torch.stack(parts, -1).log_softmax(-2)
        return (log_p + self.pi.log()).logsumexp(-1)


def log_responsibilities(
    objective: Objective, models: Tree, log_pi: Tensor, shares: Tensor | None, batch: Batch
) -> Tensor:
    """(B, K) log π_m - ℓ(h_m(x_i), y_i), with FedRC also - log C_{y_i}(m), for one client: the
    logarithm of q_i(m) up to a constant.
    """

    def losses(params: Tree) -> Tensor:
        return objective.example_loss(objective.outputs(params, batch.x), batch.y)

    scores = log_pi - vmap(losses)(models).T
    return scores if shares is None else scores - shares.log().T[batch.y]


@serializable_program
def em_sgd(local: LocalTraining, components: int, reweight: bool) -> Program:
    """One round of a client: q_i(m) of every sample under the models that it received, local
    training of each model m on Σ_i q_i(m) ℓ_i, and the new π, which stays in its state.

    A batch has no numbers of its samples, so each step computes q_i(m) of its samples from the
    received models: the weights cannot get to other samples.

    Args:
        local: the objective and the settings of the optimizer.
        components: K.
        reweight: whether to divide q_i(m) by C_{y_i}(m) (FedRC).
    """
    objective, numbers = local.objective, range(components)

    def member(models: Tree, m: int) -> Tree:
        return {name: value[:, m] for name, value in models.items()}

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        received = {name: value for name, value in params.items() if name != SHARES}
        pi = _or_uniform(memory["pi"])
        carry = {"q": torch.zeros_like(pi), "examples": torch.zeros_like(pi[:, 0])}
        for m in numbers:
            w = {name: value.clone() for name, value in member(received, m).items()}
            carry |= add_prefix(f"w{m}", w)
            carry |= add_prefix(f"optimizer{m}", initial_optimizer_state(local, w))
        const = add_prefix("received", received) | {"log_pi": pi.log()}
        if reweight:
            const[SHARES] = params[SHARES]
            carry[SHARES] = torch.zeros_like(params[SHARES])
        return const, carry

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        assert isinstance(batch, ClientStackedBatch)
        shares = const.get(SHARES)
        scores = vmap(log_responsibilities, in_dims=(None, 0, 0, None if shares is None else 0, 0))(
            objective, strip_prefix("received", const), const["log_pi"], shares, Batch(*batch)
        )
        q, weight = scores.softmax(-1), batch.weight
        real = (weight > 0).to(q.dtype)
        after = {
            "q": carry["q"] + (q * real[..., None]).sum(1),
            "examples": carry["examples"] + real.sum(-1),
        }
        if reweight:
            counted = (q * real[..., None]).transpose(1, 2)
            classes = torch.arange(carry[SHARES].shape[-1], device=q.device)
            of_class = (batch.y[..., None] == classes).to(q.dtype)
            after[SHARES] = carry[SHARES] + counted @ of_class
        for m in numbers:
            weighted = torch.where(weight > 0, (weight * q[..., m]).clamp_min(_LEAST), 0.0)
            key = batch.key if m == 0 else hash_bits(batch.key, m)
            # A batch's loss is divided by the sum of its weights; here by that without q.
            w, state = optimizer_step(
                local,
                strip_prefix(f"w{m}", carry),
                strip_prefix(f"optimizer{m}", carry),
                ClientStackedBatch(batch.x, batch.y, weighted, key),
                broadcast["lr"],
                gradient_scale=weighted.sum(-1) / weight.sum(-1),
            )
            after |= add_prefix(f"w{m}", w) | add_prefix(f"optimizer{m}", state)
        return after

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        rows = [strip_prefix(f"w{m}", carry) for m in numbers]
        reply = {name: torch.stack([row[name] for row in rows], 1) for name in rows[0]}
        if reweight:
            reply[SHARES] = carry[SHARES] / carry["examples"][:, None, None]
        return reply, {"pi": carry["q"] / carry["examples"][:, None]}

    return Program(start, step, finish, local.batches, "em_sgd", {"lr": local.lr}, rng_stream="sgd")


def _or_uniform(pi: Tensor) -> Tensor:
    """π, or equal parts for a client that has none yet (zeros)."""
    return torch.where(pi.sum(-1, keepdim=True) > 0, pi, 1 / pi.shape[-1])


@serializable_program
def fit_mixture(objective: Objective, components: int, steps: int) -> Program:
    """The parameters of a client's `Mixture`. A client that has trained keeps its π. Another client
    learns π by E and M steps on its training samples; the models stay as they are.

    Args:
        objective: the model and its loss.
        components: K.
        steps: the number of E and M steps.
    """
    numbers = range(components)

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        slots = params[SLOTS]
        scores = params["pi"].new_zeros(len(slots), components)
        return params, {"scores": scores, "count": slots.new_zeros((), dtype=torch.int64)}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        models = stack([_component(const, m) for m in numbers])
        zeros = torch.zeros_like(const["pi"])
        scores = log_responsibilities(objective, models, zeros, const.get(SHARES), batch)
        rows = slot_rows(carry["count"], batch.weight, len(carry["scores"]))
        count = carry["count"] + (batch.weight > 0).sum()
        return {"scores": write_rows(carry["scores"], rows, scores), "count": count}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        scores, count = carry["scores"], carry["count"]
        real = (torch.arange(len(scores), device=scores.device) < count).to(scores.dtype)
        pi = torch.full_like(const["pi"], 1 / components)
        for _ in range(steps):
            q = (scores + pi.log()).softmax(-1)
            pi = (q * real[:, None]).sum(0) / count
        pi = torch.where(const["pi"].sum() > 0, const["pi"], pi)
        return {n: v for n, v in const.items() if n not in (SLOTS, SHARES)} | {"pi": pi}, None

    return Program(start, step, finish, Batches.whole(), "fit_mixture")


def _component(params: Tree, m: int) -> Tree:
    """The parameters of model m of a `Mixture`."""
    start = f"components.{m}."
    return {n.removeprefix(start): v for n, v in params.items() if n.startswith(start)}
