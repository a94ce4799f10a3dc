"""The messages of secure sums: what `privacy.secure_sum.protocol` exchanges, as JSON and tensors.

What comes from another machine is checked here for its form, and by the protocol for its content.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedclade.core.pytree import Tree, add_prefix, strip_prefix
from fedclade.errors import is_int
from fedclade.privacy.secure_sum import shamir
from fedclade.privacy.secure_sum.fixed_point import Words
from fedclade.privacy.secure_sum.protocol import (
    MAX_PARTIES,
    MAX_SLOTS,
    Deal,
    Groups,
    Identity,
    ProtocolError,
    Reveal,
    Session,
)

COUNTS = "counts"
"""The group whose vector counts the clients that chose each of the other groups."""
MAX_CLIENTS = 1 << 40
NO_KEYS = "this node has no keys of the run"


def identity_to_json(identity: Identity) -> list[str]:
    keys = (identity.verify_key, identity.encryption_key, identity.signature)
    return [identity.name, *(key.hex() for key in keys)]


def identity_from_json(content: Any) -> Identity:
    name, *keys = _list(content, 4)
    return Identity(_text(name), *map(_bytes, keys))


def deal_to_json(deal: Deal) -> list[Any]:
    """A deal without its shares."""
    return [
        deal.name,
        deal.number,
        deal.public_key.hex(),
        [each.hex() for each in deal.commitments],
        deal.directory.hex(),
        deal.signature.hex(),
    ]


def deal_from_json(content: Any, shares: Mapping[str, bytes]) -> Deal:
    name, number, public_key, commitments, directory, signature = _list(content, 6)
    _expect(isinstance(commitments, list) and 0 < len(commitments) <= MAX_SLOTS)
    return Deal(
        _text(name),
        _whole(number),
        _bytes(public_key),
        tuple(map(_bytes, commitments)),
        _bytes(directory),
        shares,
        _bytes(signature),
    )


def shares_to_tensor(shares: Iterable[bytes]) -> Tensor:
    """(shares, bytes) shares of one length."""
    rows = [np.frombuffer(share, np.uint8) for share in shares]
    return torch.from_numpy(np.stack(rows))


def shares_from_tensor(tensor: Tensor | None, names: Sequence[str]) -> dict[str, bytes]:
    _expect(tensor is not None and tensor.ndim == 2 and tensor.dtype == torch.uint8)
    assert tensor is not None
    _expect(len(tensor) == len(names))
    return {name: row.numpy().tobytes() for name, row in zip(names, tensor, strict=True)}


def session_to_json(session: Session) -> dict[str, Any]:
    return {
        "number": session.number,
        "groups": session.groups,
        "min_clients": session.min_clients,
    }


def session_from_json(content: Any, run: str, deals: Sequence[Deal]) -> Session:
    """The session of these deals."""
    _expect(isinstance(content, dict) and isinstance(content.get("groups"), dict))
    groups: Groups = {}
    for group, members in content["groups"].items():
        _expect(isinstance(members, dict))
        groups[group] = {name: _whole(count) for name, count in members.items()}
    return Session(
        run,
        _text(content.get("number")),
        groups,
        {deal.name: deal.public_key for deal in deals},
        {deal.name: deal.number for deal in deals},
        _whole(content.get("min_clients")),
    )


def reveal_to_json(reveal: Reveal) -> dict[str, Any]:
    masks = {
        group: {name: f"{share:x}" for name, share in shares.items()}
        for group, shares in reveal.masks.items()
    }
    return {"masks": masks, "keys": {name: f"{share:x}" for name, share in reveal.keys.items()}}


def reveal_from_json(content: Any) -> Reveal:
    _expect(isinstance(content, dict) and isinstance(content.get("masks"), dict))
    masks = {group: _shares(shares) for group, shares in content["masks"].items()}
    return Reveal(masks, _shares(content.get("keys")))


def confirmations_from_json(content: Any) -> dict[str, bytes]:
    _expect(isinstance(content, dict) and len(content) <= MAX_PARTIES)
    return {name: _bytes(signature) for name, signature in content.items()}


def masked_to_tensors(masked: Mapping[str, Words]) -> Tree:
    return add_prefix(
        "masked", {group: torch.from_numpy(words.view(np.int64)) for group, words in masked.items()}
    )


def masked_from_tensors(tensors: Tree) -> dict[str, Words]:
    masked = strip_prefix("masked", tensors)
    for value in masked.values():
        _expect(value.dtype == torch.int64 and value.ndim == 1)
    return {group: value.numpy().view(np.uint64) for group, value in masked.items()}


def _shares(content: Any) -> dict[str, int]:
    _expect(isinstance(content, dict) and len(content) <= MAX_PARTIES)
    result = {}
    for name, text in content.items():
        _expect(isinstance(text, str) and len(text) <= 2 * shamir.SHARE_BYTES)
        result[name] = int(text, 16) % shamir.PRIME
    return result


def _list(content: Any, length: int) -> list[Any]:
    _expect(isinstance(content, list) and len(content) == length)
    result: list[Any] = content
    return result


def _text(content: Any) -> str:
    _expect(isinstance(content, str) and len(content) <= 300)
    return str(content)


def _bytes(content: Any) -> bytes:
    return bytes.fromhex(_text(content))


def _whole(content: Any) -> int:
    _expect(is_int(content, 0, MAX_CLIENTS))
    return int(content)


def _expect(condition: bool) -> None:
    if not condition:
        raise ProtocolError("a malformed message")
