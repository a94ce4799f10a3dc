"""A client's own model in addition to the shared one, in its state."""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.core.local_sgd import per_client
from fedclade.core.program import Program, without_steps
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix, tree_map

OWN = "own"
"""The prefix of the client's own model in its state."""

TRAINED = "trained"
"""The name of the number in a client's state that is 1 after its first training, else 0."""


def untrained_client_state(params: Tree) -> Tree:
    """The state of a client that never trained: its own model is the initial model."""
    return add_prefix(OWN, params) | {TRAINED: torch.zeros(())}


def trained_client_state(own: Tree, trained: Tensor) -> Tree:
    """The state of a client after training.

    Args:
        own: the client's own model.
        trained: the number `TRAINED` before training, which gives the shape.
    """
    return add_prefix(OWN, own) | {TRAINED: torch.ones_like(trained)}


@serializable_program
def serve_own_model() -> Program:
    """The reply is the client's own model; the shared model if the client never trained."""

    def own_or_shared(params: Tree, memory: Tree) -> Tree:
        own, trained = strip_prefix(OWN, memory), memory[TRAINED]
        return tree_map(
            lambda shared, own: torch.where(per_client(trained, own) > 0, own, shared), params, own
        )

    return without_steps(own_or_shared, "own_model")
