"""The bounds of FLT's Appendix D: the clustering error (D.1) and the rate of convergence (D.2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from fedclade.errors import require

Counts = NDArray[np.integer[Any]]
Matrix = NDArray[np.floating[Any]]


def label_error(encoder_error: float, counts: Counts) -> NDArray[np.float64]:
    """The probability P_e^l that the mean code of n samples of a label is on the wrong side of the
    threshold (Eq. 3, 4): Q(√n Q⁻¹(P_e^ae)).

    The paper prints n instead of √n. The mean of n codes has the standard deviation σ / √n.

    Args:
        encoder_error: P_e^ae, the probability that a single code is on the wrong side, at most 1/2.
        counts: n_m^l, the numbers of samples, in any shape.
    """
    return np.asarray(norm.sf(_scores(encoder_error, counts)))


def label_error_bound(encoder_error: float, counts: Counts) -> NDArray[np.float64]:
    """Chernoff's bound of `label_error` (Eq. 5, with n instead of n²): exp(−n Q⁻¹(P_e^ae)² / 2).

    Args:
        encoder_error: P_e^ae.
        counts: n_m^l.
    """
    return np.asarray(np.exp(-(_scores(encoder_error, counts) ** 2) / 2))


def clustering_error(encoder_error: float, counts: Counts) -> float:
    """The probability that any label of any client is on the wrong side (Eq. 6):
    1 − Π_m Π_l (1 − P_e^l). Labels that a client does not have are left out.

    Args:
        encoder_error: P_e^ae.
        counts: (M, L) n_m^l, the number of samples of each client and label.
    """
    errors = label_error(encoder_error, counts[counts > 0])
    return float(-np.expm1(np.log1p(-errors).sum()))


def clustering_error_bound(encoder_error: float, counts: Counts) -> float:
    """The bound of `clustering_error` (Eq. 8, with n instead of n²): Σ_m Σ_l
    exp(−n_m^l Q⁻¹(P_e^ae)² / 2). It may exceed 1.

    Args:
        encoder_error: P_e^ae.
        counts: (M, L) n_m^l.
    """
    return float(label_error_bound(encoder_error, counts[counts > 0]).sum())


def _scores(encoder_error: float, counts: Counts) -> NDArray[np.float64]:
    """√n Q⁻¹(P_e^ae)."""
    require(
        0 < encoder_error <= 0.5,
        "encoder_error",
        encoder_error,
        "must be above 0 and at most 0.5: above it, more samples make the error larger",
    )
    require(bool((counts > 0).all()), "counts", int(np.min(counts)), "must be 1 or more")
    return np.asarray(np.sqrt(counts) * norm.isf(encoder_error))


def mixing_norm(A: Matrix) -> float:
    """‖I − A‖, the largest singular value: 0 if all clients train alone, 1 if groups of equal
    clients average their models.

    Args:
        A: (M, M) the mixing matrix with rows that sum to 1 (Eq. 13).
    """
    require(A.ndim == 2 and A.shape[0] == A.shape[1], "A.shape", A.shape, "must be (M, M)")
    sums = A.sum(1)
    require(bool(np.allclose(sums, 1)), "A", float(sums.min()), "each row must sum to 1")
    return float(np.linalg.norm(np.eye(len(A)) - A, 2))


def rate_constant(A: Matrix, mu: float, smoothness: float) -> float:
    """The denominator of Theorem 1 (Eq. 18), 1 / 2μ − L / 2 − μ L² ‖I − A‖² / 2. The theorem says
    something only if it is above 0.

    Args:
        A: (M, M) the mixing matrix.
        mu: μ, the step size.
        smoothness: L_W, the Lipschitz constant of the gradient.
    """
    require(mu > 0, "mu", mu, "must be above 0")
    require(smoothness > 0, "smoothness", smoothness, "must be above 0")
    return 1 / (2 * mu) - smoothness / 2 - mu / 2 * smoothness**2 * mixing_norm(A) ** 2


def largest_step(A: Matrix, smoothness: float) -> float:
    """The step size below which `rate_constant` is above 0: 1 / L if clients train alone,
    0.618 / L for groups.

    Args:
        A: (M, M) the mixing matrix.
        smoothness: L_W.
    """
    require(smoothness > 0, "smoothness", smoothness, "must be above 0")
    square = mixing_norm(A) ** 2
    # The positive root of 1 − x − s x² in x = μ L, in a form without division by s.
    return float(2 / (1 + np.sqrt(1 + 4 * square))) / smoothness


def gap_bound(A: Matrix, mu: float, smoothness: float, decrease: float, rounds: int) -> float:
    """Theorem 1 (Eq. 18): the bound of the mean optimality gap, 1 / (T M) Σ_t ‖W^t − W^(t−1)‖²
    ≤ (F(W^0) − F(W^T)) / (T M c), where c is `rate_constant`.

    It holds for W^t = A (W^(t−1) − μ ∇F(W^(t−1))) if A averages inside disjoint groups of equal
    clients, which start with one model: then A is an orthogonal projection, and ∇F − A∇F is
    orthogonal to the step. For other matrices the proof fails (Eq. 21 needs A W = W, and Eq. 25
    bounds a gradient by a step), and so may the bound.

    Args:
        A: (M, M) the mixing matrix.
        mu: μ, the step size.
        smoothness: L_W.
        decrease: F(W^0) − F(W^T), the decrease of the sum of all clients' losses.
        rounds: T.
    """
    constant = rate_constant(A, mu, smoothness)
    allowed = f"must be below {largest_step(A, smoothness):.4g}, or the theorem says nothing"
    require(constant > 0, "mu", mu, allowed)
    require(rounds >= 1, "rounds", rounds, "must be 1 or more")
    return decrease / (rounds * len(A) * constant)
