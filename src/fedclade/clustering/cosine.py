"""Cosine similarity of flat vectors: CFL's updates, FLIS's predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.errors import require

CHUNK_VALUES = 8_000_000  # float64 values held at a time, without the result: 64 MB


def cosine(updates: Tensor) -> Tensor:
    """(M, M) the similarities α_ij = ⟨Δθ_i, Δθ_j⟩ / (‖Δθ_i‖ ‖Δθ_j‖), in float64 on the device of
    the updates.

    A zero update has similarity 0 to all others and 1 to itself. The products are summed over
    chunks of parameters, so the stack is never copied to float64 as a whole.

    Args:
        updates: (M, P) the flat updates Δθ_i (CFL) or predictions B_i (FLIS).
    """
    require(
        updates.ndim == 2 and updates.numel() > 0,
        "updates.shape",
        tuple(updates.shape),
        "must be (M, P) with M, P ≥ 1",
    )
    # Each update is scaled by its largest entry, so its square neither underflows nor overflows.
    scale = torch.linalg.vector_norm(updates, float("inf"), dim=1, keepdim=True).double()
    require(bool(scale.isfinite().all()), "updates", "NaN or infinity", "must be finite")
    zero = scale[:, 0] == 0
    scale = torch.where(scale == 0, 1.0, scale)
    clients, parameters = updates.shape
    products = torch.zeros(clients, clients, dtype=torch.float64, device=updates.device)
    width = max(1, CHUNK_VALUES // clients)
    for start in range(0, parameters, width):
        chunk = updates[:, start : start + width].double() / scale
        products.addmm_(chunk, chunk.T)
    square_norm = torch.where(zero, 1.0, products.diagonal())
    # Strips of rows: no second M × M matrix is formed.
    strips = [slice(start, start + width) for start in range(0, clients, width)]
    for strip in strips:
        # One root of the product, not two roots: for integer vectors of equal norm (FLIS's one-hot
        # predictions) the result is exact.
        products[strip].div_((square_norm[strip, None] * square_norm).sqrt_()).clamp_(-1, 1)
    for strip in strips:  # rounding may make a matrix product asymmetric
        half = (products[strip, strip.start :] + products[strip.start :, strip].T).div_(2)
        products[strip, strip.start :], products[strip.start :, strip] = half, half.T
    return products.fill_diagonal_(1)
