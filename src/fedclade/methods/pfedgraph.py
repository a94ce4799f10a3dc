"""pFedGraph: each client's model is its own weighted mean of all models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.clustering.collaboration_graph import collaboration_weights
from fedclade.core.federation import Federation, ModelAssignment
from fedclade.core.functional_model import Batch
from fedclade.core.local_sgd import optimizer_step, per_client, sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.method_state import State
from fedclade.core.program import Program, natively_batched
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, flatten, stack, strip_prefix, tree_map
from fedclade.errors import require
from fedclade.methods.base import Needs, check_choices
from fedclade.methods.fedavg import FedAvg
from fedclade.programs.own_model import (
    TRAINED,
    serve_own_model,
    trained_client_state,
    untrained_client_state,
)

SHARED = 0  # the row of the model of clients that never trained


@serializable_program
def sgd_along(local: LocalTraining, lam: float, keep: bool) -> Program:
    """`sgd` on the loss - λ cos(θ, m), where m is the model that the client received.

    Args:
        local: the objective and the settings of the optimizer.
        lam: λ.
        keep: whether the client keeps the trained model in its state.
    """
    train, trained = sgd(local), local.objective.trained

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        _, carry = train.start(broadcast, tree_map(torch.clone, params), memory)
        return params | ({TRAINED: memory[TRAINED]} if keep else {}), carry

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        w, axes = strip_prefix("w", carry), batch.weight.ndim - 1

        def dot(left: Tree, right: Tree) -> Tensor:
            products = [(left[name] * right[name]).flatten(axes).sum(-1) for name in trained]
            return torch.stack(products).sum(0)

        product, of_w, of_m = dot(w, const), dot(w, w), dot(const, const)
        # -∇cos = θ (θ·m) / (‖θ‖³ ‖m‖) - m / (‖θ‖ ‖m‖); 0 if θ or m is 0
        scale = torch.where(of_w * of_m > 0, lam / (of_w * of_m).sqrt(), 0.0)
        along = scale * product / torch.where(of_w > 0, of_w, 1.0)
        pull = {
            name: per_client(along, w[name]) * w[name] - per_client(scale, w[name]) * const[name]
            for name in trained
        }
        params, state = optimizer_step(
            local, w, strip_prefix("optimizer", carry), batch, broadcast["lr"], plus=pull
        )
        return add_prefix("w", params) | add_prefix("optimizer", state)

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree | None]:
        w = strip_prefix("w", carry)
        return w, trained_client_state(w, const[TRAINED]) if keep else None

    return replace(train, start=start, step=step, finish=finish, name="sgd_along", rng_stream="sgd")


@dataclass(frozen=True)
class PFedGraphState(State):
    """`models` has the mean of the last round's models, for clients that never trained, and then a
    row for each client that did.
    """

    start: Tree  # (1, …) the initial model θ⁰


@dataclass(frozen=True)
class PFedGraph(FedAvg):
    """The server makes a model for each client. After a round, client i of the clients that
    replied gets Σ_j a_ij θ_j, where θ_j are their trained models. a_i minimizes Σ_j a_ij d_ij +
    α ‖a_i - p‖² over shares a_i ≥ 0 of sum 1, with d_ij = -cos(θ_i - θ⁰, θ_j - θ⁰), -1 for a cosine
    above 0.9, and p_j = n_j / n. A small α lets a client take from similar clients only; a large
    α gives all clients the mean.

    A client minimizes its loss - λ cos(θ, m_i), where m_i is the model that it received, so its
    model stays along it. (In the authors' code the term has the sign +, which turns the model away
    from that of its neighbors.)

    A client uses the model that it trained last, or the mixture that the server made of it. A
    client that is not in a round keeps both. One that never trained uses the mean, by examples, of
    the models of the last round.

    Args:
        alpha: α.
        lam: λ.
        use: "trained": each client uses θ_i; "mixture": Σ_j a_ij θ_j. (The authors' code measures
            both in every round and takes the best by validation samples.)

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.PFedGraph(alpha=0.5), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "pfedgraph"
    title: ClassVar[str] = "pFedGraph: each client has its own weighted mean of all models"
    paper: ClassVar[str] = (
        "Ye et al., Personalized Federated Learning with Inferred Collaboration Graphs, ICML 2023"
    )
    client_disclosure: ClassVar[str] = "the trained weights in clear, once a round"
    server_visibility: ClassVar[Needs] = "updates"
    custom_aggregation: ClassVar[str] = "a weighted mean of models for each client"
    no_server_optimizer: ClassVar[str] = "makes new models in every round"
    no_guarded_layer: ClassVar[str] = "gives each client its own model already"
    state: ClassVar[type[State]] = PFedGraphState

    alpha: float = 0.8
    lam: float = 0.01
    use: Literal["trained", "mixture"] = "trained"

    def __post_init__(self) -> None:
        check_choices(self)
        require(self.alpha > 0, "method.alpha", self.alpha, "must be above 0")
        require(self.lam >= 0, "method.lam", self.lam, "must be at least 0")

    def why_no_own_batch_norm(self) -> str:
        return "has a whole model of its own for each client"

    def initial_client_state(self, params: Tree) -> Tree:
        return untrained_client_state(params) if self.use == "trained" else {}

    def init(self, fed: Federation, params: Tree, key: int) -> PFedGraphState:
        everyone = torch.full((len(fed.sizes),), SHARED, dtype=torch.int64)
        return PFedGraphState(stack([params]), everyone, start=stack([params]))

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> PFedGraphState:
        assert isinstance(state, PFedGraphState)
        cohort = cohort.sort().values  # the result does not depend on the order of the cohort
        results = fed.map(
            sgd_along(self.local, self.lam, self.use == "trained"),
            cohort,
            per_client=ModelAssignment(state.models, state.cluster_ids[cohort]),
            key=key,
        )
        ids, trained = results.ids, self.local.objective.trained
        if not len(ids):
            return state
        sizes = fed.sizes[ids]
        updates = flatten({name: results.outputs[name] - state.start[name] for name in trained})
        shares = torch.cat(
            [
                (sizes.double() / sizes.sum())[None],
                collaboration_weights(updates.cpu(), sizes, self.alpha),
            ]
        )
        state = _with_rows(state, ids)
        rows = torch.cat([torch.tensor([SHARED]), state.cluster_ids[ids]])
        models = {
            name: state.models[name].index_copy(0, rows.to(value.device), _mixed(shares, value))
            for name, value in results.outputs.items()
        }
        return replace(state, models=models)

    def personalization_program(self) -> Program | None:
        return serve_own_model() if self.use == "trained" else None


def _with_rows(state: PFedGraphState, ids: Tensor) -> PFedGraphState:
    """The state in which each of these clients has a row of its own."""
    new = ids[state.cluster_ids[ids] == SHARED]
    own = len(state) + torch.arange(len(new))
    rows = torch.cat([torch.arange(len(state)), torch.full_like(new, SHARED)])
    return replace(state.at_rows(rows), cluster_ids=state.cluster_ids.index_copy(0, new, own))


def _mixed(shares: Tensor, values: Tensor) -> Tensor:
    """Weighted means of one parameter of the models, one for each row of shares."""
    means = shares.to(values.device) @ values.double().reshape(len(values), -1)
    return means.to(values.dtype).view(-1, *values.shape[1:])
