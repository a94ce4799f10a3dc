"""Clade: groups from one look at the clients' gradients, then one model for each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.client.keys import fold
from fedclade.client.programs import sgd
from fedclade.client.sketch import SignatureKind, dimensions, signature, symmetric
from fedclade.client.tree import Tree, stack
from fedclade.errors import check
from fedclade.federation import Federation, Replies, Rows, Sum
from fedclade.methods.base import UNKNOWN, Method, Needs, State
from fedclade.relatedness.clades import cost, groups, whitener
from fedclade.relatedness.mixing import mean


@dataclass(frozen=True)
class CladeState(State):
    """Beside the groups' models: what is needed to place a late client."""

    start: Tree  # (1, …) the model at which signatures are taken
    signature_key: Tensor  # () the randomness of their projection
    signature: Tensor  # (clients, e); zeros where not known
    whitener: Tensor  # (e, e)

    def grown_to(self, clients: int) -> Self:
        grown = super().grown_to(clients)
        missing = clients - len(self.signature)
        return replace(grown, signature=F.pad(self.signature, (0, 0, 0, missing))) if missing > 0 else grown


@dataclass(frozen=True)
class Clade(Method):
    """Once, before training, each client sends the mean of a random projection of its samples' last-layer gradients at the shared
    initial model: e numbers, beside its size n. Of the scatter within clients only the sum is formed. The means are whitened with it,
    merged by size-weighted Ward and compared with trees of noise clients of the same sizes; the tree is cut at the widest ratio, and
    each group is asked again with its own scatter. Then FedAvg runs inside each group. Neither an encoder nor a number of groups nor
    a threshold is given. A late client joins the group with which its merge costs least.

    signature: "gradient" sees p(x), p(y) and p(y | x); "features" sees p(x) alone and needs no labels; "joint" has class counts and
    class-conditional means. size: e. factor: how many times that of noise the tree's top must be to count as structure.
    """

    name: ClassVar[str] = "clade"
    title: ClassVar[str] = "Clade: groups from one look at the clients' gradients"
    paper: ClassVar[str] = "fedclade's own method, docs/methods/clade.md"
    leaves: ClassVar[str] = (
        "once, in clear, the mean sketch (64 numbers) and the number of examples, and a scatter matrix (2,080 numbers) of which only the "
        "sum over a group is needed; then once a round the trained weights, of which only the weighted sum over a group is needed"
    )
    needs: ClassVar[Needs] = "signatures"
    state: ClassVar[type[State]] = CladeState

    signature: SignatureKind = "gradient"
    size: int = 64
    factor: float = 2.0

    def __post_init__(self) -> None:
        kinds = ("gradient", "features", "joint")
        check(self.signature in kinds, "method.signature", self.signature, f"must be one of {', '.join(kinds)}")
        check(isinstance(self.size, int) and self.size >= 2, "method.size", self.size, "must be a whole number of at least 2")
        check(self.factor > 0, "method.factor", self.factor, "must be above 0")

    def init(self, fed: Federation, params: Tree, key: int) -> CladeState:
        start, clients = stack([params]), len(fed.sizes)
        cluster = torch.full((clients,), UNKNOWN, dtype=torch.int64)
        known = torch.zeros(clients, self._e, dtype=torch.float64)
        white = torch.eye(self._e, dtype=torch.float64)
        got = self._signatures(fed, start, torch.arange(clients), torch.zeros(clients, dtype=torch.int64), key)
        if len(got.ids):
            known[got.ids] = got.out["mean"].double().cpu()
            cluster[got.ids], white = self._groups(fed, start, got, key)
        count = max(1, int(cluster.max()) + 1)
        models = {name: value.expand(count, *value.shape[1:]).clone() for name, value in start.items()}
        return CladeState(models, cluster, start, torch.tensor(key), known, white)

    def _groups(self, fed: Federation, start: Tree, got: Replies, key: int) -> tuple[Tensor, Tensor]:
        """The group of each client that answered, and the matrix that whitens signatures."""
        size = fed.sizes[got.ids].double().numpy()
        whole = self._scatter(got)

        def scatter_of(label: np.ndarray) -> np.ndarray:
            if not label.any():
                return whole
            return self._scatter(self._signatures(fed, start, got.ids, torch.from_numpy(label), key))

        label = groups(got.out["mean"].double().cpu().numpy(), size, scatter_of, fold(key, "noise"), self.factor)
        return torch.from_numpy(label), torch.from_numpy(whitener(whole[0], max(1.0, size.sum() - len(size))))

    def _signatures(self, fed: Federation, start: Tree, ids: Tensor, group: Tensor, key: int) -> Replies:
        """Means of the sketches, client by client, and their scatter, summed over each group."""
        program = signature(self.local.objective, self.signature, self.size, fold(key, "projection"))
        everyone_gets = Rows(start, torch.zeros(len(ids), dtype=torch.int64))
        add = Sum(row=group, weight=torch.ones(len(ids)), rows=int(group.max()) + 1, keys=("scatter",))
        return fed.map(program, ids, each=everyone_gets, key=key, reduce=add)

    def _scatter(self, got: Replies) -> np.ndarray:
        return symmetric(got.sums["scatter"].cpu(), self._e).numpy()

    @property
    def _e(self) -> int:
        return dimensions(self.local.objective, self.signature, self.size)

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        cluster = state.cluster[cohort]
        add = Sum(row=cluster, weight=fed.sizes[cohort], rows=len(state))
        got = fed.map(sgd(self.local), cohort, each=Rows(state.models, cluster), key=key, reduce=add)
        return replace(state, models=mean(got.sums, got.weight, keep=state.models))

    def admit(self, fed: Federation, state: State, ids: Tensor, key: int) -> State:
        assert isinstance(state, CladeState)
        state = state.grown_to(len(fed.sizes))
        got = self._signatures(fed, state.start, ids, torch.zeros(len(ids), dtype=torch.int64), int(state.signature_key))
        if not len(got.ids):
            return state
        signatures, cluster = state.signature.clone(), state.cluster.clone()
        signatures[got.ids] = got.out["mean"].double().cpu()
        known = torch.nonzero(state.cluster != UNKNOWN).flatten()
        z, n = signatures @ state.whitener, fed.sizes.double()
        share = F.one_hot(state.cluster[known], len(state)).double() * n[known, None]
        centre = share.T @ z[known] / share.sum(0).clamp_min(1)[:, None]
        costs = cost(z[got.ids].numpy(), n[got.ids].numpy(), centre.numpy(), share.sum(0).numpy())
        cluster[got.ids] = torch.from_numpy(costs.argmin(1))
        return replace(state, cluster=cluster, signature=signatures)
