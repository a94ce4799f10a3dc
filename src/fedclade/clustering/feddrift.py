"""FedDrift's rule for groups that have become one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering.linkage import cut_height, linkage
from fedclade.errors import require


def merge_groups(losses: NDArray[np.float64], threshold: float) -> NDArray[np.int64]:
    """Which groups to merge: those whose models are about as good for the other's clients as for
    their own.

    The distance of groups i and j is max(L_ij - L_ii, L_ji - L_jj), at least 0. Groups are merged
    by complete linkage while the distance is below the threshold, so each pair of a merged group
    is that close.

    Args:
        losses: (K, K) L_ij, the loss of group i's model on the data of group j's clients.
        threshold: δ, how far a loss may exceed the own one.

    Returns:
        (K,) the new group of each group, numbered by first appearance.
    """
    require(
        losses.ndim == 2 and losses.shape[0] == losses.shape[1] and len(losses) > 0,
        "losses.shape",
        losses.shape,
        "must be (K, K) with K ≥ 1",
    )
    require(bool(np.isfinite(losses).all()), "losses", "NaN or infinity", "must be finite")
    require(threshold > 0, "threshold", threshold, "must be above 0")
    excess = np.maximum(losses - np.diag(losses)[:, None], 0)
    return cut_height(linkage(np.maximum(excess, excess.T), "complete"), threshold)
