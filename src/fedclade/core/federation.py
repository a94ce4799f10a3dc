"""The federation as a method sees it: one function, `map`, its arguments and its results."""

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
"""How the models of a cluster are aggregated: the mean weighted by examples, or a mean that is
robust to a few bad models.
"""
ServerOptimizer: TypeAlias = Literal[
    "fedavg", "fedavgm", "nesterov", "fedadam", "fedyogi", "fedadagrad"
]
"""How the mean of a cluster's models becomes its new model."""


@dataclass(frozen=True)
class ServerUpdate:
    """What the server does with the means of the clusters; see `aggregation.update_models`.

    Args:
        optimizer: "fedavg" takes the mean; the others take its difference from the old model as a
            gradient.
        lr: the learning rate; None for the default of the optimizer.
        momentum: the momentum of "fedavgm" and "nesterov", or β1 of the adaptive optimizers; None
            for the default.
        serve_mean: whether to keep the mean of each cluster's models over the rounds.
        statistics: the names of running statistics, which are always averaged.
    """

    optimizer: ServerOptimizer = "fedavg"
    lr: float | None = None
    momentum: float | None = None
    serve_mean: bool = False
    statistics: tuple[str, ...] = ()

    @property
    def is_mean(self) -> bool:
        """Whether the new models are the means, and nothing is kept between rounds."""
        return self.optimizer == "fedavg" and not self.serve_mean


FIXED_POINT = 2.0**-30
"""The unit of sums in fixed point."""
OWN_BATCH_NORM = "batch_norm"
"""The prefix of a client's own BatchNorm layers in its state."""


@dataclass(frozen=True)
class ModelAssignment:
    """The model of each client. The engine gathers models chunk by chunk, so that there is never a
    stack with one model per client.

    Args:
        models: a stack of models.
        model_ids: (K,) the row of `models` for each client.
        local_params: names of parameters that are in the client's state instead of `models`. They
            never leave the client. In the state, a name may have the prefix "batch_norm/".
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
        """A tree with one row per client. `memory` is the clients' state in the same order."""
        models = {
            name: value for name, value in self.models.items() if name not in self.local_params
        }
        rows = (
            tree_index(models, self.model_ids.to(next(iter(models.values())).device))
            if models
            else {}
        )
        prefix = f"{OWN_BATCH_NORM}/"
        return rows | {name.removeprefix(prefix): memory[name] for name in self.local_params}


@dataclass(frozen=True)
class SegmentSum:
    """Weighted sums of the clients' outputs, one per segment: `sums[s]` is the sum of
    `weights[k] * outputs[k]` over the clients k of segment s.

    Args:
        weights: (K,) the weight of each client, or (K, num_segments) its weight in each segment;
            then `segment_ids` is None.
        num_segments: the number of segments.
        segment_ids: (K,) the segment of each client, or the name of the output that has it (the
            model that a client of IFCA chose).
        keys: the outputs to sum; None for all but the one named by `segment_ids`.
        robust_ok: whether the outputs are models to be averaged, so that a federation may use
            another aggregator than the mean.
        fixed_point: whether each term is rounded to a multiple of `FIXED_POINT`.
        min_clients: above 0 the sum is secure: the engine reveals nothing else of the summed
            outputs, and no sum of fewer clients. Such a sum is 0, with weight 0.
        subgroup_ids: (K,) the smaller group of each client if other calls sum almost the same
            outputs over these. If sums are secure, clients of small subgroups wait: else the
            difference of two sums would be theirs.
    """

    weights: Tensor
    num_segments: int
    segment_ids: Tensor | str | None = None
    keys: tuple[str, ...] | None = None
    robust_ok: bool = False
    fixed_point: bool = False
    min_clients: int = 0
    subgroup_ids: Tensor | None = None

    def summed_keys(self, outputs: Tree) -> tuple[str, ...]:
        """The names of the outputs to sum."""
        keys = self.keys if self.keys is not None else outputs
        return tuple(name for name in keys if name != self.segment_ids)


def contribution_matrix(reduce: SegmentSum, places: Tensor, outputs: Tree) -> Tensor:
    """(len(places), num_segments) the weight of each client in each segment.

    Args:
        reduce: the sums.
        places: the positions of the clients in the call of `map`.
        outputs: the outputs of these clients.
    """
    weights = reduce.weights[places].double().cpu()
    if reduce.segment_ids is None:
        return weights
    segments = (
        outputs[reduce.segment_ids].flatten()
        if isinstance(reduce.segment_ids, str)
        else reduce.segment_ids[places]
    )
    matrix = np.zeros((len(places), reduce.num_segments))
    matrix[np.arange(len(places)), segments.cpu().numpy()] = weights.numpy()
    return torch.from_numpy(matrix)


@dataclass(frozen=True)
class Failure:
    """A client without a valid reply."""

    client: int
    reason: str
    rejected: bool = False  # whether a reply came and was rejected


@dataclass(frozen=True)
class ClientResults:
    """The results of `map`, in the order of its `ids`.

    Args:
        ids: the clients that replied; clients without a valid reply are missing.
        outputs: the replies, one row for each of `ids`, without the outputs that `reduce` summed.
        sums: the sums of `reduce`, in float64, one row per segment.
        total_weight: (segments,) the sum of the weights in `sums`.
        failures: the clients without a valid reply.
    """

    ids: Tensor
    outputs: Tree
    sums: Tree = field(default_factory=dict)
    total_weight: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    failures: Sequence[Failure] = ()


class Federation(Protocol):
    """The clients, reached through an engine. Client ids are 0 … M-1 and stay the same."""

    @property
    def aggregator(self) -> Aggregator:
        """How to aggregate models. Sums with `robust_ok` are aggregated so already."""

    @property
    def server_update(self) -> ServerUpdate:
        """How the new models are made from the means; `aggregation.update_models` applies it."""

    @property
    def sizes(self) -> Tensor:
        """(clients,) the number of training examples of each client."""

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

        Args:
            program: the program.
            ids: the clients.
            broadcast: a tree that every client receives.
            per_client: the model that each client receives.
            key: the randomness of this call. Two calls in one round need different keys unless
                their programs have different names.
            reduce: sum outputs instead of returning them.
        """
