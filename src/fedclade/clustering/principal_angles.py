"""PACFL's distance of two clients: angles between the subspaces of their data, in degrees."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclade.clustering.graph import canonical_labels
from fedclade.clustering.linkage import cut_height, cut_number, linkage
from fedclade.errors import require

Bases = NDArray[np.float64]
Angle: TypeAlias = Literal["smallest", "sum"]
Linkage: TypeAlias = Literal["average", "single", "complete"]
Labels = NDArray[np.int64]


def angles_between(left: Bases, right: Bases, angle: Angle) -> NDArray[np.float64]:
    """The angle of each client of `left` and each of `right`, in degrees.

    "smallest" is the smallest principal angle, arccos of the largest singular value of U_i^T U_j.
    It depends on the subspaces alone. "sum" is Σ_q arccos |u_iq · u_jq|, the angles between the
    vectors of equal rank. A singular vector has no sign, so the absolute value is part of it.

    Args:
        left: (M, p, d) orthonormal vectors in rows; rows of zeros are at 90 degrees to all others.
        right: (N, p, d) the same.
        angle: which of them.
    """
    require(
        left.ndim == 3 and left.shape[1:] == right.shape[1:],
        "bases",
        (left.shape, right.shape),
        "must be (M, p, d) and (N, p, d)",
    )
    result = np.empty((len(left), len(right)))
    for row, basis in enumerate(left):  # one client at a time: (N, p, p) products
        products = np.einsum("pd,nqd->npq", basis, right)
        if angle == "smallest":
            cosines = np.linalg.svd(products, compute_uv=False)[:, :1]
        else:
            cosines = np.abs(np.diagonal(products, axis1=1, axis2=2))
        result[row] = np.degrees(np.arccos(np.clip(cosines, 0, 1))).sum(1)
    return result


def group_by_angles(
    angles: NDArray[np.float64], method: Linkage, threshold: float, clusters: int | None
) -> Labels:
    """The group of each client: its tree, cut below `threshold` or into `clusters` groups.

    Args:
        angles: (M, M) the angles.
        method: the linkage.
        threshold: β, in degrees.
        clusters: the number of groups; None to use the threshold.
    """
    symmetric = (angles + angles.T) / 2  # equal but for rounding
    np.fill_diagonal(symmetric, 0)
    tree = linkage(symmetric, method)
    if clusters is not None:
        return cut_number(tree, min(clusters, len(angles)))
    return cut_height(tree, threshold)


def place_new(
    to_known: NDArray[np.float64],
    among_new: NDArray[np.float64],
    groups: Labels,
    method: Linkage,
    threshold: float,
) -> tuple[Labels, Labels]:
    """The groups of new clients. Known clients keep theirs.

    A new client joins the group at the smallest linkage distance, if that is below the threshold.
    The others are grouped among themselves, in new groups.

    Args:
        to_known: (new, known) the angles to the known clients.
        among_new: (new, new) the angles between the new clients.
        groups: (known,) the groups 0 … K−1 of the known clients.
        method: the linkage.
        threshold: β; infinity for no new groups.

    Returns:
        The group of each new client, and for each new group K, K + 1, … the known group that is
        nearest to its first client.
    """
    known = np.unique(groups)
    distance = np.stack([_to_group(to_known[:, groups == group], method) for group in known], 1)
    nearest = known[distance.argmin(1)]
    result = nearest.copy()
    far = np.flatnonzero(distance.min(1) >= threshold)
    if not len(far):
        return result, np.empty(0, np.int64)
    own = canonical_labels(group_by_angles(among_new[np.ix_(far, far)], method, threshold, None))
    result[far] = int(groups.max()) + 1 + own
    first = [int(np.argmax(own == group)) for group in range(int(own.max()) + 1)]
    return result, nearest[far[first]]


def _to_group(angles: NDArray[np.float64], method: Linkage) -> NDArray[np.float64]:
    """The linkage distance of each row to one group, whose members are the columns."""
    if method == "average":
        return np.asarray(angles.mean(1))
    return np.asarray(angles.min(1) if method == "single" else angles.max(1))
