"""Signatures in noise: what FLT and Clade have in common where a client's signature is to be (ε,
δ)-differentially private.

What is hidden from whom, and how well, is in docs/privacy.md; the client's part is
programs/gaussian_mechanism.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from scipy.optimize import brentq
from scipy.special import log_ndtr

from fedclade.errors import require
from fedclade.methods.base import Method, S, check_choices
from fedclade.methods.requirements import NeedsSecret
from fedclade.programs.gaussian_mechanism import SUM


@lru_cache(maxsize=64)
def gaussian_sigma(epsilon: float, delta: float) -> float:
    """The least standard deviation with which Gaussian noise makes a query of sensitivity 1 (ε,
    δ)-differentially private.

    Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy, ICML 2018 (arXiv
    1805.06530), Theorem 8: σ will do if and only if Φ(1/2σ - εσ) - e^ε Φ(-1/2σ - εσ) ≤ δ. The left
    side falls as σ grows.
    """

    def excess(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        half, shift = 0.5 / sigma, epsilon * sigma
        return (
            math.exp(log_ndtr(half - shift)) - math.exp(epsilon + log_ndtr(-half - shift)) - delta
        )

    low = high = 0.0
    while excess(low) <= 0:
        low -= 1
    while excess(high) > 0:
        high += 1
    # A hair more than the root, whose last digits are rounding.
    return math.exp(float(brentq(excess, low, high, xtol=1e-12)) + 1e-9)


@dataclass(frozen=True)
class DPSignatureMethod(NeedsSecret, Method[S]):
    """A method whose clients' one-off signatures can be hidden in noise.

    signature_epsilon, signature_delta: what a signature may tell of one example of a client;
    without signature_epsilon it is sent as it is. signature_clip: no example adds more than a
    vector of this length. secret: what clients make the noise from. It is each client's own, and no
    default is one: only where they are simulated, and nothing is hidden from anybody, it is this
    field, or 0.
    """

    signature_epsilon: float | None = field(default=None, kw_only=True)
    signature_delta: float = field(default=1e-5, kw_only=True)
    signature_clip: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        check_choices(self)
        given = self.signature_epsilon is None or 0 < self.signature_epsilon < math.inf
        require(
            given,
            "method.signature_epsilon",
            self.signature_epsilon,
            "must be a number above 0, or be left out for signatures without noise",
        )
        require(
            0 < self.signature_delta < 1,
            "method.signature_delta",
            self.signature_delta,
            "must be between 0 and 1, and well below 1 / the examples of a client",
        )
        require(
            0 < self.signature_clip < math.inf,
            "method.signature_clip",
            self.signature_clip,
            "must be a length above 0",
        )

    @property
    def noise(self) -> float:
        """The standard deviation of the noise, in units of the sensitivity; 0: none."""
        return (
            0.0
            if self.signature_epsilon is None
            else gaussian_sigma(self.signature_epsilon, self.signature_delta)
        )

    @property
    def variance(self) -> float:
        """The variance of the noise in each number of a client's sum of vectors."""
        return (SUM * self.signature_clip * self.noise) ** 2
