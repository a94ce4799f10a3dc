"""k-means of long vectors, and the nearest centre of each (FedSEM)."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from fedclade.clustering.graph import canonical_labels
from fedclade.core.kmeans import kmeans
from fedclade.errors import require

RESTARTS = 20
CHUNK_VALUES = 8_000_000  # float64 values held at a time: 64 MB


def kmeans_labels(points: Tensor, clusters: int, seed: int) -> Tensor:
    """The cluster (M,) of each of M points (M, P) by k-means, numbered by first appearance.

    If fewer than `clusters` points are distinct, there are as many clusters as distinct points.
    """
    _check(points, "points")
    require(clusters >= 1, "clusters", clusters, "must be at least 1")
    # Adding 0 turns -0.0 into 0.0: equal points must have equal bytes.
    distinct = len({blake2b((row.cpu() + 0.0).numpy().tobytes()).digest() for row in points})
    coordinates = _in_few_dimensions(points).cpu().numpy()
    _, labels = kmeans(coordinates, min(clusters, distinct), restarts=RESTARTS, seed=seed, tol=0.0)
    return torch.from_numpy(canonical_labels(labels))


def _in_few_dimensions(points: Tensor) -> Tensor:
    """Points with M coordinates each that have the same pairwise distances as the M points (M, P),
    if P > M: there are few models, and each is long.

    With centred points X the products X Xᵀ = V diag(λ) Vᵀ determine all distances, and V diag(√λ)
    has the same products.
    """
    count, dimensions = points.shape
    if dimensions <= count:
        return points
    products = torch.zeros(count, count, dtype=torch.float64, device=points.device)
    for chunk in torch.split(points, max(1, CHUNK_VALUES // count), dim=1):
        centred = chunk.double() - chunk.double().mean(0)
        products.addmm_(centred, centred.T)
    values, axes = torch.linalg.eigh(products)
    coordinates: Tensor = axes * values.clamp_min(0).sqrt()
    return coordinates


def nearest_centre(points: Tensor, centres: Tensor) -> Tensor:
    """For each of M points (M, P) the row of the nearest centre (K, P) in L2; the first one, if
    several are equally near.

    Differences are taken in float64, a chunk of points at a time: models that were trained from one
    another are close, and the usual ‖x‖² − 2 x·c + ‖c‖² would lose their difference to rounding.
    """
    _check(points, "points")
    _check(centres, "centres")
    require(
        points.shape[1] == centres.shape[1],
        "centres.shape",
        tuple(centres.shape),
        f"must be (K, {points.shape[1]}), as the points",
    )
    centres = centres.to(points.device, torch.float64)
    chunks = torch.split(points, max(1, CHUNK_VALUES // points.shape[1]))
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cat(
        [torch.cdist(chunk.double(), centres, compute_mode=exact).argmin(1) for chunk in chunks]
    ).cpu()


def _check(points: Tensor, name: str) -> None:
    require(
        points.ndim == 2 and points.numel() > 0,
        f"{name}.shape",
        tuple(points.shape),
        "must be (M, P) with M, P ≥ 1",
    )
    # Unlike isfinite, aminmax makes no copy of all points; it propagates NaN.
    largest = max(abs(float(extreme)) for extreme in points.aminmax())
    require(largest < float("inf"), name, "NaN or infinity", "must be finite")
