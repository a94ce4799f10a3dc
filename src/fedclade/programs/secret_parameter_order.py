"""Models whose parameters are in a secret order, for CFL.

The secret order is the third part of CFL's Algorithm 5: lengths of updates and angles between them
do not change if all clients permute the coordinates in the same way. So a server can average models
and compare clients without knowing which number is which weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fedclade.core.program import Program
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, flatten, tree_map, unflatten
from fedclade.core.rng import client_keys, fold_in


@lru_cache(maxsize=8)
def secret_order(secret: int, size: int) -> Tensor:
    """The permutation of `size` coordinates that all clients with this secret share."""
    return client_keys(fold_in(secret, "order"), torch.arange(size)).argsort(stable=True)


def concealed(models: Tree, secret: int, statistics: tuple[str, ...] = ()) -> Tree:
    """A stack of models, the coordinates of each in the secret order, under the same names and in
    the same shapes.

    Args:
        models: the stack of models.
        secret: the secret of the clients.
        statistics: names of running statistics. They have an order of their own, because the server
            compares clients by weights only.
    """
    return _reordered(models, statistics, lambda size: secret_order(secret, size))


def revealed(models: Tree, secret: int, statistics: tuple[str, ...] = ()) -> Tree:
    """The inverse of `concealed`."""
    return _reordered(models, statistics, lambda size: secret_order(secret, size).argsort())


def _reordered(models: Tree, statistics: tuple[str, ...], order: Callable[[int], Tensor]) -> Tree:
    result: Tree = {}
    for names in ([name for name in models if name not in statistics], statistics):
        if names:
            part = {name: models[name] for name in names}
            rows = flatten(part)
            result |= unflatten(rows[:, order(rows.shape[1]).to(rows.device)], part)
    return result


@serializable_program
def in_secret_order(program: Program, secret: int, statistics: tuple[str, ...] = ()) -> Program:
    """A program that gets a model and replies with one, for a server that only sees permuted
    models: the client restores the order first and permutes the reply last.

    The name does not change, so that the client's batches are the same. Only the client's functions
    use the secret.

    Args:
        program: the program.
        secret: the secret that all clients share.
        statistics: the names of running statistics, as in `concealed`.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return program.start(
            broadcast, _row(revealed(_as_stack(params), secret, statistics)), memory
        )

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        reply, memory = program.finish(broadcast, const, carry)
        return _row(concealed(_as_stack(reply), secret, statistics)), memory

    return replace(program, start=start, finish=finish)


@serializable_program
def from_secret_order(program: Program, secret: int, statistics: tuple[str, ...] = ()) -> Program:
    """A program that gets a stack of permuted models and does not reply with a model.

    Args:
        program: the program.
        secret: the secret that all clients share.
        statistics: the names of running statistics, as in `concealed`.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return program.start(broadcast, revealed(params, secret, statistics), memory)

    return replace(program, start=start)


def _as_stack(model: Tree) -> Tree:
    return tree_map(lambda value: value[None], model)


def _row(models: Tree) -> Tree:
    return tree_map(lambda value: value[0], models)
