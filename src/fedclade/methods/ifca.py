"""IFCA: K models; each client trains the one with the least loss on its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.aggregation.mean import weighted_mean
from fedclade.aggregation.server_optimizer import initial_server_state, update_models
from fedclade.core.federation import ClientResults, Federation, SegmentSum
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.pytree import Tree, concatenate, stack, tree_index
from fedclade.core.rng import client_keys, fold_in
from fedclade.errors import require_int
from fedclade.methods._loss_selection import LossSelectionMethod
from fedclade.methods.base import Groups, Needs, check_choices
from fedclade.methods.fedavg import fedavg_round
from fedclade.programs.model_selection import choose_then


@dataclass(frozen=True)
class IFCAState(State):
    """K models per restart, one restart after another; one model during the warm-up."""

    rounds: Tensor  # () the number of rounds so far


@dataclass(frozen=True)
class IFCA(LossSelectionMethod[IFCAState]):
    """There are k models θ_j. Client i of the cohort receives all of them, chooses ĵ = argmin_j
    F_i(θ_j) by the loss on its training examples, trains θ_ĵ and sends it with ĵ. θ_j becomes the
    mean, weighted by examples, of the models of the clients that chose it. A model that no client
    chose does not change.

    A choice is about the models of its round. A client that was not in the last round chooses among
    the present models when it needs one.

    The initial k models are random permutations of the weights of the initial model, so that all
    have its distribution.

    Args:
        clusters: k.
        shared_layers: "trunk" averages all but the last linear layer over the whole cohort, so that
            these layers are the same in all k models.
        warm_up: rounds of FedAvg before the k models are made; then only their last linear layers
            differ.
        num_restarts: IFCA depends on the initial models: all clients may end up with one model.
            With n restarts, n sets of k models are trained at the same time, with n times the
            traffic; then the set with the least training loss is kept.
        trial_rounds: rounds before a set is selected.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> method = fc.IFCA(clusters=2, num_restarts=2)
        >>> result = fc.run(method, clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> result.summary["clusters"]
        2
    """

    name: ClassVar[str] = "ifca"
    title: ClassVar[str] = "IFCA: each client trains the one of K models that fits its data best"
    paper: ClassVar[str] = (
        "Ghosh et al., An Efficient Framework for Clustered Federated Learning, NeurIPS 2020"
    )
    client_disclosure: ClassVar[str] = (
        "once a round the trained weights and the number of the model that it chose; the server"
        " needs only the sum of the weights over each group. With restarts, in the first rounds,"
        " also the training loss"
    )
    server_visibility: ClassVar[Needs] = "sum"
    groups: ClassVar[Groups] = "given"
    upload_cost: ClassVar[str] = "W + 8"
    download_cost: ClassVar[str] = "K*W"
    extra_traffic: ClassVar[str] = (
        "for a client that needs a model and was not in the last round: K*W down, 8 up; with n"
        " restarts, n times as much in the first `trial_rounds` rounds"
    )
    without_noise: ClassVar[tuple[str, ...]] = ("choose",)
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

    def why_no_client_privacy(self) -> str:
        restarts = "compares restarts by losses without noise; set method.num_restarts = 1"
        return restarts if self.num_restarts > 1 else ""

    def why_no_secure_sum(self) -> str:
        restarts = "compares restarts by the clients' losses; set method.num_restarts = 1"
        return restarts if self.num_restarts > 1 else ""

    def init(self, fed: Federation, params: Tree, key: int) -> IFCAState:
        state = IFCAState(
            stack([params]), torch.zeros(len(fed.sizes), dtype=torch.int64), rounds=torch.tensor(0)
        )
        return state if self.warm_up else self._drawn(fed, state, key)

    def round(self, fed: Federation, state: IFCAState, cohort: Tensor, key: int) -> IFCAState:
        state = replace(state, rounds=state.rounds + 1)
        past = int(state.rounds) - self.warm_up
        if past <= 0:
            state = fedavg_round(fed, sgd(self.local), state, cohort, key)
            return self._drawn(fed, state, key) if past == 0 else state
        draws = torch.split(torch.arange(len(state)), int(self.clusters))
        trained = [
            self._train(
                fed, tree_index(state.models, rows), cohort, key, report_loss=len(draws) > 1
            )
            for rows in draws
        ]
        state = update_models(fed, state, concatenate([means for means, _ in trained]))
        best = 0  # until the trial ends, clients use the models of the first draw
        if not any(len(results.ids) for _, results in trained):
            return state
        if len(draws) > 1 and past >= self.trial_rounds:
            best = min(range(len(draws)), key=lambda draw: _mean_loss(fed, trained[draw][1]))
            state = state.at_rows(draws[best])
        results, unknown = trained[best][1], torch.full_like(state.cluster_ids, UNKNOWN)
        if not len(results.ids):
            return replace(state, cluster_ids=unknown)
        # All models may have changed: only the choices of this round are about them.
        chosen = unknown.index_copy(0, results.ids, results.outputs["row"].cpu())
        return replace(state, cluster_ids=chosen)

    def add_clients(self, fed: Federation, state: IFCAState, ids: Tensor, key: int) -> IFCAState:
        first_draw = torch.arange(len(state))[: self.clusters]
        chosen = super().add_clients(fed, state.at_rows(first_draw), ids, key)
        return replace(state, cluster_ids=chosen.cluster_ids)

    def _train(
        self, fed: Federation, models: Tree, cohort: Tensor, key: int, report_loss: bool
    ) -> tuple[Tree, ClientResults]:
        """One round with these k models: the means of their clients' models."""
        program = choose_then(self.local.objective, sgd(self.local), report_loss)
        reduce = SegmentSum(
            segment_ids="row",
            weights=fed.sizes[cohort],
            num_segments=self.clusters,
            keys=tuple(models),
            robust_ok=True,
        )
        results = fed.map(program, cohort, broadcast=models, key=key, reduce=reduce)
        after = weighted_mean(results.sums, results.total_weight, fallback=models)
        if self.shared_layers == "trunk" and len(results.ids):
            head = self.local.objective.head_param_names()
            together = {
                name: value.sum(0, keepdim=True)
                for name, value in results.sums.items()
                if name not in head
            }
            trunk = weighted_mean(
                together,
                results.total_weight.sum(0, keepdim=True),
                fallback={name: models[name][:1] for name in together},
            )
            after |= {name: value.expand_as(after[name]).clone() for name, value in trunk.items()}
        return after, results

    def _drawn(self, fed: Federation, state: IFCAState, key: int) -> IFCAState:
        """k models per restart, made from one model by permuting its weights.

        After a warm-up only the heads are permuted, those of all k models: every client would
        choose a model with a trained head.
        """
        names = (
            self.local.objective.head_param_names()
            if self.warm_up or self.shared_layers == "trunk"
            else self.local.objective.trained
        )
        rows = [
            tree_index(state.models, torch.tensor(0))
            for _ in range(self.clusters * self.num_restarts)
        ]
        for number, row in enumerate(rows):
            if number or (self.warm_up and self.clusters > 1):
                row |= {
                    name: shuffled(row[name], fold_in(key, "model", number, name))
                    for name in names
                    if name in row
                }
        models = stack(rows)
        return replace(
            state,
            models=models,
            cluster_ids=torch.full_like(state.cluster_ids, UNKNOWN),
            server_state=initial_server_state(fed.server_update, models),
        )


def shuffled(weights: Tensor, key: int) -> Tensor:
    """The weights in a random order, which has their distribution."""
    order = client_keys(key, torch.arange(weights.numel())).argsort(stable=True).to(weights.device)
    return weights.flatten()[order].view_as(weights)


def _mean_loss(fed: Federation, results: ClientResults) -> float:
    return (
        float(results.outputs["loss"].sum()) / float(fed.sizes[results.ids].sum())
        if len(results.ids)
        else torch.inf
    )
