"""FedAvg, and each client fine-tunes the shared model before it uses it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedclade.core.local_sgd import per_client, sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.program import AnyProgram, Program, chain, natively_batched
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, strip_prefix, tree_map
from fedclade.errors import require, require_int
from fedclade.methods.fedavg import FedAvg
from fedclade.programs.held_out import least_loss

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


@serializable_program
def fine_tune(local: LocalTraining, alpha: float | None) -> AnyProgram:
    """`sgd` from the model w to w_i. The reply is (1 - α) w + α w_i.

    Args:
        local: the objective and the settings of SGD.
        alpha: α; None for that of `ALPHAS` with the least loss on the client's held-out samples,
            for a model that was tuned on its other samples.
    """
    if alpha is not None:
        return _mixing(local, alpha)
    tuned = sgd(local, part="fit", stream="fine_tune_fit")
    choose = chain(
        tuned,
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
        _mixing(local, None),
        lambda _, w, chosen: (w | {"alpha": chosen["chosen"]}, {}),
    )


def _mixing(local: LocalTraining, alpha: float | None) -> Program:
    """`sgd` from w. The reply is (1 - α) w + α w_i. α is in the parameters if it is None."""
    train = sgd(local, stream="fine_tune")

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        w = {name: value for name, value in params.items() if name != "alpha"}
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


@dataclass(frozen=True)
class FedAvgFineTune(FedAvg):
    """FedAvg. Before it uses the shared model w, client i trains it for F epochs on its own data,
    to w_i, and uses (1 - α_i) w + α_i w_i.

    By default each client chooses α_i from 0, ¼, ½, ¾, 1: it fine-tunes on four fifths of its
    training samples and takes the α with the least loss on the last fifth; then it fine-tunes on
    all of them. Fine-tuning alone (α = 1) hurts clients with few samples; a client with fewer than
    five samples uses w. A client that never trained does the same.

    Args:
        fine_tune_epochs: F.
        alpha: α_i for all clients; None: each client chooses it.
    """

    name: ClassVar[str] = "fedavg_finetune"
    title: ClassVar[str] = "FedAvg, and each client fine-tunes the shared model"
    paper: ClassVar[str] = (
        "Cheng, Chadha and Duchi, Fine-tuning is Fine in Federated Learning, arXiv 2108.07313"
    )

    fine_tune_epochs: int = 5
    alpha: float | None = None

    def __post_init__(self) -> None:
        require_int("method.fine_tune_epochs", self.fine_tune_epochs, 1)
        require(
            self.alpha is None or 0 <= self.alpha <= 1,
            "method.alpha",
            self.alpha,
            "must be from 0 to 1; leave it out so that clients choose it",
        )

    def personalization_program(self) -> AnyProgram:
        return fine_tune(replace(self.local, epochs=self.fine_tune_epochs, steps=0), self.alpha)
