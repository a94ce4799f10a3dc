"""What CFL asks of clients beside SGD: models as vectors, and vectors in a secret order of
coordinates.

The secret order is the third part of CFL's Algorithm 5: lengths of updates and angles between them
do not change when all clients permute the coordinates of what they send in the same way, so a
server can average models and compare clients without seeing which number is which weight.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fedclade.core.program import Finish, Program, Start
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, flatten, tree_map, unflatten
from fedclade.core.rng import client_keys, fold_in


@lru_cache(maxsize=8)
def secret_order(secret: int, size: int) -> Tensor:
    """The permutation of `size` coordinates that all clients with this secret share."""
    return client_keys(fold_in(secret, "order"), torch.arange(size)).argsort(stable=True)


def concealed(models: Tree, secret: int) -> Tree:
    """A stack of models, the coordinates of each in the secret order, under the same names and in
    the same shapes.
    """
    rows = flatten(models)
    return unflatten(rows[:, secret_order(secret, rows.shape[1]).to(rows.device)], models)


def revealed(models: Tree, secret: int) -> Tree:
    """What `concealed` hid."""
    rows = flatten(models)
    return unflatten(rows[:, secret_order(secret, rows.shape[1]).argsort().to(rows.device)], models)


@serializable_program
def in_secret_order(program: Program, secret: int) -> Program:
    """A program that is sent a model and replies with one, for a server that does not see
    coordinates: the client puts the model into order first and the reply into the secret order
    last.

    The name stays: the server asks for the same thing, and the client's batches are the same. The
    secret is in the client's functions only.
    """
    start, finish = _in_secret_order(program.start, program.finish, secret)
    return replace(program, start=start, finish=finish)


@lru_cache(maxsize=32)
def _in_secret_order(plain_start: Start, plain_finish: Finish, secret: int) -> tuple[Start, Finish]:
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return plain_start(broadcast, _row(revealed(_as_stack(params), secret)), memory)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        reply, memory = plain_finish(broadcast, const, carry)
        return _row(concealed(_as_stack(reply), secret)), memory

    return start, finish


@serializable_program
def from_secret_order(program: Program, secret: int) -> Program:
    """A program that is sent a stack of models in the secret order, and replies with what is no
    model.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return program.start(broadcast, revealed(params, secret), memory)

    return replace(program, start=start)


def _as_stack(model: Tree) -> Tree:
    return tree_map(lambda value: value[None], model)


def _row(models: Tree) -> Tree:
    return tree_map(lambda value: value[0], models)
