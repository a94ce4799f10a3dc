"""A federation whose server has an optimizer, or serves the means of models over the rounds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedclade.core.federation import (
    Aggregator,
    ClientResults,
    Federation,
    ModelAssignment,
    SegmentSum,
    ServerUpdate,
)
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree


@dataclass(frozen=True)
class OptimizerFederation:
    """The same clients with another `server_update`, which `update_models` applies.

    Args:
        federation: the clients.
        server_update: how the new models are made from the means.
    """

    federation: Federation
    server_update: ServerUpdate

    @property
    def aggregator(self) -> Aggregator:
        return self.federation.aggregator

    @property
    def sizes(self) -> Tensor:
        return self.federation.sizes

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
        return self.federation.map(
            program, ids, broadcast=broadcast, per_client=per_client, key=key, reduce=reduce
        )
