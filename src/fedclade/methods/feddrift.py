"""FedDrift: a client whose data change opens a model; models that are equally good are merged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.clustering.feddrift import merge_groups
from fedclade.clustering.graph import canonical_labels
from fedclade.core.federation import Federation
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.pytree import Tree, stack
from fedclade.core.rng import fold_in
from fedclade.errors import require, require_int
from fedclade.methods.base import Groups, Method, Needs, check_choices, require_class_labels
from fedclade.methods.fedavg import fedavg_round
from fedclade.programs.error_rates import error_rates

NO_ERROR_YET = 1.0  # no error can be larger, so the first look finds no drift


@dataclass(frozen=True)
class FedDriftState(State):
    """The models, and how good the best one was for each client."""

    error: Tensor  # (clients,) the error rate of its best model at its last look
    rounds: Tensor  # () the number of rounds so far

    def with_num_clients(self, clients: int) -> Self:
        missing = max(0, clients - len(self.error))
        error = F.pad(self.error, (0, missing), value=NO_ERROR_YET)
        return replace(super().with_num_clients(clients), error=error)


@dataclass(frozen=True)
class FedDrift(Method[FedDriftState]):
    """Every `interval` rounds (a time step) all clients evaluate all models on their training
    samples. A client moves to its best model; its own one wins ties. If the error of the best model
    is more than δ above that at the last look, the data have changed: the client opens a model of
    its own, a copy of the best one.

    Then models i and j are merged while max(L_ij - L_ii, L_ji - L_jj) < δ, by complete linkage,
    where L_ij is the error of model i on the clients of model j. The merged model is their mean,
    weighted by the samples of their clients. Models that were opened just now are not merged.

    Between the looks it is FedAvg in each group. A client that joins later takes the model with the
    least error.

    Args:
        delta: δ, of error rates.
        interval: the rounds of a time step.
        start: "own": each client starts with its own model, and the first look merges them; "one":
            all start with one model, so that there are groups only after changes.
        max_models: the largest number of models. Models without clients make place; if there are
            none, a client whose data changed stays with its best model.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.FedDrift(delta=0.1), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clusters)
        6
    """

    name: ClassVar[str] = "feddrift"
    title: ClassVar[str] = "FedDrift: clients whose data change open models, which are merged later"
    paper: ClassVar[str] = (
        "Jothimurugesan et al., Federated Learning under Distributed Concept Drift, AISTATS 2023"
    )
    client_disclosure: ClassVar[str] = (
        "once a round the trained weights, of which the server needs only sums over groups; every"
        " `interval` rounds, in clear, the error of each model on its samples"
    )
    server_visibility: ClassVar[Needs] = "signatures"
    groups: ClassVar[Groups] = "found"
    extra_traffic: ClassVar[str] = "every `interval` rounds for all clients: K*W down, 4 K bytes up"
    state: ClassVar[type[State]] = FedDriftState

    delta: float = 0.06
    interval: int = 10
    start: Literal["own", "one"] = "own"
    max_models: int = 100

    def __post_init__(self) -> None:
        check_choices(self)
        require(0 < self.delta < 1, "method.delta", self.delta, "must be above 0 and below 1")
        require_int("method.interval", self.interval, 1)
        require_int("method.max_models", self.max_models, 1)

    def init(self, fed: Federation, params: Tree, key: int) -> FedDriftState:
        require_class_labels(self.local.objective, self.name, "compares accuracies")
        clients = len(fed.sizes)
        require(
            self.start == "one" or clients <= self.max_models,
            "method.max_models",
            self.max_models,
            f"with start = 'own' it must be at least the number of clients, {clients}; use start ="
            " 'one'",
        )
        own = torch.arange(clients) if self.start == "own" else torch.zeros(clients).long()
        return FedDriftState(
            stack([params] * (int(own.max()) + 1)),
            own,
            error=torch.full((clients,), NO_ERROR_YET),
            rounds=torch.tensor(0),
        )

    def round(
        self, fed: Federation, state: FedDriftState, cohort: Tensor, key: int
    ) -> FedDriftState:
        if int(state.rounds) and int(state.rounds) % self.interval == 0:
            state = self._look(fed, state, fold_in(key, "look"))
        state = replace(state, rounds=state.rounds + 1)
        return fedavg_round(fed, sgd(self.local), state, cohort, key)

    def _look(self, fed: Federation, state: FedDriftState, key: int) -> FedDriftState:
        """The state of the next time step."""
        known = (state.cluster_ids != UNKNOWN).nonzero().flatten()
        results = fed.map(error_rates(self.local.objective), known, broadcast=state.models, key=key)
        ids = results.ids
        if not len(ids):
            return state
        errors = results.outputs["errors"].cpu()
        best, choice = errors.min(1)
        own = state.cluster_ids[ids]
        choice = torch.where(errors.gather(1, own[:, None])[:, 0] <= best, own, choice)
        rise = best - state.error[ids]
        drifted = rise > self.delta
        state = replace(
            state,
            cluster_ids=state.cluster_ids.index_copy(0, ids, choice),
            error=state.error.index_copy(0, ids, best),
        )
        members = F.one_hot(choice, len(state)).double() * fed.sizes[ids, None].double()
        state = self._merged(state, errors.double(), members * ~drifted[:, None])
        by_rise = ids[drifted][rise[drifted].argsort(descending=True, stable=True)]
        return self._opened(state, by_rise)

    def _merged(self, state: FedDriftState, errors: Tensor, members: Tensor) -> FedDriftState:
        """The state in which models that are about equally good are one.

        Args:
            state: the state.
            errors: (n, K) the errors of the clients that replied.
            members: (n, K) the samples of each of them, in the column of its model.
        """
        weight = members.sum(0)
        used = weight.nonzero().flatten()
        first = torch.arange(len(state))
        if len(used):
            losses = (errors.T @ members / weight.clamp_min(1))[used][:, used]
            merged = merge_groups(losses.numpy(), self.delta)
            first[used] = used[(merged[:, None] == merged).argmax(1)]
        new = torch.from_numpy(canonical_labels(first.numpy()))
        shares = F.one_hot(new).T.double() * weight.where(weight > 0, 1.0)
        shares = shares / shares.sum(1, keepdim=True)  # 1 for a model that is not merged
        models = {
            name: (shares.to(value.device) @ value.double().flatten(1))
            .to(value.dtype)
            .view(-1, *value.shape[1:])
            for name, value in state.models.items()
        }
        return replace(
            state.at_rows(torch.unique(first)), models=models, cluster_ids=_moved(state, new)
        )

    def _opened(self, state: FedDriftState, ids: Tensor) -> FedDriftState:
        """The state in which each of these clients has a new model, as far as there is place."""
        kept = torch.arange(len(state))
        if len(state) + len(ids) > self.max_models:
            kept = torch.unique(state.cluster_ids[state.cluster_ids != UNKNOWN])
        opened = ids[: max(0, self.max_models - len(kept))]
        place = torch.zeros(len(state), dtype=torch.int64)
        place[kept] = torch.arange(len(kept))
        new = len(kept) + torch.arange(len(opened))
        rows = torch.cat([kept, state.cluster_ids[opened]])
        cluster_ids = _moved(state, place).index_copy(0, opened, new)
        return replace(state.at_rows(rows), cluster_ids=cluster_ids)

    def add_clients(
        self, fed: Federation, state: FedDriftState, ids: Tensor, key: int
    ) -> FedDriftState:
        state = state.with_num_clients(len(fed.sizes))
        results = fed.map(
            error_rates(self.local.objective), ids.sort().values, broadcast=state.models, key=key
        )
        if not len(results.ids):
            return state
        best, choice = results.outputs["errors"].cpu().min(1)
        return replace(
            state,
            cluster_ids=state.cluster_ids.index_copy(0, results.ids, choice),
            error=state.error.index_copy(0, results.ids, best),
        )


def _moved(state: State, row: Tensor) -> Tensor:
    """(clients,) the row of each client's model, where `row` is the new one of each old row."""
    ids = state.cluster_ids
    return torch.where(ids == UNKNOWN, UNKNOWN, row[ids.clamp_min(0)])
