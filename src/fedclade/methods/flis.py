"""FLIS: clients are related if their models make similar predictions on the probe inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.aggregation.mean import mix_models, unique_rows
from fedclade.clustering.flis import (
    cluster_centroids,
    cluster_predictions,
    nearest_cluster,
    predictions,
    similarity_graph,
)
from fedclade.core.federation import Federation, ModelAssignment
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, State
from fedclade.core.pytree import Tree, stack, tree_index
from fedclade.errors import require
from fedclade.methods._loss_selection import LossSelectionMethod
from fedclade.methods.base import Groups, Method, Needs, S, check_choices
from fedclade.methods.fedavg import fedavg_round
from fedclade.methods.required_context import NeedsProbe
from fedclade.programs.model_selection import choose_then

BLOCK = 64  # clients of FLIS-HC's one-off round whose models are held at once


@dataclass(frozen=True)
class _FLIS(NeedsProbe, Method[S]):
    """The part that both variants share: predictions of models on the probe inputs."""

    paper: ClassVar[str] = (
        "Morafah et al., FLIS: Clustered Federated Learning via Inference Similarity, IEEE OJ-CS"
        " 2023 (arXiv 2208.09754)"
    )
    server_visibility: ClassVar[Needs] = "probe"
    groups: ClassVar[Groups] = "found"

    beta: float = 0.5
    labels: Literal["onehot", "soft"] = "onehot"

    def __post_init__(self) -> None:
        check_choices(self)
        require(0 <= self.beta <= 1, "method.beta", self.beta, "must be between 0 and 1")

    def why_no_own_batch_norm(self) -> str:
        return "runs the clients' models at the server"

    def _predictions(self, models: Tree) -> Tensor:
        how = (
            "models are compared on unlabeled inputs: set some apart with partition(…, probe=n)"
            f" or clients.with_probe(0.05), or give them with {type(self).__name__}(probe=array)"
        )
        require(self.probe is not None, "method.probe", self.probe, how)
        assert self.probe is not None
        return predictions(self.local.objective.outputs, models, self.probe, self.labels)


@dataclass(frozen=True)
class FLISDC(_FLIS[State], LossSelectionMethod[State]):
    """In each round each client k of the cohort downloads all models, takes the one with the least
    loss on its own training data, trains it to θ_k and uploads it. The server runs θ_k on the probe
    inputs: B_k has a row for each of them. A_ij = ⟨B_i, B_j⟩ / (‖B_i‖ ‖B_j‖) is, for one-hot rows,
    the share of inputs on which i and j agree; Ã_ij = 1 if A_ij ≥ β. Row i of Ã is the joint
    cluster C_i of client i, and θ_g,i = Σ n_k θ_k / Σ n_k over k ∈ C_i is its model. The models of
    the next round are these, one for each distinct row, and no others.

    A client that was not in the last round chooses when it needs a model.

    Args:
        beta: β. With β = 0 it is FedAvg; with β = 1 only clients with equal predictions share.
        labels: whether the rows of B_k are "onehot" or "soft".
        probe: an array of unlabeled inputs; by default the samples that `partition` sets apart.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0, probe=40)
        >>> result = fc.run(fc.FLISDC(beta=0.4), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clusters)
        6
    """

    name: ClassVar[str] = "flis_dc"
    title: ClassVar[str] = (
        "FLIS-DC: models with similar predictions are averaged, and clients choose among the means"
    )
    client_disclosure: ClassVar[str] = (
        "once a round the trained weights in clear, and the number of the model that it chose"
    )
    no_server_optimizer: ClassVar[str] = "makes new models in every round"
    upload_cost: ClassVar[str] = "W + 8"
    download_cost: ClassVar[str] = "K*W"
    extra_traffic: ClassVar[str] = (
        "for a client that needs a model and was not in the last round: K*W down, 8 up"
    )

    def init(self, fed: Federation, params: Tree, key: int) -> State:
        models = stack([params])
        self._predictions(models)  # raises an error before training if there is no probe
        return State(models, torch.zeros(len(fed.sizes), dtype=torch.int64))

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        program = choose_then(self.local.objective, sgd(self.local))
        results = fed.map(
            program, cohort.sort().values, broadcast=state.models, key=key
        )  # sorted: the result does not depend on the order of the cohort
        if len(results.ids) == 0:
            return state
        trained = {name: results.outputs[name] for name in state.models}
        joint, own = unique_rows(similarity_graph(self._predictions(trained), self.beta).cpu())
        unknown = torch.full((len(fed.sizes),), UNKNOWN, dtype=torch.int64)
        return replace(
            state,
            models=mix_models(joint * fed.sizes[results.ids], trained, fed.aggregator),
            cluster_ids=unknown.index_copy(0, results.ids, own),
        )


@dataclass(frozen=True)
class FLISHCState(State):
    """The clusters' models, and the data that places a late client."""

    start: Tree  # (1, …) the model of the one-off round
    # (clusters, inputs × classes) the mean of B_i / ‖B_i‖ over the clients that formed the cluster
    profiles: Tensor


