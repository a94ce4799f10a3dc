"""A map of the clients: similar ones are close."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.analysis.diagnose.class_statistics import ClassStatistics
from fedclade.clustering.clade import whitening_matrix
from fedclade.core.names import Names
from fedclade.core.pca import principal_axes

Array = NDArray[np.float64]
MOST = 2_000  # clients; of more an even sample


def client_map(statistics: ClassStatistics, names: Names) -> tuple[dict[str, Any], ...]:
    """For each client its number, its name if it has one, and its place: the first two principal
    components of `joint_signatures`. Empty with fewer than three clients.
    """
    clients = len(statistics.counts)
    if clients < 3:
        return ()
    rows = torch.from_numpy(joint_signatures(statistics))
    if bool((rows == rows[0]).all()):
        return ()
    places = principal_axes(rows, 2).project(rows).double().tolist()
    shown = range(clients) if clients <= MOST else range(0, clients, -(-clients // MOST))
    name = {} if names.clients is None else dict(enumerate(names.clients))
    return tuple(
        {
            "client": client,
            "x": float(f"{places[client][0]:.4g}"),
            "y": float(f"{places[client][1]:.4g}"),
        }
        | ({"name": name[client]} if client in name else {})
        for client in shown
    )


def joint_signatures(statistics: ClassStatistics) -> Array:
    """(M, C (d + 1)) for each class a client's share of it, and that share times the whitened mean
    of its features, relative to all clients. Clients with the same p(x, y) have the same row, up to
    noise.
    """
    degrees = float(statistics.degrees.sum())
    white = whitening_matrix(statistics.scatter.sum(0), max(1.0, degrees))
    share = statistics.counts / np.maximum(statistics.sizes, 1)[:, None]
    total = np.maximum(statistics.counts.sum(0), 1)[:, None]
    center = statistics.sums.sum(0) / total
    z = (statistics.means - center) @ white
    joint = np.concatenate([share[..., None], share[..., None] * z], -1)
    return np.asarray(joint.reshape(len(share), -1))
