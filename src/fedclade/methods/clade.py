"""Clade: groups from one look at the clients' gradients, then one model for each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedclade.clustering.clade import groups, placed, whitener
from fedclade.clustering.noisy import with_noise, worth
from fedclade.core.federation import Federation, Replies, Rows, Sum
from fedclade.core.program import losses, sgd
from fedclade.core.pytree import Tree, stack, take
from fedclade.core.rng import fold
from fedclade.errors import check
from fedclade.methods._dp_signature import Noised
from fedclade.methods.base import UNKNOWN, Features, Groups, Needs, State
from fedclade.methods.fedavg import averaged
from fedclade.programs.gradient_signature import SignatureKind, dimensions, private_signature, signature, symmetric


@dataclass(frozen=True)
class CladeState(State):
    """Beside the groups' models: what is needed to place a late client."""

    start: Tree  # (1, …) the model at which signatures are taken
    signature_key: Tensor  # () the randomness of their projection
    signature: Tensor  # (clients, e); zeros where not known
    whitener: Tensor  # (e, e)
    rounds: Tensor  # () how many there have been

    def grown_to(self, clients: int) -> Self:
        missing = max(0, clients - len(self.signature))
        return replace(super().grown_to(clients), signature=F.pad(self.signature, (0, 0, 0, missing)))

    def features(self) -> Features:
        return Features("whitened signatures", self.signature @ self.whitener, self.signature.any(1))


