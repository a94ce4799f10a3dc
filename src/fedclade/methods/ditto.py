"""Ditto: a shared model, and a model of its own for each client that is pulled toward it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.core.federation import Federation
from fedclade.core.functional_model import Batch, Objective
from fedclade.core.local_sgd import initial_optimizer_state, optimizer_step, per_client, sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.method_state import State
from fedclade.core.program import AnyProgram, Program, chain, natively_batched
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, stack, strip_prefix, tree_map
from fedclade.errors import require
from fedclade.methods.base import Needs, check_choices
from fedclade.methods.fedavg import FedAvg, fedavg_round
from fedclade.programs.held_out import least_loss
from fedclade.programs.own_model import (
    OWN,
    TRAINED,
    serve_own_model,
    trained_client_state,
    untrained_client_state,
)

FIT = "fit"
"""The prefix of the client's second model in its state, which chooses λ."""

LAMBDAS = (0.1, 1.0, 2.0)
FEW = 1  # the place of λ = 1, which clients with few samples take
MIN_HELD_OUT = 4  # with fewer samples held out, λ is 1


@serializable_program
def ditto(local: LocalTraining, lam: float | None) -> AnyProgram:
    """Trains the shared model w and the client's own model v in the same batches. v stays in the
    client's state; the reply is w.

    Args:
        local: the objective and the settings of SGD.
        lam: λ; None: the client chooses it from `LAMBDAS` by its held-out samples, with a second
            model of its own that was never trained on them. (v has seen them in earlier rounds, so
            with v the smallest λ would win.)
    """
    if lam is not None:
        return _train_both(local, lam)
    choose = chain(
        _candidates(local), _keep_best(local.objective), lambda _, params, models: (models, {})
    )
    return chain(
        choose, _train_both(local, None), lambda _, w, reply: (w | {"lambda": reply["lambda"]}, {})
    )


def _own_step(
    local: LocalTraining, v: Tree, state: Tree, sent: Tree, lam: Tensor, batch: Batch, lr: Tensor
) -> tuple[Tree, Tree]:
    """A step of v along ∇F(v) + λ (v - w^t)."""
    pull = {
        name: per_client(lam, v[name]) * (v[name] - sent[name]) for name in local.objective.trained
    }
    return optimizer_step(local, v, state, batch, lr, plus=pull)


def _candidates(local: LocalTraining) -> Program:
    """Trains the client's second model with each λ on the samples that are not held out. The reply
    has the models.
    """
    train = sgd(local, part="fit", stream="ditto_fit")

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        v = strip_prefix(FIT, memory)
        carry: Tree = {}
        for number in range(len(LAMBDAS)):
            carry |= add_prefix(f"{number}/v", tree_map(torch.clone, v))
            carry |= add_prefix(f"{number}/optimizer", initial_optimizer_state(local, v))
        return params, carry

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        after: Tree = {}
        for number, lam in enumerate(LAMBDAS):
            v, state = _own_step(
                local,
                strip_prefix(f"{number}/v", carry),
                strip_prefix(f"{number}/optimizer", carry),
                const,
                broadcast["lr"].new_tensor(lam),
                batch,
                broadcast["lr"],
            )
            after |= add_prefix(f"{number}/v", v) | add_prefix(f"{number}/optimizer", state)
        return after

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, None]:
        models: Tree = {}
        for number in range(len(LAMBDAS)):
            models |= add_prefix(str(number), strip_prefix(f"{number}/v", carry))
        return models, None

    return replace(train, start=start, step=step, finish=finish, name="ditto_candidates")


def _keep_best(objective: Objective) -> Program:
    """Of the models in the parameters, the one with the least loss on the held-out samples becomes
    the client's second model. The reply is its λ.
    """
    numbers = range(len(LAMBDAS))
    choose = least_loss(objective, tuple(numbers), default=FEW)

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        const, carry = choose.start(broadcast, params, memory)
        return const | memory, carry

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        chosen = choose.finish(broadcast, const, carry)[0]["chosen"]
        best = torch.where(carry["examples"] >= MIN_HELD_OUT, chosen, FEW)[None]
        models = stack([strip_prefix(str(number), const) for number in numbers])
        fit = tree_map(lambda value: value.index_select(0, best)[0], models)
        own = add_prefix(OWN, strip_prefix(OWN, const)) | {TRAINED: const[TRAINED]}
        values = torch.tensor(LAMBDAS, device=best.device)
        return {"lambda": values.index_select(0, best)[0]}, own | add_prefix(FIT, fit)

    return replace(choose, start=start, finish=finish, name="keep_best")


