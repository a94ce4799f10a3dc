"""What a client contributes to a private sum: the change of the model, clipped to a norm."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fedclade.core.functional_model import Batch
from fedclade.core.program import (
    AnyProgram,
    ChainedProgram,
    is_natively_batched,
    natively_batched,
)
from fedclade.core.program_cache import changing_arguments
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix
from fedclade.errors import InvalidInputError

CLIPPED = "clipped"
"""The prefix of everything that is clipped. A reply under another name has no bound."""
COUNT = "count"
"""The output that counts the client: COUNT_SHARE · clip."""
WITHIN = "within"
"""The output that says whether the change was within the clip: ± WITHIN_SHARE · clip."""
COUNT_SHARE, WITHIN_SHARE = 0.3, 0.1
CLIP = "clip"
"""The hyperparameter."""
MODEL_PREFIXES = ("", "y/")
"""What stands before the names of weights in a reply; "y/" in SCAFFOLD's."""
_SENT = "sent"  # the prefix of the weights that the server sent, for the last program of a chain
_ROUNDING = 1 - 2.0**-20  # more than float32 loses in the clip and when a change is scaled


@serializable_program
@changing_arguments("clip")  # an adaptive clip has a new value in each round
def clipped_update(
    program: AnyProgram, clip: float, has_count: bool = False, has_within: bool = False
) -> AnyProgram:
    """The program, whose reply is clipped: the L2 norm of all its outputs together is at most
    `clip`. Of weights the reply has the change since the client received them. A reply that is not
    finite becomes zeros: if it were rejected, the rejection would reveal it.

    Args:
        program: the program.
        clip: the largest norm.
        has_count: whether the reply also counts the client (`COUNT`).
        has_within: whether the reply also has `WITHIN`.
    """
    if isinstance(program, ChainedProgram):
        # The reply of `connect` stays outside the prefix.
        second = clipped_update(program.second, clip, has_count, has_within)
        if isinstance(second, ChainedProgram):
            return replace(program, second=second, spec=None)

        def connect(broadcast: Tree, params: Tree, reply: Tree) -> tuple[Tree, Tree]:
            # `second` may start from weights that `first` has changed (FedALA).
            received, kept = program.connect(broadcast, params, reply)
            sent = {name: params[name] for name in received if name in params}
            return received | add_prefix(_SENT, sent), kept

        return replace(program, second=second, connect=connect, spec=None)
    fixed = COUNT_SHARE**2 * has_count + WITHIN_SHARE**2 * has_within
    share = math.sqrt(1 - fixed) * _ROUNDING
    is_stacked = is_natively_batched(program.finish)
    if is_stacked and not is_natively_batched(program.start):
        raise InvalidInputError(
            f"program '{program.name}': its finish is natively batched and its start is not, so its"
            " reply cannot be clipped. Use @natively_batched for both or for none.",
            program.name,
        )

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        own = {name: value for name, value in params.items() if not name.startswith(f"{_SENT}/")}
        const, carry = program.start(broadcast, own, memory)
        received = own | strip_prefix(_SENT, params)
        return add_prefix("const", const) | add_prefix("received", received), carry

    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        return program.step(broadcast, strip_prefix("const", const), carry, batch)

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        reply, written = program.finish(broadcast, strip_prefix("const", const), carry)
        received = strip_prefix("received", const)
        changes = {name: value - reference(name, received, 0) for name, value in reply.items()}
        norm = _norm(changes, is_stacked)
        clip = broadcast[CLIP]
        longest = clip.double() * share
        factor = (longest / norm.maximum(longest)).to(torch.float32)
        clipped = {
            name: torch.where(
                _broadcast(norm.isfinite(), change), change * _broadcast(factor, change), 0.0
            )
            for name, change in changes.items()
        }
        like = factor.new_ones(())
        if has_count:
            clipped[COUNT] = (COUNT_SHARE * clip * like).expand(factor.shape).clone()
        if has_within:
            sign = torch.where(norm <= longest, like, -like)
            clipped[WITHIN] = WITHIN_SHARE * clip * sign
        return add_prefix(CLIPPED, clipped), written

    if is_natively_batched(program.start):
        natively_batched(start)
    if is_natively_batched(program.step):
        natively_batched(step)
    if is_stacked:
        natively_batched(finish)
    hyperparams = {**program.hyperparams, CLIP: clip}
    return replace(
        program, start=start, step=step, finish=finish, hyperparams=hyperparams, spec=None
    )


def reference(name: str, models: Tree, otherwise: Tensor | float) -> Tensor | float:
    """The weights that an output of a reply is compared with; `otherwise` if it is no weight.

    Args:
        name: the name of the output.
        models: the weights that were sent.
        otherwise: the result for other outputs.
    """
    for prefix in MODEL_PREFIXES:
        if name.startswith(prefix) and name.removeprefix(prefix) in models:
            return models[name.removeprefix(prefix)]
    return otherwise


def _norm(tree: Tree, is_stacked: bool) -> Tensor:
    """The L2 norm of all values of a client, in float64: () or, of a stack, (clients,)."""
    squares: Tensor | float = 0.0
    for value in tree.values():
        flat = value.reshape(len(value), -1) if is_stacked else value.flatten()
        squares = squares + torch.linalg.vector_norm(flat, dim=-1, dtype=torch.float64).square()
    assert isinstance(squares, Tensor)
    return squares.sqrt()


def _broadcast(factor: Tensor, like: Tensor) -> Tensor:
    """One factor per client, in a shape that multiplies `like`."""
    return factor.view((*factor.shape, *[1] * (like.ndim - factor.ndim)))
