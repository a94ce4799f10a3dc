"""The Gaussian mechanism for signatures: a client clips the contribution of each example and adds
Gaussian noise to the sum.

Neighbours are two data sets of one client that differ in one example, replaced by any other; the
number of examples n is known to the server. A vector g of at most `clip` = C is made of each
example, by itself. Replacing a by b changes Σ g by a - b, at most 2C, and Σ g gᵀ by aaᵀ - bbᵀ. So Σ
g / 2C has sensitivity 1; and so has Σ g / 2C together with the upper triangle of Σ g gᵀ / (2√2 C²),
see `MOMENT`: noise whose standard deviation is that of the Gaussian mechanism for sensitivity 1
hides both at the price of one.
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
square of the change is at most p/4 + (p(2m - p) + d²) / 16. It grows with p up to p = 2m, the most
that p can be; there it is m/2 + d²/16 ≤ m/2 + (2 - m)²/16: convex in m, 1/4 at m = 0 and 1 at m =
2.
"""


def clipped(vectors: Tensor, clip: float) -> Tensor:
    """Every row, scaled down to the norm `clip` if it is longer. A row that is not finite becomes
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

    The server knows the key of a program and could subtract noise made from it: hence the secret.
    The same query on the same data has the same noise, so that noise cannot be averaged out;
    another query or other data have other noise, so that it does not cancel.
    """
    seed = f"fedclade noise\0{secret}\0".encode() + trace.numpy().tobytes()
    bits = np.frombuffer(shake_256(seed).digest(8 * like.numel()), "<u8")
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # never 0 or 1
    normal: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return normal.reshape(like.shape).to(like)
