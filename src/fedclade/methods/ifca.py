"""IFCA: K models; every client takes the one that fits it best and improves it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.aggregation.mean import weighted_mean
from fedclade.core.federation import ClientResults, Federation, SegmentSum
from fedclade.core.pytree import Tree, concatenate, stack, tree_index
from fedclade.core.rng import client_keys, fold_in
from fedclade.core.state import UNKNOWN, State
from fedclade.errors import require_int
from fedclade.methods._loss_selection import LossSelectionMethod
from fedclade.methods.base import Groups, Needs, check_choices
from fedclade.methods.fedavg import fedavg_round
from fedclade.programs.model_selection import choose_then
from fedclade.programs.sgd import sgd


@dataclass(frozen=True)
class IFCAState(State):
    """The models of one attempt after those of another, K of each; one model while it warms up."""

    rounds: Tensor  # () how many there have been


@dataclass(frozen=True)
class IFCA(LossSelectionMethod[IFCAState]):
    """There are k models θ_j (`clusters`). Client i of the cohort is sent all, takes ĵ = argmin_j
    F_i(θ_j) by the loss of its own training examples, trains θ_ĵ, and says which it was; θ_j
    becomes the mean, by examples, of those who took it. A model nobody took stays.

    The k models differ at first by the order in which their weights stand: all have the initial
    model's distribution. `warm_up` rounds of FedAvg may come first; then only the last linear layer
    is drawn anew for each of them. shared_layers="trunk": all but that layer is averaged over the
    whole cohort, so that it is the same in all k models.

    IFCA depends on where it starts: all clients may come to prefer one model. num_restarts: so many
    draws of the k models are trained side by side, with as much more traffic, for `trial_rounds`
    rounds; the one whose clients have the least training loss in the last of them goes on.
    """

    name: ClassVar[str] = "ifca"
    title: ClassVar[str] = "IFCA: every client trains that of K models which fits it best"
    paper: ClassVar[str] = (
        "Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020"
    )
    client_disclosure: ClassVar[str] = (
        "the trained weights, once a round, of which only the sum over a cluster is needed, and"
        " which model it took; with restarts, in the first rounds, also its training loss"
    )
    server_visibility: ClassVar[Needs] = "sum"
    groups: ClassVar[Groups] = "given"
    upload_cost: ClassVar[str] = "W + 8"
    download_cost: ClassVar[str] = "K*W"
    extra_traffic: ClassVar[str] = (
        "with restarts, in the first `trial_rounds` rounds, as many times that"
    )
    state: ClassVar[type[State]] = IFCAState

    clusters: int = 5
    shared_layers: Literal["nothing", "trunk"] = "nothing"
    warm_up: int = 0
    num_restarts: int = 1
    trial_rounds: int = 10

    def __post_init__(self) -> None:
        check_choices(self)
        for name, least in (
            ("clusters", 1),
            ("warm_up", 0),
            ("num_restarts", 1),
            ("trial_rounds", 1),
        ):
            require_int(f"method.{name}", getattr(self, name), least)

    def init(self, fed: Federation, params: Tree, key: int) -> IFCAState:
        state = IFCAState(
            stack([params]), torch.zeros(len(fed.sizes), dtype=torch.int64), rounds=torch.tensor(0)
        )
        return state if self.warm_up else self._drawn(state, key)

    def round(self, fed: Federation, state: IFCAState, cohort: Tensor, key: int) -> IFCAState:
        state = replace(state, rounds=state.rounds + 1)
        past = int(state.rounds) - self.warm_up
        if past <= 0:
            state = fedavg_round(fed, sgd(self.local), state, cohort, key)
            return self._drawn(state, key) if past == 0 else state
        draws = torch.split(torch.arange(len(state)), int(self.clusters))
        trained = [
            self._train(fed, tree_index(state.models, rows), cohort, key, tell_loss=len(draws) > 1)
            for rows in draws
        ]
        models, got = (
            concatenate([models for models, _ in trained]),
            trained[0][1],
        )  # until the trial ends the first draw is in use
        if len(draws) > 1 and past >= self.trial_rounds and any(len(got.ids) for _, got in trained):
            models, got = min(trained, key=lambda one: _mean_loss(fed, one[1]))
            state = replace(state, cluster_ids=torch.full_like(state.cluster_ids, UNKNOWN))
        cluster = (
            state.cluster_ids.index_copy(0, got.ids, got.outputs["row"].cpu())
            if len(got.ids)
            else state.cluster_ids
        )
        return replace(state, models=models, cluster_ids=cluster)

    def _train(
        self, fed: Federation, models: Tree, cohort: Tensor, key: int, tell_loss: bool
    ) -> tuple[Tree, ClientResults]:
        """One round with these k models."""
        program = choose_then(self.local.objective, sgd(self.local), tell_loss)
        give = SegmentSum(
            segment_ids="row",
            weights=fed.sizes[cohort],
            num_segments=self.clusters,
            keys=tuple(models),
            robust_ok=True,
        )
        got = fed.map(program, cohort, broadcast=models, key=key, reduce=give)
        after = weighted_mean(got.sums, got.total_weight, keep=models)
        if self.shared_layers == "trunk" and len(got.ids):
            head = self.local.objective.head_param_names()
            together = {
                name: value.sum(0, keepdim=True)
                for name, value in got.sums.items()
                if name not in head
            }
            trunk = weighted_mean(
                together,
                got.total_weight.sum(0, keepdim=True),
                keep={name: models[name][:1] for name in together},
            )
            after |= {name: value.expand_as(after[name]).clone() for name, value in trunk.items()}
        return after, got

    def _drawn(self, state: IFCAState, key: int) -> IFCAState:
        """k models for each restart, made from the one there is by putting its weights into other
        orders.

        What was trained is not: after a warm-up only the heads are drawn, all of them, since a
        trained one would be everybody's choice.
        """
        names = (
            self.local.objective.head_param_names()
            if self.warm_up or self.shared_layers == "trunk"
            else tuple(state.models)
        )
        rows = [
            tree_index(state.models, torch.tensor(0))
            for _ in range(self.clusters * self.num_restarts)
        ]
        for number, row in enumerate(rows):
            if number or (self.warm_up and self.clusters > 1):
                row |= {
                    name: _shuffled(row[name], fold_in(key, "model", number, name))
                    for name in names
                }
        return replace(
            state, models=stack(rows), cluster_ids=torch.full_like(state.cluster_ids, UNKNOWN)
        )


def _shuffled(weights: Tensor, key: int) -> Tensor:
    order = client_keys(key, torch.arange(weights.numel())).argsort(stable=True).to(weights.device)
    return weights.flatten()[order].view_as(weights)


def _mean_loss(fed: Federation, got: ClientResults) -> float:
    return (
        float(got.outputs["loss"].sum()) / float(fed.sizes[got.ids].sum())
        if len(got.ids)
        else torch.inf
    )
