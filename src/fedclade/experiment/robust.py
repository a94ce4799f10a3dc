"""A federation whose sums of models are robust: what a method sees of the engine where `run.average` is not the mean."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedclade.average import Average
from fedclade.client.programs import AnyProgram
from fedclade.client.tree import Tree
from fedclade.engines.engine import Engine
from fedclade.federation import Replies, Rows, Sum, gives
from fedclade.relatedness.robust import robust_sums


@dataclass(frozen=True)
class RobustFederation:
    """The clients' models come one by one, which the mean does not need: no secure aggregation, and all of a cohort's in memory."""

    engine: Engine
    average: Average

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
        give = gives(reduce, (ids[:, None] == got.ids).int().argmax(0), got.out)
        names = reduce.summed(got.out)
        sums = robust_sums(self.average, give, {name: got.out[name] for name in names})
        rest = {name: value for name, value in got.out.items() if name not in names}
        return replace(got, out=rest, sums=sums, weight=give.sum(0))
