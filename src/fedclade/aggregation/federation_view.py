"""A federation that changes one part of another one."""

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
class FederationView:
    """The same clients. Subclasses replace the parts that differ.

    Args:
        federation: the clients.
    """

    federation: Federation

    @property
    def aggregator(self) -> Aggregator:
        return self.federation.aggregator

    @property
    def server_update(self) -> ServerUpdate:
        return self.federation.server_update

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
