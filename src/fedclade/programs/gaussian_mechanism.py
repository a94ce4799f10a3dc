"""What a client does to a signature before it shows it: it clips what each example adds, and hides
the result in Gaussian noise.

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
    """Every row, scaled down to length `clip` where it is longer. One that is not finite counts as
    zeros: a reply that is refused would tell of it.
    """
    lengths = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return torch.where(lengths.isfinite(), vectors / (lengths / clip).clamp_min(1), 0.0)


def trace_of(*parts: Tensor | str | float) -> Tensor:
    """32 bytes that stand for all these: a question, the data that answer it."""
    told = blake2b(digest_size=32)
    for part in parts:
        head, data = (
            (part, b"")
            if not isinstance(part, Tensor)
            else ((part.dtype, tuple(part.shape)), part.cpu().numpy().tobytes())
        )
        told.update(repr(head).encode() + b"\0" + data)
    return torch.frombuffer(bytearray(told.digest()), dtype=torch.uint8)


def after(trace: Tensor, *columns: Tensor) -> Tensor:
    """The trace of what was before and of the samples that now follow, one by one, so that it does
    not matter in which blocks they come.
    """
    for sample in zip(*(column.cpu() for column in columns), strict=True):
        trace = trace_of(trace, *sample)
    return trace


def noise_for(trace: Tensor, secret: int, like: Tensor) -> Tensor:
    """Standard normal numbers, as many as `like` has, from the client's secret and the trace of
    question and data.

    The server knows a program's key and could take out again what is made from it: hence the
    secret. Who is asked the same again answers the same, so that noise is not averaged away;
    another question, or other data, have other noise, so that it does not cancel out.
    """
    seed = f"fedclade noise\0{secret}\0".encode() + trace.numpy().tobytes()
    bits = np.frombuffer(shake_256(seed).digest(8 * like.numel()), "<u8")
    uniform = ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # never 0 or 1
    normal: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return normal.reshape(like.shape).to(like)
