"""Groups of vectors by their centres (FedSEM): k-means, and the nearest of some centres."""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from fedclade.clustering.graph import numbered
from fedclade.errors import require

RESTARTS = 20
SLAB = 8_000_000  # numbers held in float64 at a time: 64 MB


def kmeans(points: Tensor, clusters: int, seed: int) -> Tensor:
    """The group (M,) of each of M points (M, P) by k-means, numbered by first appearance; the best
    of 20 starts by k-means++.

    Where fewer than `clusters` points are distinct, there are as many groups as distinct points.
    """
    from sklearn.cluster import KMeans  # type: ignore[import-untyped]
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # scikit-learn brings it

    _check(points, "points")
    require(clusters >= 1, "clusters", clusters, "must be at least 1")
    # Adding 0 makes 0.0 of -0.0, which is equal and has other bytes.
    distinct = len({blake2b((row.cpu() + 0.0).numpy().tobytes()).digest() for row in points})
    where = _in_few_dimensions(points).cpu().numpy()
    with threadpool_limits(
        1
    ):  # with several threads it adds in an order that changes from run to run
        labels = (
            KMeans(min(clusters, distinct), n_init=RESTARTS, tol=0.0, random_state=seed)
            .fit(where)
            .labels_
        )
    return torch.from_numpy(numbered(labels))


def _in_few_dimensions(points: Tensor) -> Tensor:
    """The points (M, P) at the same distances from each other with M coordinates, where P is more:
    models are few and long.

    Products about the mean, B = X Xᵀ = V diag(λ) Vᵀ, say all about distances, and V diag(√λ) has
    the same products.
    """
    count, dimensions = points.shape
    if dimensions <= count:
        return points
    products = torch.zeros(count, count, dtype=torch.float64, device=points.device)
    for slab in torch.split(points, max(1, SLAB // count), dim=1):
        centred = slab.double() - slab.double().mean(0)
        products.addmm_(centred, centred.T)
    values, axes = torch.linalg.eigh(products)
    coordinates: Tensor = axes * values.clamp_min(0).sqrt()
    return coordinates


def nearest_centre(points: Tensor, centres: Tensor) -> Tensor:
    """For each of M points (M, P) the row of the centre (K, P) that is nearest in L2; of equally
    near ones the first.

    Differences are taken in float64, a slab of points at a time: models that were trained from each
    other are close, and the usual ‖x‖² − 2 x·c + ‖c‖² would lose what tells them apart.
    """
    _check(points, "points")
    _check(centres, "centres")
    require(
        points.shape[1] == centres.shape[1],
        "centres.shape",
        tuple(centres.shape),
        f"must be (K, {points.shape[1]}), as the points",
    )
    there = centres.to(points.device, torch.float64)
    slabs = torch.split(points, max(1, SLAB // points.shape[1]))
    exact = "donot_use_mm_for_euclid_dist"
    return torch.cat(
        [torch.cdist(slab.double(), there, compute_mode=exact).argmin(1) for slab in slabs]
    ).cpu()


def _check(points: Tensor, name: str) -> None:
    require(
        points.ndim == 2 and points.numel() > 0,
        f"{name}.shape",
        tuple(points.shape),
        "must be (M, P) with M, P ≥ 1",
    )
    largest = max(
        abs(float(end)) for end in points.aminmax()
    )  # unlike isfinite it makes no copies of all points; NaN stays NaN
    require(largest < float("inf"), name, "NaN or infinity", "must be finite")
