"""pFedGraph's collaboration graph: how much each client takes from the models of the others."""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.errors import require

ALIKE = 0.9  # updates with a larger cosine count as equal


def collaboration_weights(updates: Tensor, sizes: Tensor, alpha: float) -> Tensor:
    """Row i: the shares a_i of all models in the new model of client i.

    a_i is the point of the simplex that minimizes Σ_j a_j d_ij + α ‖a - p‖², where d_ij is minus
    the cosine of the updates of i and j, or -1 above 0.9, and p_j = n_j / n. This is the point of
    the simplex nearest to p - d_i / (2 α).

    Args:
        updates: (n, d) the clients' weights minus the initial model.
        sizes: (n,) n_j, the numbers of samples.
        alpha: α.

    Returns:
        (n, n) rows of sum 1, in float64.
    """
    require(updates.ndim == 2, "updates.shape", tuple(updates.shape), "must be (n, d)")
    require(alpha > 0, "alpha", alpha, "must be above 0")
    norms = updates.double().norm(dim=1, keepdim=True)
    directions = updates.double() / torch.where(norms > 0, norms, 1.0)
    cosines = (directions @ directions.T).fill_diagonal_(1.0)
    cosines = torch.where(cosines > ALIKE, 1.0, cosines)
    p = sizes.double() / sizes.sum()
    return project_to_simplex(p + cosines / (2 * alpha))


def project_to_simplex(rows: Tensor) -> Tensor:
    """For each row the nearest point with entries of at least 0 and sum 1: max(row - τ, 0), where τ
    makes the sum 1.

    Args:
        rows: (n, m) any points.
    """
    falling = rows.sort(1, descending=True).values
    count = torch.arange(1, rows.shape[1] + 1, dtype=rows.dtype, device=rows.device)
    tau = (falling.cumsum(1) - 1) / count  # if only the largest 1, 2, … entries stay above 0
    kept = (falling > tau).sum(1, keepdim=True)
    return (rows - tau.gather(1, kept - 1)).clamp_min(0)
