"""A federation with robust sums of models: methods use it if `server.aggregator` is not "mean"."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedclade.aggregation.federation_view import FederationView
from fedclade.aggregation.robust import robust_sums
from fedclade.core.federation import (
    Aggregator,
    ClientResults,
    ModelAssignment,
    SegmentSum,
    contribution_matrix,
)
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree


@dataclass(frozen=True)
class RobustFederation(FederationView):
    """Computes robust sums of the models. Unlike the mean, it needs the model of each client.
    Secure aggregation is not possible, and all models of a cohort are in memory.

    Args:
        federation: the clients.
        robust_mean: the aggregator to use instead of the mean.
    """

    robust_mean: Aggregator

    @property
    def aggregator(self) -> Aggregator:
        return self.robust_mean

    def map(
        self,
        program: AnyProgram,
        ids: Tensor,
        *,
        broadcast: Tree | None = None,
        per_client: ModelAssignment | None = None,
        key: int,
        reduce: SegmentSum | None = None,
    ) -> ClientResults:
        if reduce is None or not reduce.robust_ok:
            return super().map(
                program, ids, broadcast=broadcast, per_client=per_client, key=key, reduce=reduce
            )
        results = super().map(program, ids, broadcast=broadcast, per_client=per_client, key=key)
        if not len(results.ids):
            return replace(
                results, total_weight=torch.zeros(reduce.num_segments, dtype=torch.float64)
            )
        places = torch.nonzero(torch.isin(ids, results.ids)).flatten()  # in the order of `ids`
        contributions = contribution_matrix(reduce, places, results.outputs)
        names = reduce.summed_keys(results.outputs)
        sums = robust_sums(
            self.aggregator, contributions, {name: results.outputs[name] for name in names}
        )
        rest = {name: value for name, value in results.outputs.items() if name not in names}
        return replace(results, outputs=rest, sums=sums, total_weight=contributions.sum(0))
