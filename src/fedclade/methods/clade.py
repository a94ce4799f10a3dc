"""Clade: class priors, groups and shared layers, decided by held-out training samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import Tensor

from fedclade.aggregation.server_optimizer import update_models
from fedclade.clustering.individuals import are_grouped
from fedclade.core.batching import Part
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum, ServerOptimizer
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree, tree_map
from fedclade.core.rng import fold_in
from fedclade.errors import require
from fedclade.methods._candidates import CladeState, compare_candidates, distinct, means_by_trunk
from fedclade.methods._class_prior import (
    class_bias,
    head_names,
    keep_offsets,
    learn_class_shares,
)
from fedclade.methods._input_groups import input_groups
from fedclade.methods.base import LayerName, Needs
from fedclade.methods.clade_groups import CladeGroups, CladeGroupsState
from fedclade.programs.class_prior import (
    OFFSET,
    add_class_offset,
    sgd_with_offset,
    with_class_offset,
)
from fedclade.programs.held_out import held_out_score, train_then

OWN_EPOCHS = 5  # with which a candidate is also tried


@dataclass(frozen=True)
class Clade(CladeGroups):
    """Clients differ in three ways, and each has its own answer. The method finds all three from
    training data and needs no setting for them.

    p(y): client i adds o_ic = log[(n_ic + κ π_c) / ((n_i + κ) π_c)] to the outputs, in training and
    in use. n_ic are its samples of class c, π_c everybody's class shares. κ is the concentration of
    the clients' class shares, by moments; o_i = 0 if they differ by chance.

    p(y | x) or p(x | y): groups as in `CladeGroups`. Groups whose class-conditional means differ by
    chance may be merged: they differ in p(y) alone.

    p(x): groups whose inputs agree (signatures of kind "features") share all layers but the last.

    Three candidates are trained side by side: the merged groups, the groups of `CladeGroups`, and
    one model for all. In the meantime clients do not train on every fifth sample. After 10 and 20
    rounds the candidates are compared by the accuracy on these samples over all clients, as they
    are and after five epochs of each client's own. Of those within one standard error the merged
    groups remain if the clients differ in groups, else the candidate with the fewest models; the
    signatures' tree is compared with trees of individuals. Fewer than eight clients cannot show
    this, so of their candidates the best remains. Without groups there is nothing to decide. Then
    it is FedAvg in each group, with Nesterov momentum on the server and the mean of the models over
    the rounds in use (`server.optimizer`, `server.serve`).

    Without class labels, or without a bias in the last linear layer, there is no class prior and no
    merging.

    Args:
        signature: see `CladeGroups`.
        signature_dim: e, see `CladeGroups`.
        noise_ratio: see `CladeGroups`; also of the costs of merging.
        late: see `CladeGroups`. With "features" a late client has no class prior of its own.
        recluster_every: after this number of rounds clients move and groups split as in
            `CladeGroups`, with the trained models, and class priors are computed again. If the
            groups changed, new candidates are compared, unless a comparison has shown that the
            clients differ in groups; 0 for never.
        signature_epsilon: see `CladeGroups`.
        signature_delta: see `CladeGroups`.
        signature_clip: see `CladeGroups`.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> method = fc.Clade(recluster_every=5)
        >>> result = fc.run(method, clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "clade"
    title: ClassVar[str] = "Clade: class priors, groups and shared layers, by held-out samples"
    paper: ClassVar[str] = "fedclade's own method, docs/methods/clade.md"
    client_disclosure: ClassVar[str] = (
        "once, in clear, one or two mean sketches (128 numbers each) and the number of examples;"
        " once, scatter matrices, class counts and class-conditional means, of which the server"
        " needs only sums over groups; once a round the trained weights of each candidate; after"
        " rounds 10 and 20 the number of held-out examples that each candidate predicts, of which"
        " the server needs only the sum"
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
    personal_layer: ClassVar[LayerName] = "interpolate"
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
        return class_bias(self.local.objective)

    def initial_client_state(self, params: Tree) -> Tree:
        return {OFFSET: torch.zeros_like(params[self._bias])} if self._bias else {}

    def init(self, fed: Federation, params: Tree, key: int) -> CladeState:
        return self._with_candidates(fed, super().init(fed, params, key), key)

    def _with_candidates(
        self, fed: Federation, base: CladeGroupsState, key: int, known_to_differ: bool = False
    ) -> CladeState:
        """The state whose groups are those of `base`, with new priors, candidates and trunks. A
        candidate's models continue from the models of `base`. If the clients are known to differ
        in groups, the groups are the only candidate.
        """
        shares = learn_class_shares(fed, self.local.objective, base, key, self.noise_ratio)
        groups = torch.arange(len(base))
        candidates = distinct(shares.merged, groups, torch.zeros_like(groups))
        known = base.cluster_ids != UNKNOWN
        grouped = known_to_differ
        if known_to_differ:
            candidates = [groups]
        elif len(candidates) > 1:
            grouped = are_grouped(
                base.signature[known].numpy(),
                fed.sizes[known].double().numpy(),
                base.whitener.numpy(),
                fold_in(key, "individuals"),
            )
        inputs = input_groups(self, fed, base, key) if len(base) > 1 else None
        return CladeState.opened(
            fed.sizes, base, candidates, inputs, shares.prior, shares.kappa, grouped
        )

    def round(
        self, fed: Federation, state: CladeGroupsState, cohort: Tensor, key: int
    ) -> CladeState:
        assert isinstance(state, CladeState)
        state = replace(state, rounds=state.rounds + 1)
        program = self._training(state)
        # In the first round all candidates have the same models, so clients reply the same to all.
        subgroups = state.group_ids[cohort] if state.is_open else None
        sums: Tree = {}
        weights = torch.zeros(len(state), dtype=torch.float64)
        for candidate in state.candidates:
            rows = candidate[state.group_ids[cohort]]
            replies = fed.map(
                program,
                cohort,
                per_client=ModelAssignment(state.models, rows),
                key=key,
                reduce=SegmentSum(
                    segment_ids=rows,
                    weights=fed.sizes[cohort],
                    num_segments=len(state),
                    robust_ok=True,
                    subgroup_ids=subgroups,
                ),
            )
            if replies.sums:
                sums = tree_map(torch.add, sums, replies.sums) if sums else replies.sums
                weights = weights + replies.total_weight.cpu()
        head = head_names(self.local.objective)
        state = update_models(fed, state, means_by_trunk(state, sums, weights, head))
        if state.is_open:
            return compare_candidates(fed, state, self._trials(state), key)
        if self.recluster_every and int(state.rounds) % self.recluster_every == 0:
            return self._look_again(fed, state, key)
        return state

    def _training(self, state: CladeState, epochs: int = 0) -> AnyProgram:
        """The local training of a round. While candidates are compared, without the held-out
        samples.
        """
        local = replace(self.local, epochs=epochs, steps=0) if epochs else self.local
        part: Part = "fit" if state.is_open else "all"
        if math.isfinite(float(state.kappa)):
            return sgd_with_offset(local, self._bias, part)
        return sgd(local, part=part)

    def _trials(self, state: CladeState) -> list[AnyProgram]:
        """The scores of a model on held-out samples: as it is, and after own epochs."""
        score: AnyProgram = held_out_score(self.local.objective)
        if math.isfinite(float(state.kappa)):
            score = with_class_offset(self._bias, score)
        return [score, train_then(self._training(state, OWN_EPOCHS), score)]

    def _look_again(self, fed: Federation, state: CladeState, key: int) -> CladeState:
        """Search groups under the trained models. If they changed and a comparison has shown that
        clients differ in groups, the new groups continue; else candidates are compared again.
        """
        base = self._recluster(fed, state, key)
        if len(base) != len(state) or not torch.equal(base.cluster_ids, state.cluster_ids):
            known_to_differ = bool(state.grouped) and len(state) > 1
            return self._with_candidates(fed, base, key, known_to_differ)
        shares = learn_class_shares(fed, self.local.objective, base, key, self.noise_ratio)
        return replace(state, prior=shares.prior, kappa=torch.tensor(shares.kappa))

    def add_clients(
        self, fed: Federation, state: CladeGroupsState, ids: Tensor, key: int
    ) -> CladeState:
        assert isinstance(state, CladeState)
        state = state.with_num_clients(len(fed.sizes))
        state = cast(
            CladeState,
            super().add_clients(fed, replace(state, cluster_ids=state.group_ids), ids, key),
        )
        if self.late == "signature":  # a class prior needs labels
            joined = ids[state.cluster_ids[ids] != UNKNOWN]
            keep_offsets(fed, joined, state.prior, float(state.kappa), key)
        return replace(state, group_ids=state.cluster_ids).served_by_first()

    def personalization_program(self) -> AnyProgram | None:
        return add_class_offset(self._bias) if self._bias else None

    def cost_symbols(self, state: State) -> dict[str, int]:
        assert isinstance(state, CladeState)
        return super().cost_symbols(state) | {"R": len(state.candidates)}
