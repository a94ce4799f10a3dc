"""Accounting of differential privacy: the ε of a run, and the noise for a given ε.

A release is a sum over a Poisson cohort with Gaussian noise. Two federations are neighbors if they
differ in one client: in one of them it contributes nothing. dp-accounting composes the releases as
Rényi differential privacy (RDP) and as privacy loss distributions (PLD). Both are upper bounds of
ε, so the smaller one counts.
"""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedclade.errors import FedcladeError, InvalidInputError

PLD_INTERVAL = 1e-3
"""The grid of privacy losses; coarser for an ε above 4. A coarser one gives a larger ε, never a
smaller one.
"""
_ORDERS = (*range(2, 65), 80, 96, 128, 192, 256, 512, 1024)  # of RDP
_MAX_NOISE = 1e5
_PRECISION = 1e-3  # of the noise multiplier that is found


@dataclass(frozen=True)
class Release:
    """A noisy sum over a cohort.

    Args:
        rate: the probability with which each client is in the cohort.
        noise_multiplier: z, the standard deviation of the noise in units of the sensitivity.
    """

    rate: float
    noise_multiplier: float


def require_dp_accounting() -> None:
    """Raise `FedcladeError` unless dp-accounting 0.6 is installed."""
    try:
        version = importlib.metadata.version("dp-accounting")
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if not version.startswith("0.6."):
        raise FedcladeError(
            f"privacy.epsilon: it needs dp-accounting 0.6; installed is {version}. Use pip install"
            " 'fedclade[privacy]'. (pip takes 0.0.2 if attrs 24 or newer must stay.)",
            "privacy.epsilon",
        )


def epsilon_of(releases: Iterable[tuple[Release, int]], delta: float) -> float:
    """The ε of these releases together.

    Args:
        releases: each kind of release, and how often it was made.
        delta: δ.
    """
    counts = tuple(sorted(((r.rate, r.noise_multiplier, n) for r, n in releases if n)))
    return min(_rdp_epsilon(counts, delta), _pld_epsilon(counts, delta)) if counts else 0.0


def find_noise_multiplier(epsilon: float, delta: float, rate: float, rounds: int) -> float:
    """The least noise multiplier, up to 0.1 %, with which `rounds` releases cost at most ε.

    Args:
        epsilon: ε.
        delta: δ.
        rate: the probability with which each client is in a cohort.
        rounds: the number of releases.
    """
    return _found(epsilon, delta, rate, rounds)


@lru_cache(maxsize=64)
def _found(epsilon: float, delta: float, rate: float, rounds: int) -> float:
    def rdp(noise: float) -> float:
        return _rdp_epsilon(((rate, noise, rounds),), delta)

    def both(noise: float) -> float:
        return epsilon_of([(Release(rate, noise), rounds)], delta)

    if rdp(_MAX_NOISE) > epsilon:
        raise InvalidInputError(
            f"privacy.epsilon = {epsilon:g}: no noise is enough for {rounds} rounds with"
            f" privacy.delta = {delta:g}. Use a larger one.",
            "privacy.epsilon",
        )
    # RDP is fast and never below the result, so the search with PLD starts there.
    high = _smallest(rdp, epsilon, 1e-2, _MAX_NOISE)
    low = high
    while low > 1e-2 and both(low) <= epsilon:
        high, low = low, low / 1.25
    return _smallest(both, epsilon, low, high)


def _smallest(of: Any, epsilon: float, low: float, high: float) -> float:
    """The least noise in [low, high] whose ε is small enough; that of `high` is."""
    while high > low * (1 + _PRECISION):
        middle = math.sqrt(low * high)
        if of(middle) <= epsilon:
            high = middle
        else:
            low = middle
    return high


def _event(counts: tuple[tuple[float, float, int], ...]) -> Any:
    import dp_accounting

    events = []
    for rate, noise, count in counts:
        gaussian = dp_accounting.GaussianDpEvent(noise)
        sampled = gaussian if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, gaussian)
        events.append(dp_accounting.SelfComposedDpEvent(sampled, count))
    return dp_accounting.ComposedDpEvent(events)


@lru_cache(maxsize=1024)
def _rdp_epsilon(counts: tuple[tuple[float, float, int], ...], delta: float) -> float:
    require_dp_accounting()
    from dp_accounting import rdp

    accountant = rdp.RdpAccountant(orders=_ORDERS).compose(_event(counts))
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=1024)
def _pld_epsilon(counts: tuple[tuple[float, float, int], ...], delta: float) -> float:
    require_dp_accounting()
    from dp_accounting import pld

    interval = PLD_INTERVAL * max(1.0, _rdp_epsilon(counts, delta) / 4)
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    return float(accountant.compose(_event(counts)).get_epsilon(delta))
