"""The members of each group by name: its clients and its most frequent classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade.core.names import Names

SHOWN_CLIENTS, SHOWN_CLASSES, SHOWN_GROUPS = 20, 5, 8


def members(
    group: NDArray[np.int64] | None, names: Names, counts: NDArray[np.float64]
) -> tuple[dict[str, Any], ...]:
    """A row for each group: its clients and its most frequent classes, by name. Empty if there are
    no groups, or neither clients nor classes have names.

    Args:
        group: the group of each client; None: there are no groups.
        names: the names of clients and classes.
        counts: (clients, classes) samples.
    """
    # Sequences count as one class.
    has_classes = names.classes is not None and counts.shape[1] == len(names.classes)
    if group is None or (names.clients is None and not has_classes):
        return ()
    rows = []
    for number in range(int(group.max()) + 1):
        ids = np.flatnonzero(group == number)
        row: dict[str, Any] = {"group": number, "clients": len(ids)}
        if names.clients is not None:
            more = ", …" if len(ids) > SHOWN_CLIENTS else ""
            row["names"] = ", ".join(map(names.client, ids[:SHOWN_CLIENTS].tolist())) + more
        if has_classes:
            total = counts[ids].sum(0)
            order = np.argsort(-total, kind="stable")[:SHOWN_CLASSES].tolist()
            row["classes"] = ", ".join(
                f"{names.class_name(label)} ({100 * total[label] / total.sum():.0f} %)"
                for label in order
                if total[label] > 0
            )
        rows.append(row)
    return tuple(rows)


def sentences(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The clients of each group in one sentence each, if they have names and the groups are few."""
    named = [row for row in rows if "names" in row]
    if len(named) > SHOWN_GROUPS:
        return []
    return [f"Group {row['group']}: {row['names']}." for row in named]
