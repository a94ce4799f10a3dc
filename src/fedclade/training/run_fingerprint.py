"""The fingerprint of a run, by which a checkpoint of another experiment is recognized."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from torch import Tensor

from fedclade.core.inputs import tensors_of
from fedclade.data.federated_dataset import Clients

Tables = dict[str, dict[str, Any]]
# Settings that may change when a run is resumed: length, evaluation, checkpoints and speed. The
# content of a table counts, not its path.
_FREE = (
    ("data", "path"),
    ("run", "rounds"),
    ("run", "eval_every"),
    ("run", "eval_clients"),
    ("run", "checkpoint_every"),
    ("run", "patience"),
    ("run", "metrics"),
    ("engine", "chunk"),
    ("engine", "threads"),
    ("engine", "shards"),
    ("engine", "client_state"),
)


MOST_HASHED = 1 << 30
"""The largest tensor in bytes of which all values count. Of a larger one it is a sample of rows."""
_SAMPLE, _BLOCKS = 1 << 26, 512  # the bytes of that sample, and its blocks of consecutive rows


def _is_free(table: str, key: str, tables: Tables) -> bool:
    """Whether a setting may change. The length of a run may not if the learning rates of earlier
    rounds, or their noise, depend on it.
    """
    if (table, key) == ("run", "rounds"):
        privacy = tables.get("privacy", {})
        is_noise_found = privacy.get("epsilon") and not privacy.get("noise_multiplier")
        if tables.get("local", {}).get("schedule") == "cosine" or is_noise_found:
            return False
    return (table, key) in _FREE


def plain(value: Any) -> Any:
    """The same tables with Python numbers in place of numpy's, which TOML and JSON cannot write."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(entry) for entry in value)
    return value.item() if isinstance(value, np.generic) else value


def qualified_name(function: object) -> str:
    """The name of a function, or of the class of an object."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def fingerprint(
    tables: Tables,
    clients: Clients | None,
    others: Iterable[Tensor],
    names: Iterable[str] = (),
) -> str:
    """A hash of what must not change when a run is resumed.

    Args:
        tables: the run as the tables of an experiment file.
        clients: the clients; None if they are not in this process.
        others: other tensors, such as the initial model.
        names: names of functions, such as the augmentation.
    """
    fixed = {
        table: {key: value for key, value in values.items() if not _is_free(table, key, tables)}
        for table, values in tables.items()
    }
    digest = hashlib.blake2b(
        json.dumps(fixed, sort_keys=True, default=str).encode(), digest_size=16
    )
    data: tuple[Tensor, ...] = ()
    if clients is not None:
        test = () if clients.x_test is clients.x else tensors_of(clients.x_test)
        data = (
            *tensors_of(clients.x),
            clients.y,
            *test,
            clients.y_test,
            clients.train.index,
            clients.train.offsets,
            clients.test.index,
            clients.test_part_id,
        )
        if clients.validation is not None:
            data += (clients.validation.index, clients.validation.offsets)
        if (later := clients.later) is not None:
            data += (later.rounds, later.train.index, later.test_part_id)
    for tensor in (*data, *others):
        for rows in _hashed_rows(tensor):
            digest.update(np.ascontiguousarray(rows.cpu().numpy()).data)
    for name in names:
        digest.update(name.encode())
    return digest.hexdigest()


def _hashed_rows(tensor: Tensor) -> Iterator[Tensor]:
    """The rows of a tensor that count: all, or blocks at equal distances of a tensor that may be
    larger than memory.
    """
    if tensor.nbytes <= MOST_HASHED:
        yield tensor
        return
    rows = len(tensor)
    length = max(1, _SAMPLE * rows // (_BLOCKS * tensor.nbytes))
    for block in range(_BLOCKS):
        first = block * (rows - length) // (_BLOCKS - 1)
        yield tensor[first : first + length]


def difference(then: Tables, now: Tables) -> str:
    """The first difference between the tables of a stored run and those of this run, as text."""
    keys = [
        (table, key)
        for table in now
        for key in {**then.get(table, {}), **now[table]}
        if not _is_free(table, key, now)
    ]
    for table, key in keys:
        old, new = then.get(table, {}).get(key), now[table].get(key)
        if old != (list(new) if isinstance(new, tuple) else new):
            why = "; the schedule 'cosine' or the noise depends on it" if key == "rounds" else ""
            return f"{table}.{key} was {old!r}, now {new!r}{why}"
    return "the data, the initial model or the augmentation differ"
