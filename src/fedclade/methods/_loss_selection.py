"""The base class of methods whose clients choose their model by its loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedclade.core.federation import Federation
from fedclade.methods.base import Method, S
from fedclade.programs.model_selection import choose


@dataclass(frozen=True)
class LossSelectionMethod(Method[S]):
    """Each client takes the model with the least loss on its training examples. The clients of a
    cohort choose in the round, the others in `add_clients`.
    """

    def prepare_cohort(
        self, fed: Federation, state: S, cohort: Tensor, key: int
    ) -> tuple[S, Tensor]:
        return state, cohort

    def add_clients(self, fed: Federation, state: S, ids: Tensor, key: int) -> S:
        state = state.with_num_clients(len(fed.sizes))
        results = fed.map(choose(self.local.objective), ids, broadcast=state.models, key=key)
        return (
            replace(
                state,
                cluster_ids=state.cluster_ids.index_copy(
                    0, results.ids, results.outputs["row"].cpu()
                ),
            )
            if len(results.ids)
            else state
        )
