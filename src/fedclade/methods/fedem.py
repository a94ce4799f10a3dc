"""FedEM: K shared models; each client mixes their predictions in its own proportions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedclade.aggregation.mean import weighted_mean
from fedclade.aggregation.server_optimizer import update_models
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.method_state import State
from fedclade.core.program import Program
from fedclade.core.pytree import Tree, nbytes, stack
from fedclade.core.rng import fold_in
from fedclade.errors import require_int
from fedclade.methods.base import Groups, require_class_labels
from fedclade.methods.fedavg import FedAvg
from fedclade.methods.ifca import shuffled
from fedclade.programs.client_slots import SLOTS, empty_slots
from fedclade.programs.mixture import SHARES, Mixture, em_sgd, fit_mixture

NEW_CLIENT_STEPS = 20  # E and M steps of a client that has not trained


@dataclass(frozen=True)
class FedEMState(State):
    """`models` has one row, in which every tensor has an axis of K components."""

    shares: Tensor  # (K, C) C_y(m) of FedRC; (0,) without it
    largest: Tensor  # () the number of samples of the largest client


@dataclass(frozen=True)
class FedEM(FedAvg):
    """There are K models h_m for all clients. Client t has its own mixture π_t and predicts
    Σ_m π_t(m) softmax h_m(x). π_t never leaves the client.

    In a round client t computes q_i(m) ∝ π_t(m) exp(-ℓ(h_m(x_i), y_i)) for its samples i under the
    models that it receives, then π_t(m) = mean_i q_i(m), and trains each h_m by `local` on
    Σ_i q_i(m) ℓ_i. h_m becomes the mean of the clients' models m, weighted by examples. With K = 1
    it is FedAvg.

    The K models start as random permutations of the weights of the initial model, as in IFCA. A
    client that has not trained learns π_t alone, by 20 E and M steps on its training samples.

    Args:
        components: K.
        fedrc: FedRC's weights: q_i(m) ∝ π_t(m) exp(-ℓ) / C_{y_i}(m), where C_y(m) is the share of
            label y in the samples of model m, of all clients of the last round, each sample with
            weight q_i(m). (It is a round old: q_i(m) needs it before the server can sum it.)
            Clients also send C_y(m) of their samples. One more sample, spread over
            all labels, keeps C_y(m) above 0. Groups then differ by concept, not by labels.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.FedEM(components=2), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "fedem"
    title: ClassVar[str] = "FedEM: K models, of which each client has its own mixture"
    paper: ClassVar[str] = (
        "Marfoq et al., Federated Multi-Task Learning under a Mixture of Distributions, NeurIPS"
        " 2021"
    )
    client_disclosure: ClassVar[str] = (
        "the trained weights of all K models, once a round; the server needs only their weighted"
        " sums. The mixture stays with the client. With FedRC also the weight of each label in each"
        " model, as a sum"
    )
    groups: ClassVar[Groups] = "given"
    upload_cost: ClassVar[str] = "K*W"
    download_cost: ClassVar[str] = "K*W"
    extra_traffic: ClassVar[str] = "with FedRC 4 bytes for each label and model, up and down"
    state: ClassVar[type[State]] = FedEMState

    components: int = 3
    fedrc: bool = False

    def __post_init__(self) -> None:
        require_int("method.components", self.components, 1)

    def why_no_own_batch_norm(self) -> str:
        return "has K models, and a client would have one BatchNorm layer for all"

    def initial_client_state(self, params: Tree) -> Tree:
        return {"pi": torch.zeros(self.components)}

    def why_no_client_privacy(self) -> str:
        return "cannot use label counts with noise; set method.fedrc = false" if self.fedrc else ""

    def init(self, fed: Federation, params: Tree, key: int) -> FedEMState:
        objective = self.local.objective
        require_class_labels(objective, self.name)
        models = [
            {
                name: shuffled(value, fold_in(key, "model", m, name))
                if m and name in objective.trained
                else value
                for name, value in params.items()
            }
            for m in range(self.components)
        ]
        shares = torch.zeros(0)
        if self.fedrc:
            classes = objective.head_layer().out_features
            shares = torch.full((self.components, classes), 1 / classes)
        base = super().init(fed, stack(models), key)
        return FedEMState(base.models, base.cluster_ids, shares, fed.sizes.max())

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> FedEMState:
        assert isinstance(state, FedEMState)
        sent = state.models | ({SHARES: state.shares[None]} if self.fedrc else {})
        results = fed.map(
            em_sgd(self.local, self.components, self.fedrc),
            cohort,
            per_client=ModelAssignment.all_same(sent, len(cohort)),
            key=key,
            reduce=SegmentSum(fed.sizes[cohort], 1, torch.zeros_like(cohort), robust_ok=True),
        )
        means = weighted_mean(results.sums, results.total_weight, fallback=sent)
        counted = means.pop(SHARES, None)
        if counted is not None and len(results.ids):
            # One sample more, spread over all labels.
            counts = counted[0] * results.total_weight.to(counted) + 1 / counted.shape[-1]
            state = replace(state, shares=(counts / counts.sum(-1, keepdim=True)).cpu())
        return update_models(fed, state, means)

    def add_clients(self, fed: Federation, state: State, ids: Tensor, key: int) -> FedEMState:
        state = super().add_clients(fed, state, ids, key)
        assert isinstance(state, FedEMState)
        return replace(state, largest=fed.sizes.max())

    def assign_models(self, state: State, ids: Tensor) -> ModelAssignment:
        assert isinstance(state, FedEMState)
        models = {
            f"components.{m}.{name}": value[:, m]
            for m in range(self.components)
            for name, value in state.models.items()
        }
        models[SLOTS] = empty_slots(state.largest)
        if self.fedrc:
            models[SHARES] = state.shares[None]
        return ModelAssignment(models, state.cluster_ids[ids], ("pi",))

    def personalization_program(self) -> Program:
        return fit_mixture(self.local.objective, self.components, NEW_CLIENT_STEPS)

    def served_module(self, module: nn.Module, weights: Tree | None = None) -> nn.Module:
        return Mixture(module, self.components)

    def cost_symbols(self, state: State) -> dict[str, int]:
        return {"W": nbytes(state.models) // self.components, "K": self.components}
