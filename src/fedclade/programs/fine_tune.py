"""A client trains the model that it received further, and mixes both."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedclade.core.local_sgd import per_client, sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.program import AnyProgram, Program, chain, natively_batched
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, strip_prefix, tree_map
from fedclade.programs.held_out import least_loss

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The values of α to choose from."""


@serializable_program
def fine_tune(local: LocalTraining, alpha: float | None) -> AnyProgram:
    """`sgd` from the model w to w_i. The reply is (1 - α) w + α w_i.

    Args:
        local: the objective and the settings of SGD.
        alpha: α; None for that of `ALPHAS` with the least loss on the client's held-out samples,
            for a model that was tuned on its other samples.
    """
    if alpha is not None:
        return interpolate(local, alpha)
    choose = chain(
        tune_on_part(local),
        least_loss(local.objective, ALPHAS),
        lambda _, w, tuned: (
            {
                f"{number}/{name}": w[name] + value * (tuned[name] - w[name])
                for number, value in enumerate(ALPHAS)
                for name in w
            },
            {},
        ),
    )
    return chain(
        choose,
        interpolate(local, None),
        lambda _, w, chosen: (w | {"alpha": chosen["chosen"]}, {}),
    )


def tune_on_part(local: LocalTraining) -> Program:
    """`sgd` on the samples that are not held out."""
    return sgd(local, part="fit", stream="fine_tune_fit")


def interpolate(local: LocalTraining, alpha: float | None) -> Program:
    """`sgd` from w. The reply is (1 - α) w + α w_i.

    Args:
        local: the objective and the settings of SGD.
        alpha: α; None if it is in the parameters, under "alpha".
    """
    train = sgd(local, stream="fine_tune")
    names = local.objective.names

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        w = {name: params[name] for name in params if name in names}
        return params, train.start(broadcast, tree_map(torch.clone, w), memory)[1]

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        share = const["alpha"] if alpha is None else broadcast["alpha"]
        return {
            name: const[name] + per_client(share, tuned) * (tuned - const[name])
            for name, tuned in strip_prefix("w", carry).items()
        }, None

    numbers = {**train.hyperparams, **({} if alpha is None else {"alpha": alpha})}
    return replace(train, start=start, finish=finish, name="mixing", hyperparams=numbers)
