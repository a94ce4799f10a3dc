"""What makes a run the run it is: another experiment's checkpoint is recognised by it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

from fedclade.data.federated_dataset import Clients

Tables = dict[str, dict[str, Any]]
# What may change when a run is resumed: how long it is, how often it is looked at, how fast it
# goes.
_FREE = (
    ("run", "rounds"),
    ("run", "eval_every"),
    ("run", "checkpoint_every"),
    ("engine", "chunk"),
    ("engine", "threads"),
)


def plain(value: Any) -> Any:
    """The same tables with Python numbers instead of numpy's, which TOML and JSON do not have."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(entry) for entry in value)
    return value.item() if isinstance(value, np.generic) else value


def fingerprint(tables: Tables, clients: Clients | None, others: Iterable[Tensor]) -> str:
    """A hash of what must not change between the parts of one run: configuration, data and first
    model, not how long and how fast.

    Of clients elsewhere (None) only their answers are known.
    """
    fixed = {
        table: {key: value for key, value in values.items() if (table, key) not in _FREE}
        for table, values in tables.items()
    }
    digest = hashlib.blake2b(
        json.dumps(fixed, sort_keys=True, default=str).encode(), digest_size=16
    )
    held: tuple[Tensor, ...] = ()
    if (data := clients) is not None:
        held = (
            data.x,
            data.y,
            data.x_test,
            data.y_test,
            data.train.index,
            data.train.offsets,
            data.test.index,
            data.test_part_id,
        )
    for tensor in (*held, *others):
        digest.update(np.ascontiguousarray(tensor.cpu().numpy()).data)
    return digest.hexdigest()


def difference(then: Tables, now: Tables) -> str:
    """What distinguishes a stored run from this one, in words."""
    keys = [
        (table, key)
        for table in now
        for key in {**then.get(table, {}), **now[table]}
        if (table, key) not in _FREE
    ]
    for table, key in keys:
        old, new = then.get(table, {}).get(key), now[table].get(key)
        if old != (list(new) if isinstance(new, tuple) else new):
            return f"{table}.{key} was {old!r}, now {new!r}"
    return "its data or its first model differ"