def _train_both(local: LocalTraining, lam: float | None) -> Program:
    """Trains w and v in the same batches. λ is `lam`, or in the parameters if it is None."""
    train = sgd(local)

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        w = {name: value for name, value in params.items() if name != "lambda"}
        v = strip_prefix(OWN, memory)
        carry = add_prefix("w", tree_map(torch.clone, w)) | add_prefix("v", v)
        carry |= add_prefix("optimizer", initial_optimizer_state(local, w))
        carry |= add_prefix("own_optimizer", initial_optimizer_state(local, v))
        fit = add_prefix(FIT, strip_prefix(FIT, memory))
        return params | fit | {TRAINED: memory[TRAINED]}, carry

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        lr = broadcast["lr"]
        v, own_state = _own_step(
            local,
            strip_prefix("v", carry),
            strip_prefix("own_optimizer", carry),
            const,
            const["lambda"] if lam is None else broadcast["lambda"],
            batch,
            lr,
        )
        w, state = optimizer_step(
            local, strip_prefix("w", carry), strip_prefix("optimizer", carry), batch, lr
        )
        return {
            **add_prefix("w", w),
            **add_prefix("optimizer", state),
            **add_prefix("v", v),
            **add_prefix("own_optimizer", own_state),
        }

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        own = trained_client_state(strip_prefix("v", carry), const[TRAINED])
        return strip_prefix("w", carry), own | add_prefix(FIT, strip_prefix(FIT, const))

    return replace(
        train,
        start=start,
        step=step,
        finish=finish,
        name="ditto",
        rng_stream="sgd",
        hyperparams={**train.hyperparams, **({} if lam is None else {"lambda": lam})},
    )


@dataclass(frozen=True)
class Ditto(FedAvg):
    """w is FedAvg's model. Client k also has a model v_k of its own, which it trains in the same
    batches on h_k(v) = F_k(v) + λ/2 · ‖v - w^t‖², where w^t is the model it received: v_k <- v_k -
    η (∇F_k(v_k) + λ (v_k - w^t)). v_k starts at the initial model, never leaves the client, and is
    what the client uses. λ = 0 is Local; a large λ keeps v_k at w.

    By default each client chooses λ from the paper's 0.1, 1 and 2 in every round, by every fifth of
    its training samples. v_k has seen these samples in earlier rounds. So the client has a second
    model, which is never trained on them: it trains it with each λ on the other samples, keeps the
    result with the least loss on these, and trains v_k with its λ on all. A client with fewer than
    four such samples takes λ = 1, as in the paper. A client that never trained uses w.

    The mean of the clients' models w is weighted by examples, as in FedAvg, or has equal weights,
    as in the paper and the authors' code (`weights = "clients"`).

    Args:
        lam: λ for all clients; None: each client chooses it.
        weights: the weights of the mean of the clients' w: "examples" or "clients".

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.Ditto(lam=0.5), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto: own models that are pulled toward a shared one"
    paper: ClassVar[str] = (
        "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    )
    no_guarded_layer: ClassVar[str] = "gives each client its own model already"
    server_visibility: ClassVar[Needs] = "sum"

    lam: float | None = None
    weights: Literal["examples", "clients"] = "examples"

    def __post_init__(self) -> None:
        check_choices(self)
        require(
            self.lam is None or self.lam >= 0,
            "method.lam",
            self.lam,
            "must be at least 0; leave it out so that clients choose it",
        )

    def why_no_own_batch_norm(self) -> str:
        return "has a whole model of its own for each client"

    def initial_client_state(self, params: Tree) -> Tree:
        second = {} if self.lam is not None else add_prefix(FIT, params)
        return untrained_client_state(params) | second

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        train = ditto(self.local, self.lam)
        return fedavg_round(fed, train, state, cohort, key, weights=self.weights)

    def personalization_program(self) -> Program:
        return serve_own_model()
