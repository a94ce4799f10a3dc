"""CFL: one model for all at first; where the clients of a cluster pull it in different directions,
the cluster splits in two.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.aggregation.mean import segment_mean
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
class CFLState(ParameterTree, State):
    """The parameter tree: `models` has a row for every node, `cluster` is the leaf of each client;
    read `parent`, `children`, `members`.
    """

    def features(self) -> Features:
        return Features("latest updates, projected", *self.latest_updates(), "cosine")


@dataclass(frozen=True)
class CFL(NeedsSecret, Method[CFLState]):
    """Every round each cluster c trains as in FedAvg. Where it has come to rest while its clients
    have not, it is split in two.

    Δθ_i is what client i's local training changed, Δθ_c their mean weighted by examples. If ‖Δθ_c‖
    < eps1 and max_i ‖Δθ_i‖ > eps2, the clients that answered are parted so that the largest
    similarity across, α_cross^max of α_ij = cos(Δθ_i, Δθ_j), is least (`linkage="single"`,
    Algorithm 1; "complete" is the authors' code). The split is accepted iff gamma_max < sqrt((1 -
    α_cross^max) / 2).

    eps1, eps2: lengths, or "auto": 0.2 and 0.5 of the longest update of the cluster so far (no
    split in its first three rounds). gamma_max: γ_max, the largest noise in an update relative to
    its length, which the paper takes as known; or "auto": estimated from the
        similarity of each client to the most similar one on its side
        (`clustering.cfl.noise_level`). 0.5: α_cross^max < 0.5.
    check_after: rounds after which a split is looked at again. It is undone, for good, if the
    children's models have a higher loss on
        their clients' training data than the model at the split. 0: never.
    min_size: clients that must answer for a split. sketch: numbers kept of an update, a random
    projection, for late ones (Algorithm 4). permute: clients get and send models in a secret order
    of coordinates (Algorithm 5). The secret is the clients'. Where they are
        simulated it is the field `secret` here, used in the clients' programs, in `init` (in
        earnest a client draws the first model: a server that knows it can read the order off) and
        where a client looks at its model: `serve` and `model_at`.
    """

    name: ClassVar[str] = "cfl"
    title: ClassVar[str] = (
        "Clustered federated learning: split a cluster where its clients' updates contradict each"
        " other"
    )
    paper: ClassVar[str] = (
        "Sattler, Müller and Samek, Clustered Federated Learning, IEEE TNNLS 2021"
        " (arXiv:1910.01991)"
    )
    client_disclosure: ClassVar[str] = (
        "the trained weights, once a round, and so its own update; once after a split two training"
        " losses, to be summed"
    )
    server_visibility: ClassVar[Needs] = "updates"
    groups: ClassVar[Groups] = "found"
    extra_traffic: ClassVar[str] = "once after a split two models more down, and two losses up"
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

    def init(self, fed: Federation, params: Tree, key: int) -> CFLState:
        models = stack([params])
        if self.permute:
            models = concealed(models, self.secret, self.local.objective.statistics)
        size = self._weights(models).shape[1]
        return CFLState.initial(models, len(fed.sizes), min(self.sketch, size))

    def round(self, fed: Federation, state: CFLState, cohort: Tensor, key: int) -> CFLState:
        cohort = (
            cohort.sort().values
        )  # from here on ids are in rising order, so that the order of the cohort decides nothing
        state = self._second_look(fed, state, cohort, key)
        results, updates = self._train(fed, state, cohort, state.cluster_ids, key)
        if not len(results.ids):
            return state
        node, size, projected = (
            state.cluster_ids[results.ids],
            fed.sizes[results.ids],
            self._projected(updates),
        )
        for leaf in sorted(set(node.tolist())):
            here = torch.nonzero(
                node == leaf
            ).flatten()  # places among the replies: the clients are results.ids[here]
            if len(here) >= self.min_size and not state.frozen[leaf]:
                side = bisect(
                    updates[here], size[here], *self._eps(state, leaf), self.gamma_max, self.linkage
                )
                state = (
                    state
                    if side is None
                    else state.split(leaf, results.ids[here], side, projected[here])
                )
        state = state.trained(results.ids, update_norms(updates), projected)
        return replace(
            state,
            models=segment_mean(
                results.outputs, state.cluster_ids[results.ids], size, state.models, fed.aggregator
            ),
        )

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
        models = state.models
        if self.permute:
            models = revealed(models, self.secret, self.local.objective.statistics)
        return ModelAssignment(models, state.cluster_ids[ids])

    def model_at(self, state: CFLState, node: int) -> Tree:
        """The model of any node of the tree: a leaf's as it is now, an inner node's as it was at
        its split.
        """
        return tree_index(
            self.assign_models(state, state.cluster_ids[:0]).models, torch.tensor(node)
        )

    def _train(
        self, fed: Federation, state: CFLState, ids: Tensor, at: Tensor, key: int
    ) -> tuple[ClientResults, Tensor]:
        """Local training of each client i from the model of node at[i]: the trained weights, and
        the updates as vectors.
        """
        program = sgd(self.local)
        if self.permute:
            program = in_secret_order(program, self.secret, self.local.objective.statistics)
        results = fed.map(program, ids, per_client=ModelAssignment(state.models, at[ids]), key=key)
        before = self._weights(tree_index(state.models, at[results.ids]))
        return results, self._weights(results.outputs) - before if len(results.ids) else before

    def _weights(self, models: Tree) -> Tensor:
        """The trained weights of models as vectors."""
        return flatten({name: models[name] for name in self.local.objective.trained})

    def _projected(self, updates: Tensor) -> Tensor:
        bits = client_keys(fold_in(0, "cfl", "projection"), torch.arange(updates.shape[1]))
        return project(updates, bits, self.sketch).cpu()

    def _eps(self, state: CFLState, leaf: int) -> tuple[float, float]:
        scale = float(state.scale[leaf])
        if "auto" in (self.eps1, self.eps2) and state.age[leaf] < WARM_UP:
            return 0.0, 0.0  # nothing is shorter than 0: no split yet
        return (
            AUTO_EPS1 * scale if self.eps1 == "auto" else self.eps1,
            AUTO_EPS2 * scale if self.eps2 == "auto" else self.eps2,
        )

    def _second_look(self, fed: Federation, state: CFLState, cohort: Tensor, key: int) -> CFLState:
        """The fall-back: undo the splits whose children have a higher loss on their clients'
        training data than the model at the split.
        """
        up = state.parent[state.cluster_ids[cohort]]
        due = (up >= 0) & state.unfrozen(self.check_after)[up] & (self.check_after > 0)
        if not due.any():
            return state
        ask = evaluate_losses(self.local.objective)
        if self.permute:
            ask = from_secret_order(ask, self.secret, self.local.objective.statistics)
        pairs = {
            name: torch.stack([value[state.parent], value], 1)
            for name, value in state.models.items()
        }
        results = fed.map(
            ask,
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
