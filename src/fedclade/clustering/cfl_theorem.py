"""CFL's separation theorem (Theorem 1): how noise in the clients' gradients bounds the similarities
inside a group and across the optimal bipartition.

Symbols of the paper: ∇R_l is the gradient of the true risk of group l at a stationary point, where
a positive combination of all ∇R_l is 0. ∇r_i is the gradient that client i of group I(i) measures.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedclade.errors import require

Floats = NDArray[np.float64]


def relative_noise(
    gradients: NDArray[np.floating[Any]],
    true_gradients: NDArray[np.floating[Any]],
    groups: NDArray[np.integer[Any]],
) -> Floats:
    """(M,) γ_i = ‖∇R_I(i) − ∇r_i‖ / ‖∇R_I(i)‖, the noise of a client's gradient (Eq. 16).

    Args:
        gradients: (M, d) the gradients ∇r_i of the clients.
        true_gradients: (k, d) the gradients ∇R_l of the groups, none of them 0.
        groups: (M,) the group I(i) of each client, from 0 to k − 1.
    """
    lengths = np.linalg.norm(true_gradients, axis=1)
    require(bool((lengths > 0).all()), "true_gradients", "a zero gradient", "must have none")
    noise = np.linalg.norm(true_gradients[groups] - gradients, axis=1)
    return np.asarray(noise / lengths[groups])


def similarity_of_noisy_copies(noise: Floats) -> Floats:
    """(M, M) H_ij = −γ_i γ_j + √(1 − γ_i²) √(1 − γ_j²) (Eq. 20): the least cosine of two copies of
    one vector, with the noise γ_i and the noise γ_j.

    Args:
        noise: (M,) γ_i, at least 0 and below 1.
    """
    noise = np.asarray(noise, float)
    valid = noise.ndim == 1 and bool(((noise >= 0) & (noise < 1)).all())
    require(valid, "noise", noise, "must be (M,) with 0 ≤ γ_i < 1")
    rest = np.sqrt(1 - noise**2)
    return np.asarray(np.outer(rest, rest) - np.outer(noise, noise))


def intra_bound(noise: Floats, groups: NDArray[np.integer[Any]]) -> float:
    """The lower bound of α_intra^min: the least H_ij of two clients of one group (Eq. 21 and 23). 1
    if no group has two clients.

    Args:
        noise: (M,) γ_i.
        groups: (M,) the group I(i) of each client.
    """
    inside = (groups[:, None] == groups) & ~np.eye(len(groups), dtype=bool)
    return float(np.min(similarity_of_noisy_copies(noise), where=inside, initial=1.0))


def cross_bound(noise: Floats, groups: NDArray[np.integer[Any]]) -> float:
    """The upper bound of α_cross^max, the largest similarity across the optimal bipartition (Eq.
    19). With two groups it is the largest −H_ij (Eq. 22).

    The gradients of k groups can be divided so that they are π/(k−1) apart, and the noise of i and
    j brings two of them closer by arccos H_ij. The bound is the largest over all pairs of different
    groups, because the theorem does not say which groups the optimal bipartition separates.

    Args:
        noise: (M,) γ_i.
        groups: (M,) the group I(i) of each client; at least two groups.
    """
    number = len(np.unique(groups))
    require(number >= 2, "groups", f"{number} groups", "must be at least 2")
    across = groups[:, None] != groups
    closer = float(np.arccos(similarity_of_noisy_copies(noise)[across].min()))
    return float(np.cos(max(0.0, np.pi / (number - 1) - closer)))


def gap_bound(noise: Floats, groups: NDArray[np.integer[Any]]) -> float:
    """The lower bound of the separation gap g(α). If it is above 0, the bipartition divides no
    group (Corollary 1).

    Args:
        noise: (M,) γ_i.
        groups: (M,) the group I(i) of each client; at least two groups.
    """
    return intra_bound(noise, groups) - cross_bound(noise, groups)
