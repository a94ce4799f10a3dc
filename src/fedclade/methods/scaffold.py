"""SCAFFOLD: control variates correct the drift of the clients' steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedclade.aggregation.mean import weighted_mean
from fedclade.aggregation.server_optimizer import update_models
from fedclade.core.federation import Federation, ModelAssignment, SegmentSum
from fedclade.core.functional_model import Batch
from fedclade.core.local_sgd import effective_steps, sgd, sgd_step
from fedclade.core.local_training_config import LocalTraining
from fedclade.core.method_state import State
from fedclade.core.program import Program, natively_batched
from fedclade.core.program_serialization import serializable_program
from fedclade.core.pytree import Tree, add_prefix, nbytes, stack, strip_prefix, tree_map
from fedclade.errors import require
from fedclade.methods.base import Method, Needs, check_choices


@serializable_program
def controlled(local: LocalTraining, option: int) -> Program:
    """`sgd` along g - c_i + c. The reply is the weights y and the change of c_i; the new c_i is
    stored in the client's state.

    Args:
        local: the objective and the settings of SGD.
        option: the paper's option for c_i, 1 or 2.
    """
    train = sgd(local)

    def start(broadcast: Tree, params: Tree, memory: Tree) -> tuple[Tree, Tree]:
        zero = torch.zeros((), device=next(iter(params.values())).device)
        carry = train.start(broadcast, params, memory)[1] | {"steps": zero}
        if option == 1:
            carry |= add_prefix("sum", tree_map(torch.zeros_like, memory)) | {"examples": zero}
        return add_prefix("x", params) | add_prefix("c_i", memory), carry

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: Batch) -> Tree:
        control = tree_map(
            lambda c_i, c: c - c_i, strip_prefix("c_i", const), strip_prefix("c", broadcast)
        )
        params, velocity = sgd_step(
            local.objective,
            strip_prefix("w", carry),
            strip_prefix("optimizer", carry),
            batch,
            broadcast["lr"],
            momentum=local.momentum,
            weight_decay=local.weight_decay,
            clip_norm=local.clip_norm,
            plus=control,
        )
        after = add_prefix("w", params) | add_prefix("optimizer", velocity)
        after["steps"] = carry["steps"] + 1
        if option == 1:
            count = batch.examples
            at_x = local.objective.add_scaled_gradient(
                strip_prefix("sum", carry), count, strip_prefix("x", const), batch, overwrite=True
            )
            after |= add_prefix("sum", at_x) | {"examples": carry["examples"] + count}
        return after

    def finish(broadcast: Tree, const: Tree, carry: Tree) -> tuple[Tree, Tree]:
        y, c_i = strip_prefix("w", carry), strip_prefix("c_i", const)
        if option == 1:
            new = tree_map(lambda total: total / carry["examples"], strip_prefix("sum", carry))
        else:
            length = broadcast["lr"] * effective_steps(carry["steps"], local.momentum)  # K η_l
            new = tree_map(
                lambda c_i, c, x, y: c_i - c + (x - y) / length,
                c_i,
                strip_prefix("c", broadcast),
                strip_prefix("x", const),
                y,
            )
        return add_prefix("y", y) | add_prefix("change", tree_map(torch.sub, new, c_i)), new

    return replace(
        train, start=start, step=step, finish=finish, name="controlled", rng_stream="sgd"
    )


@dataclass(frozen=True)
class SCAFFOLDState(State):
    """The model x, and the server's control variate c."""

    c: Tree


