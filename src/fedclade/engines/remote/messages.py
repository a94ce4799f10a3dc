"""The messages between the server and the nodes: a JSON header and tensors, independent of the
transport.
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
    """A header that JSON can hold, and tensors by name."""

    header: dict[str, Any]
    tensors: Tree = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """The bytes of the tensors. Those of the header depend on the transport."""
        return nbytes(self.tensors)

    def __post_init__(self) -> None:
        json.dumps(self.header)  # fails when the message is written, not when it is sent


@dataclass(frozen=True)
class NodeError:
    """Why a node gave no usable answer."""

    reason: str


class Transport(Protocol):
    """Sends messages to nodes and returns their answers."""

    def nodes(self) -> list[str]:
        """The names of the nodes that can be reached now. A node's name never changes."""

    def send_and_receive(self, messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        """The answer of each node, or the reason why there is none."""


def pack_assignment(assignment: ModelAssignment) -> tuple[dict[str, Any], Tree]:
    """The header entry and the tensors of an assignment, on the CPU. Each different model is sent
    once, local parameters are not sent.
    """
    models = {
        name: value
        for name, value in assignment.models.items()
        if name not in assignment.local_params
    }
    distinct, model_ids = torch.unique(assignment.model_ids.cpu(), return_inverse=True)
    if models:
        models = tree_index(models, distinct.to(next(iter(models.values())).device))
    header = {"model_ids": model_ids.tolist(), "local_params": list(assignment.local_params)}
    return header, tree_map(Tensor.cpu, add_prefix("per_client", models))


def unpack_assignment(header: Mapping[str, Any], tensors: Tree) -> ModelAssignment:
    return ModelAssignment(
        strip_prefix("per_client", tensors),
        torch.tensor(header["model_ids"], dtype=torch.int64),
        tuple(header["local_params"]),
    )


def to_list(values: Sequence[int] | Tensor) -> list[int]:
    return torch.as_tensor(values).tolist()
