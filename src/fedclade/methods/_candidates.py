"""Candidates of Clade: several ways to give each group of clients a model, which are trained side
by side and compared on held-out training samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.aggregation.mean import weighted_mean
from fedclade.aggregation.server_optimizer import served_state
from fedclade.clustering.individuals import FEWEST
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.method_state import UNKNOWN
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree, tree_index
from fedclade.core.rng import fold_in
from fedclade.methods._clade_groups_state import CladeGroupsState

OPEN_ROUNDS = (10, 20)  # rounds of the candidates after which they are compared
CLEARLY_WORSE = 5.0  # standard errors by which a candidate is worse that is dropped early
ALMOST_EQUAL = 1.0  # standard errors within which a simpler candidate remains
MAX_SCORED = 1000  # clients that compare the candidates


@dataclass(frozen=True)
class CladeState(CladeGroupsState):
    """The state of `CladeGroups`, the candidates, and everybody's class prior.

    A candidate gives each group a model. Clients use the models of the first candidate.
    """

    group_ids: Tensor  # (clients,) the group of each client, or UNKNOWN
    candidates: Tensor  # (candidates, groups) the row of `models` of each group
    trunk_ids: Tensor  # (models,) models with the same number share all layers but the last
    opened_in: Tensor  # () the round in which the candidates were made
    grouped: Tensor  # () whether clients differ in groups, not each in its own way
    prior: Tensor  # (classes,) π, everybody's class shares
    kappa: Tensor  # () κ; infinite if clients' class shares differ by chance

    @classmethod
    def opened(
        cls,
        sizes: Tensor,
        base: CladeGroupsState,
        candidates: Sequence[Tensor],
        inputs: Tensor | None,
        prior: Tensor,
        kappa: float,
        grouped: bool,
    ) -> Self:
        """The state with new candidates for the groups of `base`.

        A model of a candidate continues from that of its largest group. Models share a trunk if
        most samples of their clients have the same p(x), and if they continue from the same trunk.

        Args:
            sizes: (clients,) the number of samples.
            base: the groups and their models.
            candidates: (groups,) the number of the model of each group, for each candidate.
            inputs: (clients,) a number of p(x) for each client, or UNKNOWN; None if all agree.
            prior: π.
            kappa: κ.
            grouped: whether clients differ in groups.
        """
        clients, groups = len(base.cluster_ids), len(base)
        known = torch.nonzero(base.cluster_ids != UNKNOWN).flatten()
        inputs = torch.zeros(clients, dtype=torch.int64) if inputs is None else inputs
        old_trunks = getattr(base, "trunk_ids", torch.zeros(groups, dtype=torch.int64))
        size, votes = torch.zeros(groups), torch.zeros(groups, max(1, int(inputs.max()) + 1))
        size.index_add_(0, base.cluster_ids[known], sizes[known].float())
        known = known[inputs[known] != UNKNOWN]
        place = (base.cluster_ids[known], inputs[known])
        votes.index_put_(place, sizes[known].float(), accumulate=True)
        rows, parents, trunks = list[Tensor](), list[Tensor](), list[Tensor]()
        for number, candidate in enumerate(candidates):
            members = F.one_hot(candidate).T.float()  # (models, groups)
            parent = (members * (size + 1)).argmax(1)
            kind = (members @ votes).argmax(1)
            rows.append(candidate + sum(len(group) for group in parents))
            trunks.append(torch.stack([torch.full_like(kind, number), kind, old_trunks[parent]], 1))
            parents.append(parent)
        at_parents = base.at_rows(torch.cat(parents))
        of_base = {f.name: getattr(at_parents, f.name) for f in fields(CladeGroupsState)}
        return cls(
            **of_base,
            group_ids=base.cluster_ids,
            candidates=torch.stack(rows),
            trunk_ids=torch.unique(torch.cat(trunks), dim=0, return_inverse=True)[1],
            opened_in=base.rounds,
            grouped=torch.tensor(grouped),
            prior=prior,
            kappa=torch.tensor(kappa),
        ).served_by_first()

    @property
    def is_open(self) -> bool:
        """Whether there is more than one candidate."""
        return len(self.candidates) > 1

    def with_num_clients(self, clients: int) -> Self:
        missing = max(0, clients - len(self.group_ids))
        return replace(
            super().with_num_clients(clients),
            group_ids=F.pad(self.group_ids, (0, missing), value=UNKNOWN),
        )

    def at_rows(self, rows: Tensor) -> Self:
        return replace(super().at_rows(rows), trunk_ids=self.trunk_ids[rows])

    def served_by_first(self) -> Self:
        """The state in which clients use the models of the first candidate."""
        rows = self.candidates[0][self.group_ids.clamp_min(0)]
        return replace(self, cluster_ids=torch.where(self.group_ids == UNKNOWN, UNKNOWN, rows))

    def with_candidates(self, kept: Sequence[int]) -> Self:
        """The state with these candidates only, in this order."""
        rows, numbers = torch.unique(self.candidates[list(kept)], return_inverse=True)
        state = replace(self.at_rows(rows), candidates=numbers)
        trunk_ids = torch.unique(state.trunk_ids, return_inverse=True)[1]
        return replace(state, trunk_ids=trunk_ids).served_by_first()


def distinct(*partitions: Tensor) -> list[Tensor]:
    """The partitions that differ from all before them."""
    result: list[Tensor] = []
    for partition in partitions:
        if not any(torch.equal(partition, other) for other in result):
            result.append(partition)
    return result


def means_by_trunk(state: CladeState, sums: Tree, weights: Tensor, head: Sequence[str]) -> Tree:
    """The mean over each model's clients for its last layer, and over all clients of its trunk for
    the other layers.

    Args:
        state: the state with the models and their trunks.
        sums: (models, …) Σ_k n_k w_k over the clients of each model; empty if no client replied.
        weights: (models,) Σ_k n_k.
        head: the names of the last layer's parameters; if there are none, because it is frozen, no
            layer is shared.
    """
    trunk = state.trunk_ids
    if not head or int(trunk.max()) + 1 == len(state) or not sums:
        return weighted_mean(sums, weights, fallback=state.models)
    first = torch.stack(
        [torch.nonzero(trunk == number)[0, 0] for number in range(int(trunk.max()) + 1)]
    )

    def pooled(rows: Tensor) -> Tensor:
        zeros = rows.new_zeros((len(first), *rows.shape[1:]))
        return zeros.index_add_(0, trunk.to(rows.device), rows)

    own = {name: value for name, value in state.models.items() if name in head}
    shared = {name: value for name, value in state.models.items() if name not in head}
    heads = weighted_mean({name: sums[name] for name in own}, weights, fallback=own)
    trunks = weighted_mean(
        {name: pooled(sums[name]) for name in shared},
        pooled(weights),
        fallback=tree_index(shared, first) if shared else {},
    )
    return {
        name: heads[name] if name in own else trunks[name][trunk.to(trunks[name].device)]
        for name in state.models
    }


def compare_candidates(
    fed: Federation, state: CladeState, trials: Sequence[AnyProgram], key: int
) -> CladeState:
    """In rounds 10 and 20 of the candidates, drop candidates by their scores on held-out samples,
    pooled over clients. Without such samples the first one remains.

    At the last check one candidate remains of those within one standard error of the best: the
    first one if the clients differ in groups, else the one with the fewest models. Few clients
    cannot show which, so among them the best remains. Before, candidates that are clearly worse are
    dropped.

    Args:
        fed: the clients.
        state: the state with the candidates.
        trials: programs that score a model, see `held_out_score`. A candidate has the best of
            their scores.
        key: the randomness of the round.
    """
    age = int(state.rounds - state.opened_in)
    is_last = age >= OPEN_ROUNDS[-1]  # later rounds repeat a check that nobody answered
    if not is_last and age not in OPEN_ROUNDS:
        return state
    ids = torch.nonzero(state.group_ids != UNKNOWN).flatten()
    order = np.random.default_rng(fold_in(key, "scored")).permutation(len(ids))
    ids = ids[torch.from_numpy(np.sort(order[:MAX_SCORED]))]
    models = served_state(state).models
    everyone = SegmentSum(
        segment_ids=torch.zeros_like(ids), weights=torch.ones(len(ids)), num_segments=1
    )
    scores, variances = [], []
    for number, candidate in enumerate(state.candidates):
        assignment = ModelAssignment(models, candidate[state.group_ids[ids]])
        means = []
        for trial in trials:
            trial_key = fold_in(key, f"candidate {number}")
            sums = fed.map(trial, ids, per_client=assignment, key=trial_key, reduce=everyone).sums
            total = {name: float(value[0]) for name, value in sums.items()}
            if not sums:
                return state
            if not total["examples"]:  # clients are too small to hold samples out
                return state.with_candidates([0]) if is_last else state
            mean = total["score"] / total["examples"]
            variance = max(0.0, total["square"] / total["examples"] - mean**2)
            means.append((mean, variance / total["examples"]))
        best_mean, variance = max(means)
        scores.append(best_mean)
        variances.append(variance)
    best = int(np.argmax(scores))
    allowed = ALMOST_EQUAL if is_last else CLEARLY_WORSE
    kept = [
        number
        for number, score in enumerate(scores)
        if not scores[best] - score > allowed * math.sqrt(variances[best] + variances[number])
    ]
    if len(ids) < FEWEST:
        kept.sort(key=lambda number: -scores[number])
    elif not bool(state.grouped):
        kept.sort(key=lambda number: (len(set(state.candidates[number].tolist())), -scores[number]))
    return state.with_candidates(kept[:1] if is_last else kept)
