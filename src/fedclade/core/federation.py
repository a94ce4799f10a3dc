"""What a method sees of a federation: one verb, `map`, and what goes in and comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree, tree_index

Aggregator: TypeAlias = Literal["mean", "median", "trimmed_mean", "clipped_mean"]
"""How the models of a group become one: the mean weighted by examples, or a mean that is robust to
a few bad models.
"""


@dataclass(frozen=True)
class ModelAssignment:
    """A row of `models` for each client, by index: the engine gathers inside a chunk, so that no
    stack of all models is ever held.

    The parameters named in `own` are not in `models` but in the client's memory, and never leave
    it.
    """

    models: Tree
    model_ids: Tensor
    local_params: tuple[str, ...] = ()

    @classmethod
    def all_same(cls, model: Tree, num_clients: int) -> ModelAssignment:
        """The same model for every client. `model` is a stack with one row."""
        return cls(model, torch.zeros(num_clients, dtype=torch.int64))

    def __getitem__(self, places: Tensor | slice) -> ModelAssignment:
        return ModelAssignment(self.models, self.model_ids[places], self.local_params)

    def gather(self, memory: Tree) -> Tree:
        """One tree with a row for each client; `memory` has the clients' memory in the same
        order.
        """
        models = {
            name: value for name, value in self.models.items() if name not in self.local_params
        }
        rows = (
            tree_index(models, self.model_ids.to(next(iter(models.values())).device))
            if models
            else {}
        )
        return rows | {name: memory[name] for name in self.local_params}


@dataclass(frozen=True)
class SegmentSum:
    """Add the replies up on the way in: `sums[r] = sum of weight_k * reply_k` over the clients k
    that go to row r.

    row:    (K,) the row each client goes to, or the name of a reply that says it (IFCA's choice)
    weight: (K,) the weight of each client; or (K, rows), how much it gives to each row (then
    without `row`)
    keys:   which replies to add; default: all that are not `row`
    models: whether what is added are models to be averaged, so that a federation may take another
    `average` than the mean
    """

    weights: Tensor
    num_segments: int
    segment_ids: Tensor | str | None = None
    keys: tuple[str, ...] | None = None
    robust_ok: bool = False

    def summed_keys(self, replies: Tree) -> tuple[str, ...]:
        """The names of those that are added."""
        row = self.segment_ids if isinstance(self.segment_ids, str) else None
        return tuple(
            name for name in (self.keys if self.keys is not None else replies) if name != row
        )


def contribution_matrix(reduce: SegmentSum, places: Tensor, replies: Tree) -> Tensor:
    """(K, rows) how much each of the clients that were asked at these places gives to each row."""
    weight = reduce.weights[places].double().cpu()
    if reduce.segment_ids is None:
        return weight
    where = (
        replies[reduce.segment_ids].flatten()
        if isinstance(reduce.segment_ids, str)
        else reduce.segment_ids[places]
    )
    give = np.zeros((len(places), reduce.num_segments))
    give[np.arange(len(places)), where.cpu().numpy()] = weight.numpy()
    return torch.from_numpy(give)


@dataclass(frozen=True)
class Failure:
    """A client that did not answer, or whose answer was refused, and why."""

    client: int
    reason: str
    rejected: bool = False  # something came, and was not taken


@dataclass(frozen=True)
class ClientResults:
    """What came back from `map`, in the order in which the clients were asked."""

    ids: Tensor  # who answered; may be fewer than asked
    outputs: Tree  # leading axis = len(ids); what `reduce` took is not in it
    sums: Tree = field(default_factory=dict)  # float64, leading axis = rows of `reduce`
    total_weight: Tensor = field(
        default_factory=lambda: torch.zeros(0, dtype=torch.float64)
    )  # (rows,) total weight that went into `sums`
    failures: Sequence[Failure] = ()


class Federation(Protocol):
    """The clients, reached through an engine. Client ids are 0 … M-1 and stay the same."""

    @property
    def aggregator(self) -> Aggregator:
        """How models are to be averaged; sums of models (`Sum.models`) come so already."""

    @property
    def sizes(self) -> Tensor:
        """Training examples of each client."""

    def map(
        self,
        program: AnyProgram,
        ids: Tensor,
        *,
        broadcast: Tree | None = None,
        per_client: ModelAssignment | None = None,
        key: int,
        reduce: SegmentSum | None = None,
    ) -> ClientResults:
        """Run the program on these clients' training data.

        shared: sent to all; each: a row for each client; key: this call's randomness (two calls in
        one round need different keys unless their programs differ); reduce: add replies up instead
        of returning them.
        """
