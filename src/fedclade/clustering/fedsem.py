"""FedSEM: k-means of long vectors, and the nearest center of each vector."""

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
    """(M,) the cluster of each point by k-means, numbered by first appearance.

    Args:
        points: (M, P) the points.
        clusters: K, the number of clusters. With fewer distinct points, each is a cluster.
        seed: the seed of k-means.
    """
    _check(points, "points")
    require(clusters >= 1, "clusters", clusters, "must be at least 1")
    # Adding 0 turns -0.0 into 0.0: equal points must have equal bytes.
    distinct = len({blake2b((row.cpu() + 0.0).numpy().tobytes()).digest() for row in points})
    coordinates = _reduce_dimensions(points).cpu().numpy()
    _, labels = kmeans(coordinates, min(clusters, distinct), restarts=RESTARTS, seed=seed, tol=0.0)
    return torch.from_numpy(canonical_labels(labels))


def _reduce_dimensions(points: Tensor) -> Tensor:
    """Points (M, M) with the same pairwise distances as `points` (M, P), if P > M: there are few
    models, and each is long.

    With centered points X, the products X Xᵀ = V diag(λ) Vᵀ determine all distances, and
    V diag(√λ) has the same products.
    """
    count, dimensions = points.shape
    if dimensions <= count:
        return points
    products = torch.zeros(count, count, dtype=torch.float64, device=points.device)
    for chunk in torch.split(points, max(1, CHUNK_VALUES // count), dim=1):
        centered = chunk.double() - chunk.double().mean(0)
        products.addmm_(centered, centered.T)
    values, axes = torch.linalg.eigh(products)
    coordinates: Tensor = axes * values.clamp_min(0).sqrt()
    return coordinates


def nearest_center(points: Tensor, centers: Tensor) -> Tensor:
    """(M,) the row of the nearest center in L2 for each point; the first, if several are equally
    near.

    Differences are computed in float64, a chunk of points at a time. Models that were trained from
    one another are close, and the usual ‖x‖² − 2 x·c + ‖c‖² would lose their difference to
    rounding.

    Args:
        points: (M, P) the points, such as the clients' weights W_i.
        centers: (K, P) the centers W̃_k.
    """
    _check(points, "points")
    _check(centers, "centers")
    require(
        points.shape[1] == centers.shape[1],
        "centers.shape",
        tuple(centers.shape),
        f"must be (K, {points.shape[1]}), as the points",
    )
    centers = centers.to(points.device, torch.float64)
    chunks = torch.split(points, max(1, CHUNK_VALUES // points.shape[1]))
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cat(
        [torch.cdist(chunk.double(), centers, compute_mode=exact).argmin(1) for chunk in chunks]
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