@dataclass(frozen=True)
class Clade(Noised):
    """Once, before training, each client sends the mean of a random projection of its samples' last-layer gradients at the shared
    initial model: e numbers, beside its size n. Of the scatter within clients only the sum is formed. The means are whitened with it,
    merged by size-weighted Ward and compared with trees of noise clients of the same sizes; the tree is cut at the widest ratio, and
    each group is asked again with its own scatter. Then FedAvg runs inside each group. Neither an encoder nor a number of groups nor
    a threshold is given. A late client joins the group with which its merge costs least.

    signature: "gradient" sees p(x), p(y) and p(y | x); "features" sees p(x) alone and needs no labels; "joint" has class counts and
    class-conditional means. size: e. factor: how many times that of noise the tree's top must be to count as structure. confirm: every
    so many rounds each client moves to the group under whose model its training loss is least, and each group is asked again with
    signatures at its own trained model (0: never). epsilon, delta, clip: (ε, δ)-private signatures; docs/privacy.md.
    """

    name: ClassVar[str] = "clade"
    title: ClassVar[str] = "Clade: groups from one look at the clients' gradients"
    paper: ClassVar[str] = "fedclade's own method, docs/methods/clade.md"
    leaves: ClassVar[str] = (
        "once, in clear, the mean sketch (128 numbers) and the number of examples; once a level of the search a scatter matrix (8,256 "
        "numbers), and once a round the trained weights, of both of which only the sum over a group is needed"
    )
    needs: ClassVar[Needs] = "signatures"
    groups: ClassVar[Groups] = "found"
    besides: ClassVar[str] = "once, before the first round, what all clients say of themselves"
    state: ClassVar[type[State]] = CladeState

    signature: SignatureKind = "gradient"
    size: int = 128
    factor: float = 2.0
    confirm: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check(isinstance(self.size, int) and self.size >= 2, "method.size", self.size, "must be a whole number of at least 2")
        check(self.factor > 0, "method.factor", self.factor, "must be above 0")
        check(self.confirm >= 0, "method.confirm", self.confirm, "must be a number of rounds, or 0 for never")
        check(not (self.confirm and self.noise), "method.confirm", self.confirm, "must be 0 with epsilon: it tells more than a signature")

    def init(self, fed: Federation, params: Tree, key: int) -> CladeState:
        start, clients = stack([params]), len(fed.sizes)
        cluster = torch.full((clients,), UNKNOWN, dtype=torch.int64)
        known, white = torch.zeros(clients, self._e, dtype=torch.float64), torch.eye(self._e, dtype=torch.float64)
        got = self._signatures(fed, Rows(start, torch.zeros(clients, dtype=torch.int64)), torch.arange(clients), key)
        if len(got.ids):
            known[got.ids] = got.out["mean"].double().cpu()
            cluster[got.ids] = self._groups(fed, Rows(start, torch.zeros(len(got.ids), dtype=torch.int64)), got, key)
            size = fed.sizes[got.ids].double().numpy()
            white = torch.from_numpy(whitener(with_noise(self._scatter(got), size, self.variance)[0], max(1.0, size.sum() - len(size))))
        models = take(start, torch.zeros(max(1, int(cluster.max()) + 1), dtype=torch.int64))
        return CladeState(models, cluster, start, torch.tensor(key), known, white, torch.tensor(0))

    def _groups(self, fed: Federation, rows: Rows, got: Replies, key: int) -> Tensor:
        """The group of each client that answered, found level by level."""

        def scatter_of(label: np.ndarray) -> np.ndarray:
            told = self._signatures(fed, rows, got.ids, key, torch.from_numpy(label)) if label.any() else got
            return with_noise(self._scatter(told), size, self.variance, label)

        size, means = fed.sizes[got.ids].double().numpy(), got.out["mean"].double().cpu().numpy()
        weight = worth(size, self._scatter(got)[0], self.variance)
        return torch.from_numpy(groups(means, weight, scatter_of, fold(key, "noise"), self.factor))

    def _signatures(self, fed: Federation, rows: Rows, ids: Tensor, key: int, group: Tensor | None = None) -> Replies:
        """Means of the sketches, client by client, and their scatter, summed over each group."""
        group = torch.zeros(len(ids), dtype=torch.int64) if group is None else group
        what = (self.local.objective, self.signature, self.size, fold(key, "projection"))
        program = private_signature(*what, self.clip, self.noise, self.secret or 0) if self.noise else signature(*what)
        add = Sum(row=group, weight=torch.ones(len(ids)), rows=1 + int(group.max()) if len(group) else 1, keys=("scatter",))
        return fed.map(program, ids, each=rows, key=key, reduce=add)

    def _scatter(self, got: Replies) -> np.ndarray:
        return symmetric(got.sums["scatter"].cpu(), self._e).numpy()

    @property
    def _e(self) -> int:
        return dimensions(self.local.objective, self.signature, self.size)

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> State:
        assert isinstance(state, CladeState)
        state = averaged(fed, sgd(self.local), replace(state, rounds=state.rounds + 1), cohort, key)
        return self._confirmed(fed, state, key) if self.confirm and int(state.rounds) % self.confirm == 0 else state

    def _confirmed(self, fed: Federation, state: CladeState, key: int) -> CladeState:
        """Let every client choose among the trained models, then split the groups whose clients disagree about theirs."""
        cluster, parent = state.cluster.clone(), torch.arange(len(state))
        told = fed.map(losses(self.local.objective), torch.nonzero(cluster != UNKNOWN).flatten(), shared=state.models, key=key)
        cluster[told.ids] = told.out["loss"].argmin(1).cpu()
        for group in torch.unique(cluster[cluster != UNKNOWN]).tolist():
            ids = torch.nonzero(cluster == group).flatten()
            got = self._signatures(fed, Rows(state.models, cluster[ids]), ids, key)
            if len(got.ids):
                inner = self._groups(fed, Rows(state.models, cluster[got.ids]), got, key)
                names = torch.cat([torch.tensor([group]), len(parent) + torch.arange(int(inner.max()))])
                cluster[got.ids], parent = names[inner], torch.cat([parent, torch.full((int(inner.max()),), group)])
        return replace(state, models=take(state.models, parent), cluster=cluster)

    def admit(self, fed: Federation, state: State, ids: Tensor, key: int) -> State:
        assert isinstance(state, CladeState)
        state = state.grown_to(len(fed.sizes))
        got = self._signatures(fed, Rows(state.start, torch.zeros_like(ids)), ids, int(state.signature_key))
        if not len(got.ids):
            return state
        signatures = state.signature.index_copy(0, got.ids, got.out["mean"].double().cpu())
        z, n = (signatures @ state.whitener).numpy(), fed.sizes.double().numpy()
        old, new = np.flatnonzero(state.cluster != UNKNOWN), got.ids.numpy()
        place = placed(z[new], n[new], z[old], n[old], state.cluster.numpy()[old], len(state))
        return replace(state, cluster=state.cluster.index_copy(0, got.ids, torch.from_numpy(place)), signature=signatures)
