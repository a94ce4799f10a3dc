"""A federation whose sums of models are differentially private for whole clients.

Clients clip what they contribute (`programs.clipped_update`), the engine adds it in fixed point,
and Gaussian noise is added once to the sums of all segments. A client contributes to one segment,
or chooses one, so the vector of all sums changes by at most the clip if a client contributes
nothing. What a method makes of the sums costs nothing more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedclade.aggregation.federation_view import FederationView
from fedclade.core.federation import (
    FIXED_POINT,
    ClientResults,
    ModelAssignment,
    SegmentSum,
)
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree, flatten, strip_prefix, tree_index, unflatten
from fedclade.errors import FedcladeError
from fedclade.privacy.budget import PrivacyBudget
from fedclade.programs.clipped_update import (
    CLIPPED,
    COUNT,
    COUNT_SHARE,
    WITHIN,
    WITHIN_SHARE,
    clipped_update,
    reference,
)
from fedclade.programs.gaussian_mechanism import trace_of


@dataclass(frozen=True)
class PrivateFederation(FederationView):
    """The same clients, whose sums of models have noise.

    Args:
        federation: the clients.
        budget: the clip, the noise and what they cost.
        unprotected: the names of programs whose replies the method gets as they are.
        max_examples: the weight of a client is its number of examples up to this number; None for
            the same weight for all.
    """

    budget: PrivacyBudget
    unprotected: tuple[str, ...] = ()
    max_examples: int | None = None

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
            if program.name not in self.unprotected:
                raise FedcladeError(
                    f"privacy.epsilon: the program '{program.name}' sends something else than sums"
                    " of models, which would have no noise. Use another method.",
                    "privacy.epsilon",
                )
            return super().map(
                program, ids, broadcast=broadcast, per_client=per_client, key=key, reduce=reduce
            )
        models = _sent_models(broadcast, per_client, reduce)
        is_counted = isinstance(reduce.segment_ids, str) or self.max_examples is not None
        clip, is_adaptive = self.budget.clip, self.budget.is_adaptive
        weights = self._weights(ids)
        if not len(ids):
            # Nobody was drawn, which must not show: a client answers with weight 0.
            ids, weights = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
            per_client = None if per_client is None else _first(per_client)
            segment_ids = reduce.segment_ids
            if isinstance(segment_ids, Tensor):
                segment_ids = ids
            reduce = replace(reduce, segment_ids=segment_ids)
        results = super().map(
            clipped_update(program, clip, is_counted, is_adaptive),
            ids,
            broadcast=broadcast,
            per_client=per_client,
            key=key,
            reduce=replace(reduce, weights=weights, keys=None, fixed_point=True),
        )
        own = {reduce.segment_ids} if isinstance(reduce.segment_ids, str) else set()
        clipped = strip_prefix(CLIPPED, results.sums) if results.sums else self._zeros()
        if len(clipped) < len(results.sums) or not set(results.outputs) <= own:
            raise FedcladeError(
                f"privacy.epsilon: the program '{program.name}' sends more than models. Use another"
                " method.",
                "privacy.epsilon",
            )
        self.budget.shapes = {name: tuple(value.shape) for name, value in clipped.items()}
        vector = flatten(clipped).double().cpu()
        # Rounding to fixed point moves each number of a contribution by half a unit at most.
        sensitivity = clip + math.sqrt(vector.shape[1]) * FIXED_POINT / 2
        call = trace_of(str(key), results.ids)
        vector = vector + self.budget.noise(vector, sensitivity, call)
        device = next(iter(clipped.values())).device
        noisy = unflatten(vector.to(device), clipped)
        return self._as_models(results, noisy, models, clip)

    def _zeros(self) -> Tree:
        """The sums of a round in which no sum was formed, which must not show."""
        if not self.budget.shapes:
            raise FedcladeError(
                "privacy.epsilon: no client answered in the first round. Start again, with a larger"
                " run.clients_per_round.",
                "run.clients_per_round",
            )
        return {name: torch.zeros(shape) for name, shape in self.budget.shapes.items()}

    def _weights(self, ids: Tensor) -> Tensor:
        if self.max_examples is None:
            return torch.ones(len(ids))
        return self.sizes[ids].clamp(max=self.max_examples).double() / self.max_examples

    def _as_models(
        self, results: ClientResults, noisy: Tree, models: Tree, clip: float
    ) -> ClientResults:
        """The results in which the sums of changes are sums of models again.

        Args:
            results: the results without noise; nothing of their sums is used.
            noisy: the sums with noise.
            models: the model that each segment started from.
            clip: the clip of these sums.
        """
        count, within = noisy.pop(COUNT, None), noisy.pop(WITHIN, None)
        if count is not None:
            weights = count.flatten().cpu() / (COUNT_SHARE * clip)
            # Fewer than two standard deviations of the noise may be nobody at all.
            too_few = 2 * self.budget.noise_multiplier / COUNT_SHARE
            weights = torch.where(weights > too_few, weights, 0.0)
        else:
            weights = self.budget.rate * self.budget.group_sizes.double()
            if len(weights) != len(next(iter(noisy.values()))):
                raise FedcladeError(
                    "privacy.epsilon: the method sums over other groups than those of its clients."
                    " Use another method.",
                    "privacy.epsilon",
                )
        if within is not None:
            expected = self.budget.rate * self.budget.num_clients
            total = float(within.sum()) / (WITHIN_SHARE * clip)
            self.budget.adapt_clip((total / expected + 1) / 2)
        sums = {}
        for name, value in noisy.items():
            start = reference(name, models, 0.0)
            if isinstance(start, Tensor):
                factor = weights.to(value.device).view(-1, *[1] * (value.ndim - 1))
                value = torch.where(factor > 0, value + factor * start.double(), 0.0)
            sums[name] = value
        return replace(results, sums=sums, total_weight=weights)


def _first(assignment: ModelAssignment) -> ModelAssignment:
    """The first model for one client."""
    return replace(assignment, model_ids=torch.zeros(1, dtype=torch.int64))


def _sent_models(
    broadcast: Tree | None, per_client: ModelAssignment | None, reduce: SegmentSum
) -> Tree:
    """The model that the clients of each segment start from."""
    if isinstance(reduce.segment_ids, str):
        models = broadcast or {}
    elif per_client is None or reduce.segment_ids is None:
        models = {}
    elif reduce.num_segments == 1:
        models = tree_index(per_client.models, per_client.model_ids[:1])
        if len(per_client.model_ids) == 0:
            models = tree_index(per_client.models, slice(1))
        elif int(per_client.model_ids.min()) != int(per_client.model_ids.max()):
            models = {}
    elif torch.equal(per_client.model_ids.cpu(), reduce.segment_ids.cpu()):
        models = per_client.models
    else:
        models = {}
    if not models or len(next(iter(models.values()))) != reduce.num_segments:
        raise FedcladeError(
            "privacy.epsilon: the method sums models that started from different ones. Use another"
            " method.",
            "privacy.epsilon",
        )
    return models
