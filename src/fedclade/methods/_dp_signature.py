"""The base class of methods whose signatures can be (ε, δ)-differentially private: FLT and Clade.

docs/privacy.md has the guarantees. The client's part is programs/gaussian_mechanism.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

from fedclade.errors import require
from fedclade.methods.base import Method, S, check_choices
from fedclade.methods.required_context import NeedsSecret
from fedclade.programs.gaussian_mechanism import SUM


@lru_cache(maxsize=64)
def gaussian_sigma(epsilon: float, delta: float) -> float:
    """The least standard deviation of Gaussian noise that makes a query of sensitivity 1 (ε,
    δ)-differentially private.

    Balle and Wang, Improving the Gaussian Mechanism for Differential Privacy, ICML 2018 (arXiv
    1805.06530), Theorem 8: σ suffices if and only if Φ(1/2σ - εσ) - e^ε Φ(-1/2σ - εσ) ≤ δ. The left
    side falls as σ grows.
    """
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

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
    # Slightly above the root, whose last digits are rounding errors.
    return math.exp(float(brentq(excess, low, high, xtol=1e-12)) + 1e-9)


@dataclass(frozen=True)
class DPSignatureMethod(NeedsSecret, Method[S]):
    """A method whose one-off signatures can have Gaussian noise.

    Args:
        signature_epsilon: ε of the differential privacy of one example in a signature; None for
            signatures without noise.
        signature_delta: δ of the same.
        signature_clip: the largest norm of an example's contribution.
        secret: the number from which simulated clients make the noise; None for 0. On Flower each
            node has its own secret.
    """

    without_noise: ClassVar[tuple[str, ...]] = ("signature",)

    signature_epsilon: float | None = field(default=None, kw_only=True)
    signature_delta: float = field(default=1e-5, kw_only=True)
    signature_clip: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        check_choices(self)
        valid = self.signature_epsilon is None or 0 < self.signature_epsilon < math.inf
        require(
            valid,
            "method.signature_epsilon",
            self.signature_epsilon,
            "must be a number above 0; leave it out for signatures without noise",
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
            "must be a number above 0",
        )

    def signature_privacy(self) -> dict[str, Any]:
        signature = {
            "unit": "example",
            "epsilon": self.signature_epsilon,
            "delta": self.signature_delta,
        }
        return {"signature": signature} if self.noise else {}

    @property
    def noise(self) -> float:
        """The standard deviation of the noise, in units of the sensitivity; 0 for no noise."""
        return (
            0.0
            if self.signature_epsilon is None
            else gaussian_sigma(self.signature_epsilon, self.signature_delta)
        )

    @property
    def variance(self) -> float:
        """The variance of the noise in each coordinate of a client's sum of vectors."""
        return (SUM * self.signature_clip * self.noise) ** 2
