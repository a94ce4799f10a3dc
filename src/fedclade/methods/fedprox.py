"""FedProx: FedAvg with a proximal term that keeps clients near the global model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedclade.core.federation import Federation
from fedclade.core.functional_model import Batch
from fedclade.core.local_sgd import optimizer_step, sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.method_state import State
from fedclade.core.program import Program, natively_batched
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix, tree_map
from fedclade.errors import require
from fedclade.methods.fedavg import FedAvg, fedavg_round


@serializable_program
def proximal(local: LocalTraining, mu: float) -> Program:
    """`sgd` on the client's loss plus μ/2 · ‖w - w^t‖², where w^t is the model it received.

    Args:
        local: the objective and the settings of SGD.
        mu: μ.
    """
    train = sgd(local)

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        return params, train.start(broadcast, params, memory)[1]

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        w = strip_prefix("w", carry)
        params, state = optimizer_step(
            local,
            w,
            strip_prefix("optimizer", carry),
            batch,
            broadcast["lr"],
            plus=tree_map(lambda w, sent: broadcast["mu"] * (w - sent), w, const),
        )
        return add_prefix("w", params) | add_prefix("optimizer", state)

    return replace(
        train,
        start=start,
        step=step,
        name="proximal",
        rng_stream="sgd",
        hyperparams={**train.hyperparams, "mu": mu},
    )


@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg in which client k minimizes h_k(w) = F_k(w) + μ/2 · ‖w - w^t‖²: each step adds
    μ (w - w^t) to the gradient.

    Args:
        mu: μ. The paper tries 0.001, 0.01, 0.1, 0.5 and 1; none is best everywhere. μ = 0 is
            FedAvg.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.FedProx(mu=0.1), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> result.summary["clusters"]
        1
    """

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "FedProx: FedAvg with a pull toward the shared model"
    paper: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"

    mu: float = 0.01

    def __post_init__(self) -> None:
        require(self.mu >= 0, "method.mu", self.mu, "must be at least 0")

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        return fedavg_round(fed, proximal(self.local, self.mu), state, cohort, key)
