r"""Ditto: a method with its own client step and a personal model. docs/extend.md explains it.

python examples/ditto.py
fedclade check-method examples/ditto.py
fedclade run quickstart --import examples/ditto.py --set method.name=my_ditto
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import fedclade as fc
from fedclade.core import (
    Batch,
    Federation,
    LocalTraining,
    Program,
    State,
    Tree,
    add_prefix,
    initial_velocity,
    natively_batched,
    serializable_program,
    sgd_step,
    strip_prefix,
    tree_map,
)
from fedclade.errors import require
from fedclade.methods.fedavg import fedavg_round


@serializable_program
def train_both(local: LocalTraining, lam: float) -> Program:
    """Train a copy w of the global model, and the personal model v in the client's state.

    Each step trains both on the same batch: w on the client's loss F, and v on F(v) + λ/2 ‖v − g‖²,
    where g is the global model that the client received. The reply is w; v stays with the client.
    """

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        w, v = params, memory
        w_velocity, v_velocity = (initial_velocity(model, local.momentum) for model in (w, v))
        return params, to_carry(w, w_velocity, v, v_velocity)

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        def train(params: Tree, velocity: Tree, plus: Tree | None = None) -> tuple[Tree, Tree]:
            return sgd_step(
                local.objective,
                params,
                velocity,
                batch,
                broadcast["lr"],
                momentum=local.momentum,
                weight_decay=local.weight_decay,
                plus=plus,
            )

        w, w_velocity = strip_prefix("w", carry), strip_prefix("w_velocity", carry)
        v, v_velocity = strip_prefix("v", carry), strip_prefix("v_velocity", carry)
        pull = tree_map(lambda v, g: lam * (v - g), v, const)
        return to_carry(*train(w, w_velocity), *train(v, v_velocity, plus=pull))

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        return strip_prefix("w", carry), strip_prefix("v", carry)

    return Program(
        start,
        step,
        finish,
        local.batches,
        name="ditto",
        hyperparams={"lr": local.lr},
        rng_stream="sgd",
    )


def to_carry(w: Tree, w_velocity: Tree, v: Tree, v_velocity: Tree) -> Tree:
    models = add_prefix("w", w) | add_prefix("v", v)
    return models | add_prefix("w_velocity", w_velocity) | add_prefix("v_velocity", v_velocity)


@fc.register("method", "my_ditto")
@dataclass(frozen=True)
class Ditto(fc.FedAvg):
    """Clients train the global model w as in FedAvg. Client k also keeps a personal model v_k that
    minimizes F_k(v) + λ/2 ‖v − w‖². The client uses v_k.

    λ = 0 is local training. A large λ keeps v_k close to the global model.

    Args:
        lam: λ, the strength of the pull toward the global model.
    """

    title: ClassVar[str] = "Ditto: a personal model for each client, close to the global model"
    paper: ClassVar[str] = (
        "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    )

    lam: float = 0.1

    def __post_init__(self) -> None:
        require(self.lam >= 0, "method.lam", self.lam, "must be at least 0")

    def initial_client_state(self, params: Tree) -> Tree:
        return params

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        return fedavg_round(fed, train_both(self.local, self.lam), state, cohort, key)

    def local_params(self) -> tuple[str, ...]:
        return self.local.objective.names


if __name__ == "__main__":
    clients = fc.data.partition(
        fc.data.load("digits"), fc.data.LabelClusters(clusters=5, classes=2), clients=50, seed=0
    )
    for method in (fc.FedAvg(), Ditto()):
        result = fc.run(method, clients, model=fc.models.MLP(200), rounds=20)
        print(f"{method.title}: {result.summary['accuracy']:.1f} %")
