"""A federation whose sums are secure: nobody sees what a single client adds to them."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedclade.aggregation.federation_view import FederationView
from fedclade.core.federation import ClientResults, ModelAssignment, SegmentSum
from fedclade.core.method_state import UNKNOWN
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree
from fedclade.errors import FedcladeError

_log = logging.getLogger("fedclade")


@dataclass(frozen=True)
class SecureSumFederation(FederationView):
    """The same clients, whose summed outputs the engine reveals as sums only, in fixed point.

    Where the server knows the groups, a sum of models of fewer than `min_group` clients is not
    formed: these clients wait for another round. The clients of other small sums (statistics) are
    added to the largest group. Where clients choose their group (IFCA), the choice is not revealed
    either, only how many chose each group; a group that fewer chose keeps its model.

    A simulator forms the same sums in the same arithmetic, without masks.

    Args:
        federation: the clients.
        min_group: the least number of clients in a sum.
    """

    min_group: int = 3

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
        if reduce is None:
            return super().map(
                program, ids, broadcast=broadcast, per_client=per_client, key=key, reduce=None
            )
        if reduce.segment_ids is None and bool(((reduce.weights != 0).sum(1) > 1).any()):
            raise FedcladeError(
                "privacy.secure_sum: the method forms sums that overlap, and from their difference"
                " single clients could be computed. Use another method, such as clade_groups.",
                "privacy.secure_sum",
            )
        groups = reduce.segment_ids if reduce.subgroup_ids is None else reduce.subgroup_ids
        reduce = replace(reduce, fixed_point=True, min_clients=self.min_group, subgroup_ids=None)
        if isinstance(reduce.segment_ids, Tensor) and isinstance(groups, Tensor):
            reduce, kept = self._without_small_groups(
                reduce, reduce.segment_ids.cpu(), groups.cpu()
            )
            if len(ids) and not bool(kept.any()):
                # A client with weight 0 gives sums of 0 their shapes.
                kept[0] = True
                nobody = torch.zeros(1, dtype=torch.int64)
                reduce = replace(reduce, segment_ids=nobody, weights=nobody.float())
            if not bool(kept.all()):
                ids = ids[kept]
                per_client = None if per_client is None else per_client[kept]
        results = super().map(
            program, ids, broadcast=broadcast, per_client=per_client, key=key, reduce=reduce
        )
        if isinstance(reduce.segment_ids, str):
            hidden = torch.full((len(results.ids),), UNKNOWN)
            results = replace(results, outputs=results.outputs | {reduce.segment_ids: hidden})
        self._log_missing(results, reduce)
        return results

    def _without_small_groups(
        self, reduce: SegmentSum, segments: Tensor, groups: Tensor
    ) -> tuple[SegmentSum, Tensor]:
        """The sums without those of few clients, and whether each client is still in a sum.

        Args:
            reduce: the sums.
            segments: the segment of each client.
            groups: the group of each client that must not be small: its segment, or a part of it.
        """
        counts = torch.bincount(groups)
        is_small = (counts < self.min_group)[groups]
        if not bool(is_small.any()):
            return reduce, torch.ones_like(is_small)
        if reduce.robust_ok:
            kept = ~is_small
            waiting = ", ".join(map(str, torch.unique(groups[is_small]).tolist()))
            _log.info(
                "%d clients wait: groups %s have fewer than %d clients in this round",
                int(is_small.sum()),
                waiting,
                self.min_group,
            )
            return (
                replace(reduce, segment_ids=segments[kept], weights=reduce.weights[kept]),
                kept,
            )
        segments = torch.where(is_small, int(counts.argmax()), segments)
        return replace(reduce, segment_ids=segments), torch.ones_like(is_small)

    def _log_missing(self, results: ClientResults, reduce: SegmentSum) -> None:
        """Say which sums are missing: clients dropped out, or few chose the group."""
        asked = reduce.segment_ids
        groups = (
            torch.unique(asked) if isinstance(asked, Tensor) else torch.arange(reduce.num_segments)
        )
        missing = groups[results.total_weight[groups] == 0].tolist()
        if missing and len(results.ids):
            text = "no sum of groups %s: they have fewer than %d clients that answered"
            _log.info(text, ", ".join(map(str, missing)), self.min_group)
