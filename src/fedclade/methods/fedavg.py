"""FedAvg: one model for all."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.aggregation.mean import weighted_mean
from fedclade.aggregation.server_optimizer import update_models
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import State
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree, stack
from fedclade.methods.base import Method, Needs, S


def fedavg_round(
    fed: Federation,
    train: AnyProgram,
    state: S,
    cohort: Tensor,
    key: int,
    local_params: tuple[str, ...] = (),
    weights: Literal["examples", "clients"] = "examples",
    constants: Tree | None = None,
) -> S:
    """The state after `fedavg_step`."""
    return fedavg_step(fed, train, state, cohort, key, local_params, weights, constants)[0]


def fedavg_step(
    fed: Federation,
    train: AnyProgram,
    state: S,
    cohort: Tensor,
    key: int,
    local_params: tuple[str, ...] = (),
    weights: Literal["examples", "clients"] = "examples",
    constants: Tree | None = None,
) -> tuple[S, Tensor]:
    """One round of FedAvg inside each cluster: the new model of a cluster is the mean of its
    clients' trained weights, or what the server's optimizer makes of it.

    Args:
        fed: the federation.
        train: a program that replies with trained weights.
        state: the state before the round.
        cohort: the clients of the round.
        key: the randomness of the round.
        local_params: names of parameters that are in the clients' state instead of the models.
        weights: "examples" weights clients by their examples, "clients" all alike.
        constants: (1, …) tensors that each client receives in addition to its model, by name. They
            are the same for all clusters.

    Returns:
        The state after the round, and the ids of the clients that replied.
    """
    clusters = state.cluster_ids[cohort]
    sizes = fed.sizes[cohort]
    same = {
        name: value.expand(len(state), *value.shape[1:])
        for name, value in (constants or {}).items()
    }
    results = fed.map(
        train,
        cohort,
        per_client=ModelAssignment(state.models | same, clusters, local_params),
        key=key,
        reduce=SegmentSum(
            segment_ids=clusters,
            weights=sizes if weights == "examples" else torch.ones_like(sizes),
            num_segments=len(state),
            robust_ok=True,
        ),
    )
    means = weighted_mean(results.sums, results.total_weight, fallback=state.models)
    return update_models(fed, state, means), results.ids


@dataclass(frozen=True)
class FedAvg(Method[State]):
    """In each round the sampled clients train the shared model on their own data. The new model is
    the mean of their models.

    w_{t+1} = Σ_k n_k w_k / Σ_k n_k over the clients k of the cohort that replied. n_k (`fed.sizes`)
    is the number of training examples of client k. w_k are its weights after E epochs
    (`local.epochs`) of SGD from w_t, with batch size B (`local.batch_size`) and learning rate η
    (`local.lr`).

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.FedAvg(), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> result.summary["clusters"]
        1
    """

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "Federated averaging: one model for all clients"
    paper: ClassVar[str] = (
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,"
        " AISTATS 2017"
    )
    client_disclosure: ClassVar[str] = (
        "the trained weights, once a round; the server needs only their weighted sum"
    )
    server_visibility: ClassVar[Needs] = "sum"

    def init(self, fed: Federation, params: Tree, key: int) -> State:
        return State(
            models=stack([params]), cluster_ids=torch.zeros(len(fed.sizes), dtype=torch.int64)
        )

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        return fedavg_round(fed, sgd(self.local), state, cohort, key)

    def add_clients(self, fed: Federation, state: State, ids: Tensor, key: int) -> State:
        state = state.with_num_clients(len(fed.sizes))
        return replace(state, cluster_ids=state.cluster_ids.index_fill(0, ids, 0))
