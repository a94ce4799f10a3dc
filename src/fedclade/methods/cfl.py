"""CFL: it starts with one model for all clients; a cluster splits in two when its clients' updates
contradict each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.aggregation.mean import segment_mean
from fedclade.aggregation.server_optimizer import update_models
from fedclade.clustering.cfl import WARM_UP, ParameterTree, bisect, project, update_norms
from fedclade.core.federation import ClientResults, Federation, ModelAssignment, SegmentSum
from fedclade.core.local_sgd import sgd
from fedclade.core.method_state import UNKNOWN, Features, State
from fedclade.core.pytree import Tree, flatten, stack, tree_index
from fedclade.core.rng import client_keys, fold_in
from fedclade.errors import require, require_int
from fedclade.methods.base import Groups, Method, Needs
from fedclade.methods.required_context import INJECTED, NeedsSecret
from fedclade.programs.evaluation import evaluate_losses
from fedclade.programs.secret_parameter_order import (
    concealed,
    from_secret_order,
    in_secret_order,
    revealed,
)

AUTO_EPS1, AUTO_EPS2 = 0.2, 0.5  # of a cluster's scale; measured, see docs/methods/cfl.md


@dataclass(frozen=True)
class CFLState(ParameterTree):
    """The parameter tree: `models` has a row for each node, and `cluster_ids` is the leaf of each
    client. `parent`, `children` and `members` describe the tree.
    """

    def features(self) -> Features:
        return Features("latest updates, projected", *self.latest_updates(), "cosine")


@dataclass(frozen=True)
class CFL(NeedsSecret, Method[CFLState]):
    """In each round each cluster c trains as in FedAvg. A cluster is split in two when its model
    has converged and its clients' updates are still large.

    Δθ_i is the update of client i, and Δθ_c the mean of a cluster's updates, weighted by examples.
    If ‖Δθ_c‖ < eps1 and max_i ‖Δθ_i‖ > eps2, the clients that replied are divided so that the
    largest similarity between the two sides, α_cross^max of α_ij = cos(Δθ_i, Δθ_j), is least. The
    split is accepted if gamma_max < sqrt((1 - α_cross^max) / 2).

    Args:
        eps1: a length, or "auto": 0.2 of the longest update of the cluster so far. With "auto" a
            cluster is not split in its first three rounds.
        eps2: a length, or "auto": 0.5 of the longest update of the cluster so far.
        gamma_max: γ_max, the largest noise in an update relative to its length, which the paper
            assumes to be known; or "auto": estimated from the similarity of each client to the most
            similar client on its side (`clustering.cfl.noise_level`). 0.5 means α_cross^max < 0.5.
        linkage: "single" is the paper's Algorithm 1; "complete" is the authors' code.
        min_size: the number of clients that must reply for a split.
        check_after: rounds after which a split is checked. If the children's models have a higher
            loss on their clients' training data than the model at the split, the split is reverted
            and never tried again. 0 for never.
        sketch: the number of values kept of an update, a random projection, to assign late clients
            (Algorithm 4).
        permute: clients receive and send models whose coordinates are in a secret order (Algorithm
            5). On Flower the secret is on the nodes, and a client must make the initial model: a
            server that has it can infer the order. In a simulation the secret is the field
            `secret`; the clients' programs, `init`, `assign_models` and `model_at` use it.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.CFL(check_after=0), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clusters)
        6
    """

    name: ClassVar[str] = "cfl"
    title: ClassVar[str] = (
        "CFL: clustered federated learning, a group splits when its clients' updates contradict"
        " each other"
    )
    paper: ClassVar[str] = (
        "Sattler, Müller and Samek, Clustered Federated Learning, IEEE TNNLS 2021"
        " (arXiv:1910.01991)"
    )
    client_disclosure: ClassVar[str] = (
        "the trained weights in clear, once a round; once after a split two training losses, which"
        " the server sums"
    )
    server_visibility: ClassVar[Needs] = "updates"
    groups: ClassVar[Groups] = "found"
    extra_traffic: ClassVar[str] = "once after a split: two more models down, and two losses up"
    state: ClassVar[type[State]] = CFLState

    eps1: float | Literal["auto"] = "auto"
    eps2: float | Literal["auto"] = "auto"
    gamma_max: float | Literal["auto"] = "auto"
    linkage: Literal["single", "complete"] = "single"
    min_size: int = 2
    check_after: int = 5
    sketch: int = 256
    permute: bool = False
    secret: int = field(default=0, kw_only=True, repr=False, metadata=INJECTED)

    def __post_init__(self) -> None:
        for name, value in (
            ("eps1", self.eps1),
            ("eps2", self.eps2),
            ("gamma_max", self.gamma_max),
        ):
            require(
                value == "auto" or (not isinstance(value, str) and value >= 0),
                f"method.{name}",
                value,
                "must be 'auto' or at least 0",
            )
        for name, least in (("min_size", 2), ("check_after", 0), ("sketch", 1)):
            require_int(f"method.{name}", getattr(self, name), least)
        require(
            self.linkage in ("single", "complete"),
            "method.linkage",
            self.linkage,
            "must be 'single' or 'complete'",
        )

    @property
    def one_secret_for_all(self) -> bool:
        return self.permute

    def why_no_own_batch_norm(self) -> str:
        return "permutes all layers together with permute = true" if self.permute else ""

    def init(self, fed: Federation, params: Tree, key: int) -> CFLState:
        models = concealed(stack([params]), *self._order) if self.permute else stack([params])
        sketch = min(self.sketch, self._weights(models).shape[1])
        return CFLState.initial(models, len(fed.sizes), sketch)

    def round(self, fed: Federation, state: CFLState, cohort: Tensor, key: int) -> CFLState:
        cohort = cohort.sort().values  # the result does not depend on the order of the cohort
        state = self._revert_bad_splits(fed, state, cohort, key)
        results, updates = self._train(fed, state, cohort, state.cluster_ids, key)
        if not len(results.ids):
            return state
        node, size, projected = (
            state.cluster_ids[results.ids],
            fed.sizes[results.ids],
            self._projected(updates),
        )
        for leaf in sorted(set(node.tolist())):
            members = torch.nonzero(node == leaf).flatten()  # positions among the replies
            if len(members) >= self.min_size and not state.frozen[leaf]:
                side = bisect(
                    updates[members],
                    size[members],
                    *self._eps(state, leaf),
                    self.gamma_max,
                    self.linkage,
                )
                if side is not None:
                    state = state.split(leaf, results.ids[members], side, projected[members])
        state = state.trained(results.ids, update_norms(updates), projected)
        means = segment_mean(
            results.outputs, state.cluster_ids[results.ids], size, state.models, fed.aggregator
        )
        return update_models(fed, state, means)

    def add_clients(self, fed: Federation, state: CFLState, ids: Tensor, key: int) -> CFLState:
        state, ids, depth = state.with_num_clients(len(fed.sizes)), ids.sort().values, 0
        cluster, leaf = state.cluster_ids.index_fill(0, ids, 0), state.is_leaf()
        while len(ids := ids[~leaf[cluster[ids]]]):
            results, updates = self._train(fed, state, ids, cluster, fold_in(key, "walk", depth))
            child = state.next_node(cluster[results.ids], self._projected(updates))
            cluster = cluster.index_fill(0, ids, UNKNOWN).index_copy(0, results.ids, child)
            ids, depth = results.ids, depth + 1
        return replace(state, cluster_ids=cluster)

    def assign_models(self, state: CFLState, ids: Tensor) -> ModelAssignment:
        return ModelAssignment(
            revealed(state.models, *self._order) if self.permute else state.models,
            state.cluster_ids[ids],
        )

    def model_at(self, state: CFLState, node: int) -> Tree:
        """The model of a node of the tree: the current model of a leaf, or the model of an inner
        node at its split.

        Args:
            state: the state.
            node: the number of the node.
        """
        return tree_index(
            self.assign_models(state, state.cluster_ids[:0]).models, torch.tensor(node)
        )

    def _train(
        self, fed: Federation, state: CFLState, ids: Tensor, at: Tensor, key: int
    ) -> tuple[ClientResults, Tensor]:
        """Train each client i from the model of node at[i]. Returns the trained weights, and the
        updates as vectors.
        """
        program = (
            in_secret_order(sgd(self.local), *self._order) if self.permute else sgd(self.local)
        )
        results = fed.map(program, ids, per_client=ModelAssignment(state.models, at[ids]), key=key)
        before = self._weights(tree_index(state.models, at[results.ids]))
        return results, self._weights(results.outputs) - before if len(results.ids) else before

    @property
    def _order(self) -> tuple[int, tuple[str, ...]]:
        return self.secret, self.local.objective.statistics

    def _weights(self, models: Tree) -> Tensor:
        """The trained weights of models as vectors."""
        return flatten({n: models[n] for n in self.local.objective.trained if n in models})

    def _projected(self, updates: Tensor) -> Tensor:
        bits = client_keys(fold_in(0, "cfl", "projection"), torch.arange(updates.shape[1]))
        return project(updates, bits, self.sketch).cpu()

    def _eps(self, state: CFLState, leaf: int) -> tuple[float, float]:
        scale = float(state.scale[leaf])
        if "auto" in (self.eps1, self.eps2) and state.age[leaf] < WARM_UP:
            return 0.0, 0.0  # no update is shorter than 0: no split yet
        return (
            AUTO_EPS1 * scale if self.eps1 == "auto" else self.eps1,
            AUTO_EPS2 * scale if self.eps2 == "auto" else self.eps2,
        )

    def _revert_bad_splits(
        self, fed: Federation, state: CFLState, cohort: Tensor, key: int
    ) -> CFLState:
        """Revert the splits whose children have a higher loss on their clients' training data than
        the model at the split.
        """
        up = state.parent[state.cluster_ids[cohort]]
        due = (up >= 0) & state.unfrozen(self.check_after)[up] & (self.check_after > 0)
        if not due.any():
            return state
        losses = evaluate_losses(self.local.objective)
        pairs = {
            name: torch.stack([value[state.parent], value], 1)
            for name, value in state.models.items()
        }
        results = fed.map(
            from_secret_order(losses, *self._order) if self.permute else losses,
            cohort[due],
            per_client=ModelAssignment(pairs, state.cluster_ids[cohort[due]]),
            key=fold_in(key, "second look"),
            reduce=SegmentSum(
                segment_ids=up[due], weights=torch.ones(int(due.sum())), num_segments=len(state)
            ),
        )
        if not results.sums:
            return state
        before, now = results.sums["loss"].cpu().unbind(1)
        return replace(state, frozen=state.frozen | (results.total_weight > 0)).revert(
            torch.nonzero(now > before).flatten()
        )
