"""Clade: class priors, groups and shared layers, decided by held-out training samples."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.aggregation.mean import weighted_mean
from fedclade.aggregation.server_optimizer import served_state, update_models
from fedclade.clustering.clade import whitening_matrix
from fedclade.clustering.class_shares import concentration, merge_by_class_means
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum, ServerOptimizer
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree, tree_index, tree_map
from fedclade.core.rng import fold_in
from fedclade.errors import require
from fedclade.methods.base import Needs, is_classification
from fedclade.methods.clade_groups import CladeGroups, CladeGroupsState
from fedclade.programs.class_prior import (
    OFFSET,
    add_class_offset,
    class_statistics,
    keep_class_offset,
    sgd_with_offset,
    with_class_offset,
)
from fedclade.programs.held_out import held_out_score

NUMBERS_PER_CLASS = 8  # of a class-conditional mean
FIRST_CHECK, LAST_CHECK = 10, 20  # rounds after which candidates are compared
CLEARLY_WORSE = 5.0  # standard errors at the first check
ALMOST_EQUAL = 1.0  # standard errors at the last check: the candidate with fewer models stays
MAX_SCORED = 1000  # clients that compare the candidates


@dataclass(frozen=True)
class CladeState(CladeGroupsState):
    """The state of `CladeGroups`, the candidates, and everybody's class prior.

    A candidate gives each group a model. `cluster_ids` are the models of the first candidate.
    """

    group_ids: Tensor  # (clients,) the group of each client, or UNKNOWN
    candidates: Tensor  # (candidates, groups) the row of `models` for each group
    trunk_ids: Tensor  # (models,) models with the same number share all layers but the last
    prior: Tensor  # (classes,) π, everybody's class shares
    kappa: Tensor  # () κ; infinite if clients' class shares differ by chance

    def with_num_clients(self, clients: int) -> Self:
        missing = max(0, clients - len(self.group_ids))
        return replace(
            super().with_num_clients(clients),
            group_ids=F.pad(self.group_ids, (0, missing), value=UNKNOWN),
        )

    def at_candidates(self, kept: Tensor) -> Self:
        """The state with these candidates only; clients use the models of the first one."""
        rows, numbers = torch.unique(self.candidates[kept], return_inverse=True)
        cluster_ids = torch.where(
            self.group_ids == UNKNOWN, UNKNOWN, numbers[0][self.group_ids.clamp_min(0)]
        )
        trunk_ids = torch.unique(self.trunk_ids[rows], return_inverse=True)[1]
        return replace(
            self.at_rows(rows), candidates=numbers, trunk_ids=trunk_ids, cluster_ids=cluster_ids
        )


@dataclass(frozen=True)
class Clade(CladeGroups):
    """Clients differ in three ways, and each has its own answer. The method finds all three before
    training and needs no setting for them.

    p(y): client i adds o_ic = log[(n_ic + κ π_c) / ((n_i + κ) π_c)] to the outputs, in training and
    in use. n_ic are its samples of class c, π_c everybody's class shares. κ is the concentration of
    the clients' class shares, by moments; o_i = 0 if they differ by chance.

    p(y | x) or p(x | y): groups as in `CladeGroups`. Groups whose class-conditional means differ by
    chance are merged: they differ in p(y) alone.

    p(x): groups whose inputs agree (signatures of kind "features") share all layers but the last.

    Three candidates are trained side by side: the merged groups, the groups of `CladeGroups`, and
    one model for all. In the meantime clients do not train on every fifth sample. After 10 rounds a
    candidate is dropped if its accuracy on these samples, over all clients, is more than five
    standard errors below the best; after 20 rounds the best one remains. Equal candidates are
    trained once, so that without groups there is nothing to decide. Then it is FedAvg in each
    group, with Nesterov momentum on the server and the mean of the models over the rounds in use
    (`server.optimizer`, `server.serve`).

    Without class labels, or without a bias in a last linear layer, there is no class prior and no
    merging.

    Args:
        signature: see `CladeGroups`.
        signature_dim: e, see `CladeGroups`.
        noise_ratio: see `CladeGroups`; also of the costs of merging.
        recluster_every: see `CladeGroups`.
    """

    name: ClassVar[str] = "clade"
    title: ClassVar[str] = "Clade: class priors, groups and shared layers, by held-out samples"
    paper: ClassVar[str] = "fedclade's own method, docs/methods/clade.md"
    client_disclosure: ClassVar[str] = (
        "once, in clear, one or two mean sketches (128 numbers each) and the number of examples;"
        " once, scatter matrices, class counts and class-conditional means, of which the server"
        " needs only sums over groups; once a round the trained weights of each candidate; twice"
        " the number of held-out examples that each candidate predicts, of which the server needs"
        " only the sum"
    )
    extra_traffic: ClassVar[str] = (
        "once, before the first round, the signatures and class statistics of all clients; after"
        " rounds 10 and 20 the candidates to at most 1,000 clients"
    )
    upload_cost: ClassVar[str] = "R*W"
    download_cost: ClassVar[str] = "R*W"
    server_visibility: ClassVar[Needs] = "signatures"
    server_optimizer: ClassVar[ServerOptimizer] = "nesterov"
    serves_mean: ClassVar[bool] = True
    state: ClassVar[type[State]] = CladeState

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.signature_epsilon is None,
            "method.signature_epsilon",
            self.signature_epsilon,
            "class statistics leave a client without noise; use method 'clade_groups'",
        )

    @property
    def _bias(self) -> str:
        """The name of the last bias; "" if there is no class prior."""
        objective = self.local.objective
        if not is_classification(objective):
            return ""
        names = (name for name in objective.head_param_names() if name.endswith("bias"))
        return next((name for name in names if name in objective.trained), "")

    def initial_client_state(self, params: Tree) -> Tree:
        return {OFFSET: torch.zeros_like(params[self._bias])} if self._bias else {}

    def init(self, fed: Federation, params: Tree, key: int) -> CladeState:
        base = super().init(fed, params, key)
        groups = len(base)
        known = torch.nonzero(base.cluster_ids != UNKNOWN).flatten()
        merged, prior, kappa = torch.arange(groups), torch.ones(1), math.inf
        if self._bias and len(known):
            statistics = self._class_statistics(fed, base, known, key)
            counts = statistics["counts"].numpy()
            if counts.sum():
                kappa = concentration(
                    counts.sum(0),
                    *(float(statistics[name].sum()) for name in _MOMENTS),
                )
                shares = statistics["counts"].sum(0).clamp_min(0.5)
                prior = (shares / shares.sum()).float()
                self._keep_offsets(fed, known, prior, kappa, key)
                if groups > 1:
                    freedom = max(1.0, float(statistics["freedom"].sum()))
                    whitener = whitening_matrix(statistics["scatter"].sum(0).numpy(), freedom)
                    merged = torch.from_numpy(
                        merge_by_class_means(
                            counts,
                            statistics["sum"].numpy(),
                            whitener,
                            fold_in(key, "merge"),
                            self.noise_ratio,
                        )
                    )
        candidates = _distinct(merged, torch.arange(groups), torch.zeros_like(merged))
        inputs = self._input_groups(fed, base, key) if groups > 1 else torch.zeros_like(base.cluster_ids)
        table, trunk_ids = self._table(fed, base, candidates, inputs)
        models = tree_index(base.start, torch.zeros(len(trunk_ids), dtype=torch.int64))
        fields = {name: getattr(base, name) for name in _BASE_FIELDS}
        state = CladeState(
            models,
            base.cluster_ids,
            **fields,
            group_ids=base.cluster_ids,
            candidates=table,
            trunk_ids=trunk_ids,
            prior=prior,
            kappa=torch.tensor(kappa),
        )
        return state.at_candidates(torch.arange(len(table)))

    def _class_statistics(
        self, fed: Federation, state: CladeGroupsState, ids: Tensor, key: int
    ) -> Tree:
        program = class_statistics(
            self.local.objective, NUMBERS_PER_CLASS, fold_in(int(state.signature_key), "classes")
        )
        by_group = SegmentSum(
            segment_ids=state.cluster_ids[ids],
            weights=torch.ones(len(ids)),
            num_segments=len(state),
        )
        start = ModelAssignment.all_same(state.start, len(ids))
        sums = fed.map(program, ids, per_client=start, key=key, reduce=by_group).sums
        return {name: value.double().cpu() for name, value in sums.items()}

    def _keep_offsets(
        self, fed: Federation, ids: Tensor, prior: Tensor, kappa: float, key: int
    ) -> None:
        if math.isfinite(kappa) and len(ids):
            broadcast = {"prior": prior, "kappa": torch.tensor(kappa)}
            fed.map(keep_class_offset(len(prior)), ids, broadcast=broadcast, key=key)

    def _input_groups(self, fed: Federation, base: CladeGroupsState, key: int) -> Tensor:
        """(clients,) groups of clients with the same p(x), or UNKNOWN."""
        ids = torch.nonzero(base.cluster_ids != UNKNOWN).flatten()
        key, by_inputs = fold_in(key, "inputs"), replace(self, signature="features")
        replies = by_inputs._signatures(
            fed, ModelAssignment.all_same(base.start, len(ids)), ids, key
        )
        result = torch.full_like(base.cluster_ids, UNKNOWN)
        if len(replies.ids):
            same = ModelAssignment.all_same(base.start, len(replies.ids))
            result[replies.ids] = by_inputs._groups(fed, same, replies, key)
        return result

    @staticmethod
    def _table(
        fed: Federation, base: CladeGroupsState, candidates: list[Tensor], inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The rows of the candidates' models, and the trunk of each row. Models share a trunk if most
        samples of their clients are in the same group of inputs.
        """
        rows, trunks = [], []
        known = torch.nonzero((base.cluster_ids != UNKNOWN) & (inputs != UNKNOWN)).flatten()
        for candidate in candidates:
            votes = torch.zeros(int(candidate.max()) + 1, max(1, int(inputs.max()) + 1))
            place = (candidate[base.cluster_ids[known]], inputs[known])
            votes.index_put_(place, fed.sizes[known].float(), accumulate=True)
            rows.append(candidate + sum(len(trunk) for trunk in trunks))
            trunks.append(votes.argmax(1) + sum(votes.shape[1] for _ in trunks))
        return torch.stack(rows), torch.cat(trunks)

    def round(
        self, fed: Federation, state: CladeState, cohort: Tensor, key: int
    ) -> CladeState:
        state = replace(state, rounds=state.rounds + 1)
        is_open = len(state.candidates) > 1
        part = "fit" if is_open else "all"
        has_prior = math.isfinite(float(state.kappa))
        train = (
            sgd_with_offset(self.local, self._bias, part) if has_prior else sgd(self.local, part=part)
        )
        sums: Tree = {}
        weights = torch.zeros(len(state), dtype=torch.float64)
        for candidate in state.candidates:
            rows = candidate[state.group_ids[cohort]]
            replies = fed.map(
                train,
                cohort,
                per_client=ModelAssignment(state.models, rows),
                key=key,
                reduce=SegmentSum(
                    segment_ids=rows,
                    weights=fed.sizes[cohort],
                    num_segments=len(state),
                    robust_ok=True,
                ),
            )
            if replies.sums:
                sums = tree_map(torch.add, sums, replies.sums) if sums else replies.sums
                weights = weights + replies.total_weight
        state = update_models(fed, state, self._means(state, sums, weights))
        if is_open and int(state.rounds) in (FIRST_CHECK, LAST_CHECK):
            return self._compare(fed, state, key)
        return state

    def _means(self, state: CladeState, sums: Tree, weights: Tensor) -> Tree:
        """The mean over each model's clients for its last layer, and over all clients of its trunk
        for the other layers.
        """
        if len(state.trunk_ids.unique()) == len(state) or not sums:
            return weighted_mean(sums, weights, fallback=state.models)
        head, trunk = self.local.objective.head_param_names(), state.trunk_ids
        trunks = int(trunk.max()) + 1
        first = torch.stack([torch.nonzero(trunk == number)[0, 0] for number in range(trunks)])

        def pooled(rows: Tensor) -> Tensor:
            zeros = rows.new_zeros((trunks, *rows.shape[1:]))
            return zeros.index_add_(0, trunk.to(rows.device), rows)

        own, shared = (
            {name: value for name, value in state.models.items() if (name in head) == is_head}
            for is_head in (True, False)
        )
        heads = weighted_mean({name: sums[name] for name in own}, weights, fallback=own)
        trunk_means = weighted_mean(
            {name: pooled(sums[name]) for name in shared},
            pooled(weights),
            fallback=tree_index(shared, first),
        )
        expanded = tree_index(trunk_means, trunk) if trunk_means else {}
        return {name: heads[name] if name in head else expanded[name] for name in state.models}

    def _compare(self, fed: Federation, state: CladeState, key: int) -> CladeState:
        """Drop candidates by their scores on held-out samples."""
        ids = torch.nonzero(state.group_ids != UNKNOWN).flatten()
        if len(ids) > MAX_SCORED:
            generator = np.random.default_rng(fold_in(key, "scored"))
            ids = torch.from_numpy(np.sort(generator.permutation(ids.numpy())[:MAX_SCORED]))
        program: AnyProgram = held_out_score(self.local.objective)
        if math.isfinite(float(state.kappa)):
            program = with_class_offset(self._bias, program)
        models = served_state(state).models
        total = SegmentSum(
            segment_ids=torch.zeros_like(ids), weights=torch.ones(len(ids)), num_segments=1
        )
        scores, errors = [], []
        for number, candidate in enumerate(state.candidates):
            assignment = ModelAssignment(models, candidate[state.group_ids[ids]])
            sums = fed.map(
                program, ids, per_client=assignment, key=fold_in(key, number), reduce=total
            ).sums
            if not sums or not float(sums["examples"][0]):
                return state
            score, square, examples = (
                float(sums[name][0]) for name in ("score", "square", "examples")
            )
            scores.append(score / examples)
            errors.append(max(0.0, square / examples - (score / examples) ** 2) / examples)
        best = int(np.argmax(scores))
        is_last = int(state.rounds) == LAST_CHECK
        allowed = ALMOST_EQUAL if is_last else CLEARLY_WORSE
        kept = [
            number
            for number, score in enumerate(scores)
            if scores[best] - score <= allowed * math.sqrt(errors[best] + errors[number])
        ]
        kept.sort(key=lambda number: (len(state.candidates[number].unique()), -scores[number]))
        if os.environ.get("RACE"):
            print(int(state.rounds), [len(c.unique()) for c in state.candidates], np.round(scores, 3), np.round(np.sqrt(errors), 3), kept)
        return state.at_candidates(torch.tensor(kept[:1] if is_last else kept))

    def add_clients(self, fed: Federation, state: CladeState, ids: Tensor, key: int) -> CladeState:
        ids_before = state.with_num_clients(len(fed.sizes))
        by_group = replace(ids_before, cluster_ids=ids_before.group_ids)
        state = super().add_clients(fed, by_group, ids, key)
        joined = ids[state.cluster_ids[ids] != UNKNOWN]
        if math.isfinite(float(state.kappa)):
            self._keep_offsets(fed, joined, state.prior, float(state.kappa), key)
        state = replace(state, group_ids=state.cluster_ids)
        return state.at_candidates(torch.arange(len(state.candidates)))

    def personalization_program(self) -> AnyProgram | None:
        return add_class_offset(self._bias) if self._bias else None

    def cost_symbols(self, state: State) -> dict[str, int]:
        assert isinstance(state, CladeState)
        return super().cost_symbols(state) | {"R": len(state.candidates)}


_MOMENTS = ("same_class", "counts_squared", "n_squared", "noise")
_BASE_FIELDS = ("start", "signature_key", "signature", "whitener", "rounds")


def _distinct(*labels: Tensor) -> list[Tensor]:
    """The partitions that differ from all before them."""
    result: list[Tensor] = []
    for partition in labels:
        if not any(torch.equal(partition, other) for other in result):
            result.append(partition)
    return result
