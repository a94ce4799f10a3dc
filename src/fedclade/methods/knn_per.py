"""kNN-Per: FedAvg's model, mixed with the labels of a client's nearest samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor, nn

from fedclade.core.federation import Federation, ModelAssignment
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import State
from fedclade.core.program import Program
from fedclade.core.pytree import Tree
from fedclade.errors import require, require_int
from fedclade.methods.base import require_class_labels
from fedclade.methods.fedavg import FedAvg, fedavg_round
from fedclade.programs.client_slots import SLOTS, empty_slots
from fedclade.programs.nearest_neighbors import (
    NEIGHBORS,
    PREFIX,
    SCALE,
    NearestNeighbors,
    build_store,
)


@dataclass(frozen=True)
class KNNPerState(State):
    """The state of FedAvg, and how many slots a client's store needs."""

    largest: Tensor  # () the number of samples of the largest client


@dataclass(frozen=True)
class KNNPer(FedAvg):
    """The model h is trained as in FedAvg. A client predicts p(y|x) = λ p_kNN(y|x) + (1 - λ)
    softmax h(x). φ is the input of the last linear layer of h. Of its training samples the client
    takes the k with the least ‖φ(x) - φ(x_j)‖; p_kNN(y|x) ∝ Σ_j 1{y_j = y}
    exp(-‖φ(x) - φ(x_j)‖² / (dim · s)), where dim is the number of entries of φ.

    λ is each client's own. A client does not train on every fifth of its training samples. λ is the
    value of 0, 0.01, … 1 with the largest likelihood of these samples, whose neighbors are among
    the others. At use all training samples are neighbors. Nothing more is sent than in FedAvg. The
    store is made when it is used, so a new client needs no training.

    Args:
        k: the number of neighbors.
        scale: s.
        hold_out: whether to hold out samples, to choose λ; if not, λ is `default_weight`.
        default_weight: λ of a client with fewer than 5 samples held out.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.KNNPer(k=5), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "knn_per"
    title: ClassVar[str] = "kNN-Per: one model, mixed with the labels of a client's nearest samples"
    paper: ClassVar[str] = (
        "Marfoq et al., Personalized Federated Learning through Local Memorization, ICML 2022"
    )
    state: ClassVar[type[State]] = KNNPerState

    k: int = NEIGHBORS
    scale: float = SCALE
    hold_out: bool = True
    default_weight: float = 0.5

    def __post_init__(self) -> None:
        require_int("method.k", self.k, 1)
        require(self.scale > 0, "method.scale", self.scale, "must be above 0")
        weight = self.default_weight
        require(0 <= weight <= 1, "method.default_weight", weight, "must be from 0 to 1")

    def init(self, fed: Federation, params: Tree, key: int) -> KNNPerState:
        require_class_labels(self.local.objective, self.name)
        base = super().init(fed, params, key)
        return KNNPerState(base.models, base.cluster_ids, fed.sizes.max())

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        train = sgd(self.local, part="fit" if self.hold_out else "all")
        return fedavg_round(fed, train, state, cohort, key)

    def add_clients(self, fed: Federation, state: State, ids: Tensor, key: int) -> KNNPerState:
        state = super().add_clients(fed, state, ids, key)
        assert isinstance(state, KNNPerState)
        return replace(state, largest=fed.sizes.max())

    def assign_models(self, state: State, ids: Tensor) -> ModelAssignment:
        assert isinstance(state, KNNPerState)
        models = {f"{PREFIX}{name}": value for name, value in state.models.items()}
        models[SLOTS] = empty_slots(state.largest)
        return ModelAssignment(models, state.cluster_ids[ids])

    def personalization_program(self) -> Program:
        objective = self.local.objective
        return build_store(objective, self.k, self.scale, self.hold_out, self.default_weight)

    def served_module(self, module: nn.Module, weights: Tree | None = None) -> nn.Module:
        slots = len(weights["labels"]) if weights and "labels" in weights else 1
        return NearestNeighbors(module, slots, self.k, self.scale)
