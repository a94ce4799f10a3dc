"""What goes between the server and the places where clients live: letters of words and tensors,
whatever carries them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fedclade.core.federation import ModelAssignment
from fedclade.core.pytree import Tree, add_prefix, nbytes, strip_prefix, tree_index, tree_map


@dataclass(frozen=True)
class Message:
    """head: what JSON can say; tensors: by name."""

    header: dict[str, Any]
    tensors: Tree = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of what it carries: the tensors. What holds them together depends on the
        carrier.
        """
        return nbytes(self.tensors)

    def __post_init__(self) -> None:
        json.dumps(self.header)  # what cannot be sent is noticed where it is written


class Transport(Protocol):
    """Carries letters to sites and brings their answers."""

    def nodes(self) -> list[str]:
        """Who can be reached now, by a name that stays the same."""

    def send_and_receive(self, messages: Mapping[str, Message]) -> dict[str, Message | str]:
        """The answer of each site, or why there is none."""


def packed_rows(rows: ModelAssignment) -> tuple[dict[str, Any], Tree]:
    """Rows as they travel, on the CPU: each different model once, and which of them is whose. What
    is the clients' own does not travel.
    """
    models = {name: value for name, value in rows.models.items() if name not in rows.local_params}
    distinct, index = torch.unique(rows.model_ids.cpu(), return_inverse=True)
    if models:
        models = tree_index(models, distinct.to(next(iter(models.values())).device))
    return {"index": index.tolist(), "own": list(rows.local_params)}, tree_map(
        Tensor.cpu, add_prefix("each", models)
    )


def unpacked_rows(head: Mapping[str, Any], tensors: Tree) -> ModelAssignment:
    return ModelAssignment(
        strip_prefix("each", tensors),
        torch.tensor(head["index"], dtype=torch.int64),
        tuple(head["own"]),
    )


def numbers(values: Sequence[int] | Tensor) -> list[int]:
    return torch.as_tensor(values).tolist()
