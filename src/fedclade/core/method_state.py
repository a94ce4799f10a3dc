"""The state of a method between rounds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor

from fedclade.core.pytree import Tree, tree_index

UNKNOWN = -1
"""The cluster id of a client without a cluster. `Method.add_clients` assigns one before the client
trains or uses a model.
"""


@dataclass(frozen=True)
class Features:
    """The features by which a method groups clients, one row per client. Reports plot them."""

    what: str  # a description for the reader
    rows: Tensor  # (clients, d)
    known: Tensor  # (clients,) whether the row is valid
    measure: Literal["euclidean", "cosine"] = "euclidean"


@dataclass(frozen=True)
class State:
    """The state of a method between rounds. Fields are tensors or trees of tensors, so that every
    state fits into a checkpoint.

    Args:
        models: a stack of models, one row per cluster.
        cluster_ids: (clients,) the row of each client, or UNKNOWN.
        server_state: (rows, …) what the server keeps of each model between rounds, see
            `aggregation.update_models`; empty if there is nothing to keep.
    """

    models: Tree
    cluster_ids: Tensor
    server_state: Tree = field(default_factory=dict, kw_only=True)

    def __len__(self) -> int:
        """The number of models."""
        return len(next(iter(self.models.values())))

    def at_rows(self, rows: Tensor) -> Self:
        """The state with these rows of the models: a new cluster starts with the model and the
        server's state of an old one.

        Args:
            rows: the row of `models` for each new row.
        """
        return replace(
            self,
            models=tree_index(self.models, rows),
            server_state=tree_index(self.server_state, rows),
        )

    def with_num_clients(self, clients: int) -> Self:
        """The same state with entries for clients that joined since. Their cluster is UNKNOWN."""
        missing = clients - len(self.cluster_ids)
        if missing <= 0:
            return self
        return replace(
            self,
            cluster_ids=torch.cat(
                [self.cluster_ids, torch.full((missing,), UNKNOWN, dtype=torch.int64)]
            ),
        )

    def features(self) -> Features | None:
        """The features of the clients, or None if the state does not keep them per client."""
        return None
