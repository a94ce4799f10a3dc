"""FedALA: each client learns, weight by weight, how much of the shared head it takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedclade.core.federation import Federation
from fedclade.core.functional_model import Batch, ClientStackedBatch
from fedclade.core.local_sgd import chain_training, loss_gradient, per_client, sgd
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.method_state import State
from fedclade.core.program import Program, natively_batched
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, strip_prefix, tree_map
from fedclade.errors import InvalidInputError, require, require_int
from fedclade.methods.fedavg import FedAvg, fedavg_step
from fedclade.programs.own_model import OWN, TRAINED, untrained_client_state

SHARES = "shares"
"""The prefix of W_i in a client's state."""

LEARNED = "learned"
"""The name of the number in a client's state that is 1 once it has learned W_i, else 0."""

SAMPLES = "samples"
"""The name of the number of samples in one pass, in a client's state; 0 before the first."""


@serializable_program
def local_aggregation(
    local: LocalTraining, top: tuple[str, ...], rate: float, sample_share: float, passes: int
) -> Program:
    """Learns W_i, which stays in the client's state. The reply is θ̂, the model from which the
    client trains.

    Args:
        local: the objective and the batch size.
        top: the names of the parameters that are mixed.
        rate: the learning rate of W_i.
        sample_share: the share of the client's samples that a pass reads, drawn in each pass.
        passes: the passes of a client that learns W_i for the first time. Other clients learn in
            the first pass only.
    """
    train = sgd(replace(local, epochs=passes, steps=0), stream="local_aggregation")

    def start_model(const: Tree, shares: Tree) -> Tree:
        """θ̂: θ, and in the top layers θ_i + (θ - θ_i) ⊙ W_i if the client has trained."""
        shared, own = strip_prefix("shared", const), strip_prefix(OWN, const)
        return shared | {
            name: torch.where(
                per_client(const[TRAINED], share) > 0,
                own[name] + (shared[name] - own[name]) * share,
                shared[name],
            )
            for name, share in shares.items()
        }

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        shares = tree_map(torch.clone, strip_prefix(SHARES, memory))
        examples = torch.zeros_like(memory[SAMPLES])
        return add_prefix("shared", params) | memory, {
            **add_prefix(SHARES, shares),
            "examples": examples,
        }

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        assert isinstance(batch, ClientStackedBatch)
        shares, samples = strip_prefix(SHARES, carry), const[SAMPLES]
        # A pass is in random order, so its first samples are a random part of all samples.
        place = carry["examples"].remainder(samples.clamp_min(1))[:, None] + torch.arange(
            batch.weight.shape[-1], device=batch.weight.device
        )
        is_read = place < (sample_share * samples).ceil()[:, None]
        part = ClientStackedBatch(batch.x, batch.y, batch.weight * is_read, batch.key)
        gradient, _ = loss_gradient(local.objective, start_model(const, shares), part, only=top)
        learns = (const[LEARNED] == 0) | (carry["examples"] < samples)
        step_size = broadcast["rate"] * const[TRAINED] * learns
        moved = {
            name: (
                share
                - per_client(step_size, share)
                * gradient[name]
                * (const[f"shared/{name}"] - const[f"{OWN}/{name}"])
            ).clamp(0, 1)
            for name, share in shares.items()
        }
        return add_prefix(SHARES, moved) | {"examples": carry["examples"] + batch.examples}

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        shares = strip_prefix(SHARES, carry)
        memory = {
            **add_prefix(OWN, strip_prefix(OWN, const)),
            **add_prefix(SHARES, shares),
            TRAINED: const[TRAINED],
            LEARNED: const[TRAINED],
            SAMPLES: carry["examples"] / passes,
        }
        return start_model(const, shares), memory

    return replace(
        train,
        start=start,
        step=step,
        finish=finish,
        name="local_aggregation",
        hyperparams={"rate": rate},
    )


@serializable_program
def train_own(local: LocalTraining) -> Program:
    """`sgd`. The result is the reply, and it stays in the client's state as its own model.

    Args:
        local: the objective and the settings of SGD.
    """
    train = sgd(local)

    @natively_batched
    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        kept = {name: value for name, value in memory.items() if not name.startswith(f"{OWN}/")}
        return kept, train.start(broadcast, params, {})[1]

    @natively_batched
    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        w = strip_prefix("w", carry)
        return w, add_prefix(OWN, w) | const | {TRAINED: torch.ones_like(const[TRAINED])}

    return replace(train, start=start, finish=finish, name="train_own", rng_stream="sgd")


