"""Shamir's secret sharing: any `threshold` shares give the secret, fewer give nothing.

The secret is the value at 0 of a random polynomial of degree threshold - 1 over the integers modulo
a prime; a share is its value at another place.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**521 - 1
SECRET_BYTES, SHARE_BYTES = 32, 66


def split(secret: bytes, threshold: int, places: Sequence[int]) -> dict[int, int]:
    """The share of each place.

    Args:
        secret: `SECRET_BYTES` bytes.
        threshold: the number of shares that give the secret.
        places: different numbers from 1 to PRIME - 1.
    """
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes, not {len(secret)}")
    if not 1 <= threshold <= len(places) or len(set(places)) != len(places) or 0 in places:
        raise ValueError("shares need different places above 0, and at least `threshold` of them")
    random = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients = [*random, int.from_bytes(secret, "big")]  # the highest power first
    shares = {}
    for place in places:
        value = 0
        for coefficient in coefficients:
            value = (value * place + coefficient) % PRIME
        shares[place] = value
    return shares


def combine(shares: Mapping[int, int], threshold: int) -> bytes:
    """The secret.

    Args:
        shares: at least `threshold` shares by their places.
        threshold: that of `split`.
    """
    if len(shares) < threshold:
        raise ValueError(f"{len(shares)} shares of {threshold} that are needed")
    used = sorted(shares)[:threshold]
    secret = 0
    for place in used:
        above = below = 1
        for other in used:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        secret = (secret + shares[place] * above * pow(below, -1, PRIME)) % PRIME
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("the shares do not belong to one secret")
    return secret.to_bytes(SECRET_BYTES, "big")
