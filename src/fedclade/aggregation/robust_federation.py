"""A federation whose sums of models are robust: what a method sees of the engine where `run.average` is not the mean."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedclade.aggregation.robust import robust_sums
from fedclade.core.federation import Aggregator, Federation, Replies, Rows, Sum, gives
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree
from fedclade.engines.base import Engine
from fedclade.errors import check
from fedclade.methods.base import Method


def seen_by(method: Method, engine: Engine, average: Aggregator) -> Federation:
    """The federation that a method works with."""
    allowed = f"method {method.name} has only {method.own_mean}; leave it at 'mean'"
    check(average == "mean" or not method.own_mean, "run.average", average, allowed)
    return engine if average == "mean" else RobustFederation(engine, average)


@dataclass(frozen=True)
class RobustFederation:
    """The clients' models come one by one, which the mean does not need: no secure aggregation, and all of a cohort's in memory."""

    engine: Engine
    average: Aggregator

    @property
    def sizes(self) -> Tensor:
        return self.engine.sizes

    def map(
        self,
        program: AnyProgram,
        ids: Tensor,
        *,
        shared: Tree | None = None,
        each: Rows | None = None,
        key: int,
        reduce: Sum | None = None,
    ) -> Replies:
        if reduce is None or not reduce.models:
            return self.engine.map(program, ids, shared=shared, each=each, key=key, reduce=reduce)
        got = self.engine.map(program, ids, shared=shared, each=each, key=key)
        if not len(got.ids):
            return replace(got, weight=torch.zeros(reduce.rows, dtype=torch.float64))
        give = gives(reduce, torch.nonzero(torch.isin(ids, got.ids)).flatten(), got.out)  # replies come in the order asked
        names = reduce.summed(got.out)
        sums = robust_sums(self.average, give, {name: got.out[name] for name in names})
        rest = {name: value for name, value in got.out.items() if name not in names}
        return replace(got, out=rest, sums=sums, weight=give.sum(0))
