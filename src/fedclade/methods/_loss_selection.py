"""What the methods have in common whose clients choose their model themselves."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedclade.core.federation import Federation
from fedclade.methods.base import Method, S
from fedclade.programs.model_selection import choose


@dataclass(frozen=True)
class LossSelectionMethod(Method[S]):
    """A client takes the model under which its own training examples have the least loss: in the
    round, if it takes part in one.
    """

    def prepare_cohort(
        self, fed: Federation, state: S, cohort: Tensor, key: int
    ) -> tuple[S, Tensor]:
        return state, cohort

    def add_clients(self, fed: Federation, state: S, ids: Tensor, key: int) -> S:
        state = state.with_num_clients(len(fed.sizes))
        got = fed.map(choose(self.local.objective), ids, broadcast=state.models, key=key)
        return (
            replace(
                state,
                cluster_ids=state.cluster_ids.index_copy(0, got.ids, got.outputs["row"].cpu()),
            )
            if len(got.ids)
            else state
        )
