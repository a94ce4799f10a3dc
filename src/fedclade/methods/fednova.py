"""FedNova: FedAvg with updates normalized by the number of local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedclade.aggregation.mean import weighted_mean
from fedclade.aggregation.server_optimizer import update_models
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.local_sgd import effective_steps, sgd
from fedclade.core.method_state import State
from fedclade.methods.fedavg import FedAvg


@dataclass(frozen=True)
class FedNova(FedAvg):
    """Clients train as in FedAvg. Client i makes τ_i steps, which with momentum ρ equal a_i =
    [τ_i - ρ (1 - ρ^τ_i) / (1 - ρ)] / (1 - ρ) plain steps (a_i = τ_i without momentum): ‖a_i‖₁ in
    the paper. Its normalized update is d_i = (x - y_i) / a_i, and the server sets

        x <- x - τ_eff Σ_i p_i d_i,   τ_eff = Σ_i p_i a_i,   p_i = n_i / Σ_i n_i over the clients
        that replied.

    Running statistics are averaged with the weights p_i / a_i.

    If all clients make the same number of steps, it is FedAvg. The server computes a_i from the
    clients' sizes, so it needs only sums of y_i.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.FedNova(), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> result.summary["clusters"]
        1
    """

    name: ClassVar[str] = "fednova"
    title: ClassVar[str] = "FedNova: FedAvg with updates normalized by the number of local steps"
    paper: ClassVar[str] = (
        "Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated"
        " Optimization, NeurIPS 2020"
    )
    needs_sgd: ClassVar[str] = "normalizes updates by the number of SGD steps"

    def why_no_client_privacy(self) -> str:
        return "scales updates by the clients' numbers of steps; use scaffold or fedavg"

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        n = fed.sizes.double()
        a = effective_steps(self.local.batches.steps(fed.sizes).double(), self.local.momentum)
        everyone = torch.zeros_like(cohort)
        reduce = SegmentSum(
            segment_ids=everyone, weights=(n / a)[cohort], num_segments=1, robust_ok=True
        )
        results = fed.map(
            sgd(self.local),
            cohort,
            per_client=ModelAssignment.all_same(state.models, len(cohort)),
            key=key,
            reduce=reduce,
        )
        if not len(results.ids):
            return state
        total = float(n[results.ids].sum())
        tau_eff = float((n * a)[results.ids].sum()) / total
        # Σ p_i / a_i, so that Σ p_i d_i = share x - Σ p_i y_i / a_i
        share = float(results.total_weight) / total
        models = weighted_mean(results.sums, results.total_weight, fallback=state.models)
        models |= {
            name: (x - tau_eff * (share * x.double() - results.sums[name] / total)).to(x.dtype)
            for name, x in state.models.items()
            if name not in self.local.objective.statistics
        }
        return update_models(fed, state, models)
