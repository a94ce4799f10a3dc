"""What CFL asks of clients beside SGD: models as vectors, vectors in a secret order of coordinates, losses under several models.

The secret order is the third part of CFL's Algorithm 5: lengths of updates and angles between them do not change when all clients
permute the coordinates of what they send in the same way, so a server can average models and compare clients without seeing which
number is which weight.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from fedclade.client.keys import client_keys, fold
from fedclade.client.objective import Batch, Objective
from fedclade.client.plan import Batches
from fedclade.client.programs import Finish, Program, Start
from fedclade.client.tree import Tree, tree_map


def vectors(models: Tree) -> Tensor:
    """(rows, P): every model of a stack as one vector."""
    return torch.cat([value.flatten(1) for value in models.values()], 1)


def models_of(rows: Tensor, like: Tree) -> Tree:
    """What `vectors` put together; `like` is a stack of models of the same form."""
    parts = torch.split(rows, [value[0].numel() for value in like.values()], 1)
    return {name: part.reshape(-1, *like[name].shape[1:]).to(like[name].dtype) for name, part in zip(like, parts, strict=True)}


@lru_cache(maxsize=8)
def secret_order(secret: int, size: int) -> Tensor:
    """The permutation of `size` coordinates that all clients with this secret share."""
    return client_keys(fold(secret, "order"), torch.arange(size)).argsort(stable=True)


def concealed(models: Tree, secret: int) -> Tree:
    """A stack of models, the coordinates of each in the secret order, under the same names and in the same shapes."""
    rows = vectors(models)
    return models_of(rows[:, secret_order(secret, rows.shape[1]).to(rows.device)], models)


def revealed(models: Tree, secret: int) -> Tree:
    """What `concealed` hid."""
    rows = vectors(models)
    return models_of(rows[:, secret_order(secret, rows.shape[1]).argsort().to(rows.device)], models)


def in_secret_order(program: Program, secret: int) -> Program:
    """A program that is sent a model and replies with one, for a server that does not see coordinates: the client puts the model into
    order first and the reply into the secret order last.

    The name stays: the server asks for the same thing, and the client's batches are the same. The secret is in the client's functions only.
    """
    start, finish = _in_secret_order(program.start, program.finish, secret)
    return replace(program, start=start, finish=finish)


@lru_cache(maxsize=32)
def _in_secret_order(plain_start: Start, plain_finish: Finish, secret: int) -> tuple[Start, Finish]:
    def start(shared: Tree, mine: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return plain_start(shared, _row(revealed(_as_stack(mine), secret)), memory)

    def finish(shared: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        reply, memory = plain_finish(shared, const, carry)
        return _row(concealed(_as_stack(reply), secret)), memory

    return start, finish


def _as_stack(model: Tree) -> Tree:
    return tree_map(lambda value: value[None], model)


def _row(models: Tree) -> Tree:
    return tree_map(lambda value: value[0], models)


@lru_cache(maxsize=32)
def losses(objective: Objective, secret: int | None = None) -> Program:
    """(R,) the sum of the losses of all of a client's examples under each of the R models that it is sent as one stack.

    With a secret the models come in the secret order of coordinates.
    """

    def start(shared: Tree, mine: Tree, memory: Tree) -> tuple[Tree, Tree]:
        first = next(iter(mine.values()))
        zero = torch.zeros(len(first), dtype=torch.float64, device=first.device)
        return mine if secret is None else revealed(mine, secret), {"loss": zero}

    def step(shared: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        def total(model: Tree) -> Tensor:
            return (objective.example_loss(objective.outputs(model, batch.x), batch.y) * batch.weight).sum(dtype=torch.float64)

        models = [tree_map(lambda value, row=row: value[row], const) for row in range(len(carry["loss"]))]
        return {"loss": carry["loss"] + torch.stack([total(model) for model in models])}

    def finish(shared: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        return carry, None

    return Program(start, step, finish, Batches.whole(), "losses")
