"""The class prior of a client: log of its own class shares, added to the outputs in training and in
use (label shift). Only the last bias of the model changes, so nothing is sent for it.

For p_i(y | x) ∝ p(x | y) p_i(y), a model whose outputs have o_i = log(p_i(y) / π(y)) added learns
p(x | y) from every client, whatever classes the client has.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.core.batching import Batches, Part
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.local_sgd import sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.program import AnyProgram, Program, chain, natively_batched, without_steps
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, strip_prefix, tree_map
from fedclade.programs.gradient_signature import projection

OFFSET = "class_offset"
"""The name of o_i in a client's state."""


@serializable_program
def class_statistics(objective: Objective, size: int, key: int) -> Program:
    """Class counts, class-conditional sums of `size` numbers of the features, and their scatter
    within classes. Only their sums over clients are needed. All are 0 for labels that are no
    classes of samples, such as sequences.

    Args:
        objective: the model and its loss.
        size: the numbers of a class-conditional mean.
        key: the randomness of the projection of the features.
    """
    head = objective.head_layer()
    classes = head.out_features
    onto = projection(key, head.in_features, size, head.weight.device)

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        zero = torch.zeros(classes, size, dtype=torch.float64, device=onto.device)
        return params, {"counts": zero[:, 0], "sum": zero, "outer": zero.T @ zero}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        h, z = objective.features(const, batch.x)
        if batch.y.ndim != 1 or z.shape[1:] != (classes,):
            return carry
        u = ((h.flatten(1, -2).mean(1) if h.ndim > 2 else h) @ onto).double()
        is_class = F.one_hot(batch.y, classes).double() * batch.weight[:, None]
        block = {
            "counts": is_class.sum(0),
            "sum": is_class.T @ u,
            "outer": (u * batch.weight[:, None]).T @ u,
        }
        return tree_map(torch.add, carry, block)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        counts, total = carry["counts"], carry["sum"]
        mean = total / counts.clamp_min(1)[:, None]
        n = counts.sum()
        reply = {
            "counts": counts,
            "sum": total,
            "scatter": carry["outer"] - mean.T @ total,
            # the degrees of freedom of the scatter
            "freedom": n - (counts > 0).sum(),
            # n times the chance that two samples of the client are of one class
            "same_class": (counts * (counts - 1)).sum() / (n - 1).clamp_min(1),
            "counts_squared": (counts * counts).sum(),
            "n_squared": n * n,
            "noise": n / (n - 1).clamp_min(1),
        }
        return tree_map(lambda value: value.float(), reply), None

    return Program(start, step, finish, Batches.whole(), "class_statistics")


@serializable_program
def keep_class_offset(classes: int) -> Program:
    """The client keeps o_ic = log[(n_ic + κ π_c) / ((n_i + κ) π_c)]. Its shares n_ic / n_i are
    drawn towards those of all clients, π ("prior"), as far as they differ by chance (κ, "kappa").
    If κ is infinite o_i is 0.

    Args:
        classes: the number of classes C.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        counts = torch.zeros(classes, device=broadcast["prior"].device)
        return memory, {"counts": counts}

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        is_class = F.one_hot(batch.y, classes).to(batch.weight.dtype)
        return {"counts": carry["counts"] + batch.weight @ is_class}

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        n, prior, kappa = carry["counts"], broadcast["prior"], broadcast["kappa"]
        offset = torch.log((n + kappa * prior) / ((n.sum() + kappa) * prior))
        return {}, const | {OFFSET: torch.where(kappa.isinf(), 0.0, offset)}

    return Program(start, step, finish, Batches.whole(), "keep_class_offset")


@serializable_program
def sgd_with_offset(local: LocalTraining, bias: str, part: Part = "all") -> Program:
    """`sgd` of the model with o_i added to its last bias. It is subtracted again before the weights
    are sent.

    Args:
        local: the objective and the settings of the optimizer.
        bias: the name of the last bias.
        part: the client's samples to train on, see `Batches`.
    """
    train = sgd(local, part=part)

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        const, carry = train.start(broadcast, _shifted(params, bias, memory[OFFSET]), {})
        return const | {OFFSET: memory[OFFSET]}, carry

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return _shifted(strip_prefix("w", carry), bias, -const[OFFSET]), None

    return replace(train, start=start, finish=finish, name="sgd_with_offset", rng_stream="sgd")


@serializable_program
def add_class_offset(bias: str) -> Program:
    """The reply is the model with o_i added to its last bias: the model that a client uses.

    Args:
        bias: the name of the last bias.
    """
    return without_steps(
        lambda params, memory: _shifted(params, bias, memory[OFFSET]), "add_class_offset"
    )


def _shifted(params: Tree, bias: str, offset: Tensor) -> Tree:
    return params | {bias: params[bias] + offset}


@serializable_program
def with_class_offset(bias: str, program: AnyProgram) -> AnyProgram:
    """A program on the model that a client uses, see `add_class_offset`.

    Args:
        bias: the name of the last bias.
        program: the program.
    """
    return chain(add_class_offset(bias), program, lambda _, params, shifted: (shifted, {}))