@dataclass(frozen=True)
class FedALAState(State):
    """The model, and how often each client has trained."""

    trainings: Tensor

    def with_num_clients(self, clients: int) -> Self:
        """The same state with entries for clients that joined since; they have never trained."""
        state = super().with_num_clients(clients)
        missing = len(state.cluster_ids) - len(self.trainings)
        return replace(
            state, trainings=torch.cat([self.trainings, self.trainings.new_zeros(missing)])
        )


@dataclass(frozen=True)
class FedALA(FedAvg):
    """FedAvg in which client i starts its local training from θ̂ instead of the shared model θ: the
    lower layers are those of θ, and the top layers are θ_i + (θ - θ_i) ⊙ W_i, where θ_i is its own
    model after its last training. W_i has a number from 0 to 1 for each weight, 1 at first, and
    learns from a random s of the client's samples:

        W_i <- W_i - η ∂L/∂θ̂ ⊙ (θ - θ_i), cut to [0, 1].

    The first time, in the client's second training, it makes several passes, later one. (The
    paper's first time lasts until the loss is constant, which may never be; here it is bounded.) A
    client uses θ̂ after one more pass, as in the authors' evaluation; one that never trained uses θ.

    Args:
        top_layers: names of the layers (or parameters) that are mixed. The default is the last
            linear layer: the paper's p = 1. (The authors' code counts tensors, so 1 is a bias.)
        rate: η.
        sample_share: s, the share of the samples; drawn in each pass.
        first_passes: the passes of the first time.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> method = fc.FedALA(sample_share=0.5)
        >>> result = fc.run(method, clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> len(result.clients["accuracy"])
        6
    """

    name: ClassVar[str] = "fedala"
    title: ClassVar[str] = "FedALA: each client learns how much of the shared head it takes"
    paper: ClassVar[str] = (
        "Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI"
        " 2023"
    )
    state: ClassVar[type[State]] = FedALAState

    top_layers: tuple[str, ...] | None = None
    rate: float = 1.0
    sample_share: float = 0.8
    first_passes: int = 10

    def __post_init__(self) -> None:
        require(self.rate > 0, "method.rate", self.rate, "must be above 0")
        require(
            0 < self.sample_share <= 1,
            "method.sample_share",
            self.sample_share,
            "must be above 0 and at most 1",
        )
        require_int("method.first_passes", self.first_passes, 1)

    def top_params(self) -> tuple[str, ...]:
        """The names of the parameters that are mixed."""
        objective = self.local.objective
        if self.top_layers is None:
            return tuple(n for n in objective.head_param_names() if n in objective.trained)
        try:
            names = objective.param_names_under(self.top_layers)
        except InvalidInputError as error:
            raise InvalidInputError(f"method.top_layers: {error}", "method.top_layers") from error
        return tuple(name for name in names if name in objective.trained)

    def why_no_own_batch_norm(self) -> str:
        return "has a whole model of its own for each client"

    def initial_client_state(self, params: Tree) -> Tree:
        shares = {name: torch.ones_like(params[name]) for name in self.top_params()}
        return {
            **untrained_client_state(params),
            **add_prefix(SHARES, shares),
            LEARNED: torch.zeros(()),
            SAMPLES: torch.zeros(()),
        }

    def init(self, fed: Federation, params: Tree, key: int) -> FedALAState:
        base = super().init(fed, params, key)
        return FedALAState(base.models, base.cluster_ids, torch.zeros_like(base.cluster_ids))

    def round(self, fed: Federation, state: State, cohort: Tensor, key: int) -> FedALAState:
        assert isinstance(state, FedALAState)
        # A client that trains for the second time learns W_i for the first time.
        is_first = bool((state.trainings[cohort] == 1).any())
        aggregation = self._aggregation(self.first_passes if is_first else 1)
        train = chain_training(aggregation, train_own(self.local))
        after, ids = fedavg_step(fed, train, state, cohort, key)
        return replace(after, trainings=after.trainings.index_add(0, ids, torch.ones_like(ids)))

    def personalization_program(self) -> Program:
        return self._aggregation(1)

    def _aggregation(self, passes: int) -> Program:
        return local_aggregation(
            self.local, self.top_params(), self.rate, self.sample_share, passes
        )