@dataclass(frozen=True)
class SCAFFOLD(Method[SCAFFOLDState]):
    """Client i keeps a control variate c_i, the server c, both 0 at first. In each of its K steps a
    client of the cohort S moves along g - c_i + c from the model x it received, to y_i; then c_i⁺ =
    c_i - c + (x - y_i) / (K η_l) (option II; η_l is `local.lr`) or the gradient of all its examples
    at x (`option=1`). The server sets

        x <- x + η_g · mean over S of (y_i - x),   c <- c + 1/N · sum over S of (c_i⁺ - c_i),   N
        the number of **all** clients.

    With momentum, which the paper does not have, K is the equivalent number of plain steps (see
    FedNova), so that c_i⁺ is still a mean of gradients.

    Args:
        server_lr: η_g.
        option: 1 or 2, see above.
        weights: "clients" gives each client the same weight, as in the paper's objective and the
            formulas above. "examples" weights clients by their examples, as in FedAvg: p_i = n_i /
            Σ n over S for x, and n_i / Σ n over all clients for c, so that c stays the weighted
            mean of all c_i. With equal sizes both are the same.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=6, seed=0)
        >>> result = fc.run(fc.SCAFFOLD(server_lr=0.5), clients, fc.models.MLP(8), rounds=3, lr=0.1)
        >>> result.summary["clusters"]
        1
    """

    name: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD: control variates correct the drift of each client"
    paper: ClassVar[str] = (
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML"
        " 2020"
    )
    needs_sgd: ClassVar[str] = "computes control variates from the length of SGD steps"
    client_disclosure: ClassVar[str] = (
        "once a round the trained weights and the change of its control variate; the server needs"
        " only their weighted sums"
    )
    server_visibility: ClassVar[Needs] = "sum"
    upload_cost: ClassVar[str] = "W + V"
    download_cost: ClassVar[str] = "W + V"
    state: ClassVar[type[State]] = SCAFFOLDState

    server_lr: float = 1.0
    option: Literal[1, 2] = 2
    weights: Literal["examples", "clients"] = "examples"

    def __post_init__(self) -> None:
        check_choices(self)
        require(self.server_lr > 0, "method.server_lr", self.server_lr, "must be above 0")

    def why_no_client_privacy(self) -> str:
        return "" if self.weights == "clients" else "must have method.weights = 'clients'"

    def initial_client_state(self, params: Tree) -> Tree:
        trained = self.local.objective.trained
        return {name: torch.zeros_like(params[name]) for name in trained if name in params}

    def init(self, fed: Federation, params: Tree, key: int) -> SCAFFOLDState:
        return SCAFFOLDState(
            stack([params]),
            torch.zeros(len(fed.sizes), dtype=torch.int64),
            c=self.initial_client_state(params),
        )

    def round(
        self, fed: Federation, state: SCAFFOLDState, cohort: Tensor, key: int
    ) -> SCAFFOLDState:
        p, everyone = self._p(fed), torch.zeros_like(cohort)
        results = fed.map(
            controlled(self.local, self.option),
            cohort,
            broadcast=add_prefix("c", state.c),
            per_client=ModelAssignment.all_same(state.models, len(cohort)),
            key=key,
            reduce=SegmentSum(
                segment_ids=everyone, weights=p[cohort], num_segments=1, robust_ok=True
            ),
        )
        if not len(results.ids):
            return state
        y = weighted_mean(
            strip_prefix("y", results.sums), results.total_weight, fallback=state.models
        )
        c = tree_map(
            lambda c, change: (c + change[0] / p.sum().to(change.device)).to(c.dtype),
            state.c,
            strip_prefix("change", results.sums),
        )
        moved = {
            name: x + self.server_lr * (y[name] - x)
            for name, x in state.models.items()
            if name in state.c
        }
        # Running statistics are just averaged.
        return update_models(fed, replace(state, c=c), y | moved)

    def add_clients(
        self, fed: Federation, state: SCAFFOLDState, ids: Tensor, key: int
    ) -> SCAFFOLDState:
        """New clients start with c_i = 0, so that c, the mean over all clients, shrinks."""
        p = self._p(fed)
        share = float(p[: len(state.cluster_ids)].sum() / p.sum())
        state = replace(state, c=tree_map(lambda c: c * share, state.c))
        state = state.with_num_clients(len(fed.sizes))
        return replace(state, cluster_ids=state.cluster_ids.index_fill(0, ids, 0))

    def cost_symbols(self, state: State) -> dict[str, int]:
        assert isinstance(state, SCAFFOLDState)
        return super().cost_symbols(state) | {"V": nbytes(state.c)}

    def _p(self, fed: Federation) -> Tensor:
        """The weight of each client, up to a factor."""
        return (
            fed.sizes.double()
            if self.weights == "examples"
            else torch.ones(len(fed.sizes), dtype=torch.float64)
        )
