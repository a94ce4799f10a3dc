"""The Gaussian mechanism for signatures: a client clips the contribution of each example and adds
Gaussian noise to the sum.

Two data sets of a client are neighbors if they differ in one example. The server has the number of
examples n. Each example alone gives a vector g whose norm is at most `clip` = C. Replacing a by b
changes Σ g by a - b, at most 2C, and Σ g gᵀ by aaᵀ - bbᵀ. So Σ g / 2C has sensitivity 1. The vector
of Σ g / 2C and the upper triangle of Σ g gᵀ / (2√2 C²) also has sensitivity 1, see `MOMENT`. So the
noise for one of them protects both.
"""

from __future__ import annotations

import math
from hashlib import blake2b, shake_256

import numpy as np
import torch
from torch import Tensor

SUM = 2.0
"""Σ g / (SUM · C) has sensitivity 1."""

MOMENT = 2 * math.sqrt(2)
"""Σ g / (SUM · C) and the upper triangle of Σ g gᵀ / (MOMENT · C²), as one vector, have sensitivity
1.

With C = 1, p = |a - b|², q = |a + b|², m = |a|² + |b|² ≤ 2 and d = |a|² - |b|², |d| ≤ 2 - m, we
have p + q = 2m and |aaᵀ - bbᵀ|² = (pq + d²) / 2, which its upper triangle does not exceed. The
square of the change is at most p/4 + (p(2m - p) + d²) / 16. It grows with p up to the maximum p =
2m. There it is m/2 + d²/16 ≤ m/2 + (2 - m)²/16: convex in m, 1/4 at m = 0 and 1 at m = 2.
"""


def clipped(vectors: Tensor, clip: float) -> Tensor:
    """Each row, scaled down to the norm `clip` if it is longer. A row that is not finite becomes
    zeros, since a rejected reply would reveal it.
    """
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return torch.where(lengths.isfinite(), vectors / (lengths / clip).clamp_min(1), 0.0)


def trace_of(*parts: Tensor | str | float) -> Tensor:
    """A hash of 32 bytes of these values: the arguments of a query and its data."""
    digest = blake2b(digest_size=32)
    for part in parts:
        head, data = (
            (part, b"")
            if not isinstance(part, Tensor)
            else ((part.dtype, tuple(part.shape)), part.cpu().numpy().tobytes())
        )
        digest.update(repr(head).encode() + b"\0" + data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def after(trace: Tensor, *columns: Tensor) -> Tensor:
    """The trace extended by these samples, one by one, so that it does not depend on the blocks."""
    for sample in zip(*(column.cpu() for column in columns), strict=True):
        trace = trace_of(trace, *sample)
    return trace


def noise_for(trace: Tensor, secret: int, like: Tensor) -> Tensor:
    """Standard normal numbers in the shape of `like`, from the client's secret and the trace of
    query and data.

    The server has the key of a program and could subtract noise that is made from it, so the noise
    is made from the secret. The same query on the same data has the same noise, so that repeated
    queries do not average it out. A different query or different data have different noise, so that
    it does not cancel.

    Args:
        trace: the hash of query and data, as `trace_of` and `after` give it.
        secret: the client's secret.
        like: the tensor whose shape, dtype and device the result has.
    """
    seed = f"fedclade noise\0{secret}\0".encode() + trace.numpy().tobytes()
    bits = np.frombuffer(shake_256(seed).digest(8 * like.numel()), "<u8")
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # never 0 or 1
    normal: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return normal.reshape(like.shape).to(like)
