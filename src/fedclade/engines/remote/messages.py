"""The messages between the server and the nodes: a JSON header and tensors, independent of the
transport.

Each side treats the other as hostile: what it receives is bounded before it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from safetensors import deserialize
from safetensors.torch import save
from torch import Tensor

from fedclade.core.federation import ModelAssignment
from fedclade.core.pytree import Tree, add_prefix, nbytes, strip_prefix, tree_index, tree_map
from fedclade.errors import InvalidInputError
from fedclade.io.safe_read import parse_json

MAX_HEADER_BYTES = 1 << 20
"""The largest JSON header, and the largest list of tensors, in bytes."""
MAX_HEADER_DEPTH = 20
MAX_REASON = 300
"""Characters of a reason that another machine gives."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", one_line(self.reason))


class MalformedMessageError(InvalidInputError):
    """A message from another machine that cannot be read or is too large."""


def encode(message: Message) -> tuple[str, bytes]:
    """The header as JSON, and the tensors in the safetensors format."""
    # safetensors sorts the names; the numbers keep their order. It rejects shared memory.
    numbered = {
        f"{number}:{name}": value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for number, (name, value) in enumerate(message.tensors.items())
    }
    return json.dumps(message.header), save(numbered)


def decode(header: str, tensors: bytes) -> Message:
    """The message that `encode` encoded. Nothing is unpickled, and no size in it is believed: the
    tensors take as much memory as the bytes that arrived.

    Args:
        header: the header as JSON.
        tensors: the tensors in the safetensors format.
    """
    try:
        return Message(_decode_header(header), _decode_tensors(tensors))
    except MalformedMessageError:
        raise
    # The bytes come from another machine: whatever they cause is the fault of that machine.
    except Exception as error:
        raise MalformedMessageError(
            f"message: it cannot be read ({one_line(error)}).", "message"
        ) from error


def _decode_header(header: str) -> dict[str, Any]:
    if len(header) > MAX_HEADER_BYTES:
        raise MalformedMessageError(
            f"message: its header has {len(header):,} bytes; at most {MAX_HEADER_BYTES:,} are"
            " allowed.",
            "message",
        )
    content = parse_json(header, MAX_HEADER_DEPTH)
    if not isinstance(content, dict):
        raise MalformedMessageError("message: its header is not a JSON object.", "message")
    return content


def _decode_tensors(tensors: bytes) -> Tree:
    # The format begins with the length of its list of names, dtypes and shapes.
    length = int.from_bytes(tensors[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise MalformedMessageError(
            f"message: its list of tensors has {length:,} bytes; at most {MAX_HEADER_BYTES:,} are"
            " allowed.",
            "message",
        )
    numbered: dict[int, tuple[str, Tensor]] = {}
    for label, stored in deserialize(tensors):  # type: ignore[no-untyped-call]
        number, _, name = label.partition(":")
        shape, dtype = stored["shape"], _DTYPES[stored["dtype"]]
        numbered[int(number)] = (
            name,
            torch.frombuffer(stored["data"], dtype=dtype).reshape(shape)
            if len(stored["data"])
            else torch.empty(shape, dtype=dtype),
        )
    return dict(numbered[number] for number in sorted(numbered))


def one_line(text: object) -> str:
    """Text from another machine or an exception, as one line of printable characters."""
    shown = "".join(
        character if character.isprintable() else " " for character in str(text)[: MAX_REASON + 1]
    ).strip()
    return f"{shown[: MAX_REASON - 1]}…" if len(shown) > MAX_REASON else shown


class Transport(Protocol):
    """Sends messages to nodes and returns their answers."""

    def nodes(self) -> list[str]:
        """The names of the nodes that can be reached now. A node's name never changes."""

    def send_and_receive(self, messages: Mapping[str, Message]) -> dict[str, Message | NodeError]:
        """The answer of each node, or the reason why there is none."""

    def hello(self, messages: Mapping[str, Message], wait: bool) -> dict[str, Message | NodeError]:
        """Send each node its first message, and return the answers that have arrived to these and
        to earlier first messages. A node whose answer is outstanding gets no second one.

        Args:
            messages: the message to each node.
            wait: wait for an answer if one is outstanding.
        """


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
