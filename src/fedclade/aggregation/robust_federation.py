"""A federation whose sums of models are robust: what a method sees of the engine where
`server.aggregator` is not the mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedclade.aggregation.robust import robust_sums
from fedclade.core.federation import (
    Aggregator,
    ClientResults,
    Federation,
    ModelAssignment,
    SegmentSum,
    contribution_matrix,
)
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree
from fedclade.engines.base import Engine
from fedclade.errors import require
from fedclade.methods.base import Method


def federation_view(method: Method, engine: Engine, aggregator: Aggregator) -> Federation:
    """The federation that a method works with."""
    allowed = f"method {method.name} has only {method.custom_aggregation}; leave it at 'mean'"
    require(
        aggregator == "mean" or not method.custom_aggregation,
        "server.aggregator",
        aggregator,
        allowed,
    )
    return engine if aggregator == "mean" else RobustFederation(engine, aggregator)


@dataclass(frozen=True)
class RobustFederation:
    """The clients' models come one by one, which the mean does not need: no secure aggregation, and
    all of a cohort's in memory.
    """

    engine: Engine
    aggregator: Aggregator

    @property
    def sizes(self) -> Tensor:
        return self.engine.sizes

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
            return self.engine.map(
                program, ids, broadcast=broadcast, per_client=per_client, key=key, reduce=reduce
            )
        got = self.engine.map(program, ids, broadcast=broadcast, per_client=per_client, key=key)
        if not len(got.ids):
            return replace(got, total_weight=torch.zeros(reduce.num_segments, dtype=torch.float64))
        give = contribution_matrix(
            reduce, torch.nonzero(torch.isin(ids, got.ids)).flatten(), got.outputs
        )  # replies come in the order asked
        names = reduce.summed_keys(got.outputs)
        sums = robust_sums(self.aggregator, give, {name: got.outputs[name] for name in names})
        rest = {name: value for name, value in got.outputs.items() if name not in names}
        return replace(got, outputs=rest, sums=sums, total_weight=give.sum(0))