@dataclass(frozen=True)
class FLISHC(_FLIS[FLISHCState]):
    """Once, before training, all clients train the initial model θ_g⁰ and upload the result.
    Hierarchical clustering of 1 − A, where A are the similarities of their predictions as in
    `FLISDC`, with all merges up to height 1 − β gives the clusters. Their models start again from
    θ_g⁰, and FedAvg runs inside each cluster.

    A client that missed the one-off round trains θ_g⁰ once and joins the cluster with the highest
    mean similarity to its first members (average linkage, also with the other linkages).

    Args:
        beta: β.
        labels: whether predictions are "onehot" or "soft".
        probe: as in `FLISDC`.
        linkage: the linkage of the hierarchical clustering.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0, probe=40)
        >>> result = fc.run(fc.FLISHC(beta=0.4), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clusters)
        6
    """

    name: ClassVar[str] = "flis_hc"
    title: ClassVar[str] = (
        "FLIS-HC: clients whose models make similar predictions after one round share a model"
    )
    client_disclosure: ClassVar[str] = (
        "the trained weights: once before the first round in clear; then once a round, of which the"
        " server needs only sums"
    )
    extra_traffic: ClassVar[str] = "once, before a client's first round: W down, W up"
    state: ClassVar[type[State]] = FLISHCState

    # Models agree less after one round than later. Both defaults are measured, see
    # docs/methods/flis.md.
    beta: float = 0.3
    linkage: Literal["average", "single", "complete"] = "average"

    def init(self, fed: Federation, params: Tree, key: int) -> FLISHCState:
        models, everyone = stack([params]), torch.arange(len(fed.sizes))
        untrained = self._predictions(models)  # raises an error if there is no probe
        state = FLISHCState(
            models, torch.full_like(everyone, UNKNOWN), stack([params]), torch.zeros_like(untrained)
        )
        return self.add_clients(fed, state, everyone, key)

    def round(self, fed: Federation, state: FLISHCState, cohort: Tensor, key: int) -> FLISHCState:
        return fedavg_round(fed, sgd(self.local), state, cohort, key)

    def add_clients(
        self, fed: Federation, state: FLISHCState, ids: Tensor, key: int
    ) -> FLISHCState:
        state = state.with_num_clients(len(fed.sizes))
        answered, predicted = self._one_off(fed, state.start, ids.sort().values, key)
        if len(answered) == 0:
            return state
        if bool((state.cluster_ids != UNKNOWN).any()):
            cluster = nearest_cluster(predicted, state.profiles).cpu()
        else:
            cluster = cluster_predictions(predicted, self.beta, self.linkage)
            again = torch.zeros(int(cluster.max()) + 1, dtype=torch.int64)
            state = replace(
                state,
                models=tree_index(state.start, again),
                profiles=cluster_centroids(predicted, cluster).cpu(),
            )
        return replace(state, cluster_ids=state.cluster_ids.index_copy(0, answered, cluster))

    def _one_off(
        self, fed: Federation, start: Tree, ids: Tensor, key: int
    ) -> tuple[Tensor, Tensor]:
        """The clients that replied, and the predictions of their trained models. Only one block of
        models is held at a time.
        """
        answered, predicted = [ids[:0]], [torch.zeros(0)]
        # All blocks have one key, so that no client's randomness depends on its block.
        for block in torch.split(ids, BLOCK):
            results = fed.map(
                sgd(self.local),
                block,
                per_client=ModelAssignment.all_same(start, len(block)),
                key=key,
            )
            if len(results.ids):
                answered.append(results.ids)
                predicted.append(self._predictions(results.outputs))
        return torch.cat(answered), torch.cat(predicted[1:] or predicted)
