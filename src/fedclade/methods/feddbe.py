"""FedDBE: an offset of its own for each client's representation, in a shared model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import State
from fedclade.core.program import Program
from fedclade.core.pytree import Tree
from fedclade.core.rng import fold_in
from fedclade.errors import require
from fedclade.methods.base import check_choices
from fedclade.methods.fedavg import FedAvg, fedavg_round
from fedclade.programs.held_out import train_then
from fedclade.programs.own_offset import (
    MEAN,
    OFFSET,
    Head,
    Space,
    add_own_offset,
    mean_features,
    sgd_with_own_offset,
)


@dataclass(frozen=True)
class FedDBEState(State):
    """The shared model, and z̄."""

    mean: Tensor  # (1, d); (0, d) if it is not known or κ = 0


@dataclass(frozen=True)
class FedDBE(FedAvg):
    """The model is FedAvg's, and client i adds a vector u_i of its own to the features z, the
    inputs of the last linear layer: its outputs are W (z + u_i) + b. u_i starts at 0, is trained
    with the model in the same batches and never leaves the client. W u_i is an offset of the
    outputs: what a client has learned about its classes.

    The regularizer keeps the features of all clients at one mean. Before the first round each
    client trains the initial model, and the server learns z̄, the mean of the features of these
    models over all samples. In training, client i adds κ/2 ‖z̄_i - z̄‖² to the loss of a batch,
    where z̄_i, its running mean of the features in this round, starts at z̄.

    Args:
        offset: "features" is the paper's u_i; "outputs" trains an offset o_i of the outputs
            instead, one number for each.
        kappa: κ; 0 for no regularizer.
        momentum: the weight of a batch in z̄_i.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.FedDBE(kappa=0.1), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "feddbe"
    title: ClassVar[str] = "FedDBE: a shared model, and an offset of its own for each client"
    paper: ClassVar[str] = (
        "Zhang et al., Eliminating Domain Bias for Federated Learning in Representation Space,"
        " NeurIPS 2023"
    )
    client_disclosure: ClassVar[str] = (
        "the trained weights, once a round; the server needs only their weighted sum. The offset"
        " stays with the client. With kappa above 0 also, once, the mean of its features, of which"
        " the server needs only the weighted sum"
    )
    extra_traffic: ClassVar[str] = (
        "with kappa above 0, once, the initial model down and one number for each feature up; then"
        " that many numbers more down in every round"
    )
    no_guarded_layer: ClassVar[str] = "trains its offset on all samples of a client"
    needs_sgd: ClassVar[str] = "trains its offsets by steps along a gradient"
    state: ClassVar[type[State]] = FedDBEState

    offset: Space = "features"
    kappa: float = 0.0
    momentum: float = 0.1

    def __post_init__(self) -> None:
        check_choices(self)
        require(self.kappa >= 0, "method.kappa", self.kappa, "must be at least 0")
        ok = 0 < self.momentum <= 1
        require(ok, "method.momentum", self.momentum, "must be above 0 and at most 1")

    def why_no_client_privacy(self) -> str:
        return "sums features without noise; set method.kappa = 0" if self.kappa else ""

    def initial_client_state(self, params: Tree) -> Tree:
        head = Head.of(self.local.objective)
        like = params[head.bias] if self.offset == "outputs" else params[head.weight][0]
        return {OFFSET: torch.zeros_like(like)}

    def init(self, fed: Federation, params: Tree, key: int) -> FedDBEState:
        base = super().init(fed, params, key)
        width = self.local.objective.head_layer().in_features
        state = FedDBEState(base.models, base.cluster_ids, torch.zeros(0, width))
        return self._with_mean(fed, state, torch.arange(len(fed.sizes)), key)

    def _with_mean(self, fed: Federation, state: FedDBEState, ids: Tensor, key: int) -> FedDBEState:
        """The state with z̄ of these clients, if the regularizer needs it and it is not known."""
        if not self.kappa or len(state.mean):
            return state
        first_pass = sgd(self.local, stream="first_pass")
        results = fed.map(
            train_then(first_pass, mean_features(self.local.objective)),
            ids,
            per_client=ModelAssignment(state.models, state.cluster_ids[ids]),
            key=fold_in(key, "mean"),
            reduce=SegmentSum(fed.sizes[ids], 1, torch.zeros_like(ids)),
        )
        if not len(results.ids):
            return state
        return replace(state, mean=(results.sums[MEAN] / results.total_weight).float().cpu())

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> FedDBEState:
        assert isinstance(state, FedDBEState)
        state = self._with_mean(fed, state, cohort, key)
        # Without z̄ there is no regularizer yet.
        kappa = self.kappa if len(state.mean) else 0.0
        train = sgd_with_own_offset(self.local, self.offset, kappa, self.momentum)
        constants = {MEAN: state.mean} if kappa else {}
        return fedavg_round(fed, train, state, cohort, key, constants=constants)

    def personalization_program(self) -> Program:
        return add_own_offset(self.local.objective, self.offset)
