"""Vectors in fixed point: whole numbers of units of 2^-30, modulo 2^64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedclade.core.federation import FIXED_POINT
from fedclade.errors import InvalidInputError

Words = NDArray[np.uint64]
LARGEST = 2**63 - 1


def encode(values: NDArray[np.float64], clients: int) -> Words:
    """The values in fixed point. A value that could make the sum wrap around is an error: nothing
    is cut off.

    Args:
        values: the values of one client.
        clients: the number of clients whose vectors are added.
    """
    units = np.rint(values / FIXED_POINT)
    limit = LARGEST // clients
    # Also false for NaN.
    if not bool((np.abs(units) < float(limit)).all()):
        raise InvalidInputError(
            f"privacy.secure_sum: a number is not below {limit * FIXED_POINT:.3g}, the limit for"
            f" {clients} clients. If training diverges, lower local.lr.",
            "privacy.secure_sum",
        )
    return units.astype(np.int64).view(np.uint64)


def decode(words: Words) -> NDArray[np.float64]:
    """The values of a sum of `encode`."""
    return words.view(np.int64).astype(np.float64) * FIXED_POINT
