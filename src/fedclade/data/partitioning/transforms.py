"""Transformations that distinguish groups of clients with the same samples: other labels or rotated
images.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedclade.core.inputs import Inputs, one_tensor
from fedclade.data.partitioning.base import Index, Transform


def relabel(tables: Index) -> Transform:
    """A transform in which label y of group g becomes `tables[g, y]`."""
    lookup = torch.from_numpy(tables)

    def transform(x: Inputs, y: Tensor, group: int) -> tuple[Inputs, Tensor]:
        return x, lookup[group][y]

    return transform


def rotate(clusters: int) -> Transform:
    """A transform that rotates the images of group g by g * 360 / clusters degrees,
    counterclockwise.
    """
    from scipy import ndimage

    def transform(x: Inputs, y: Tensor, group: int) -> tuple[Inputs, Tensor]:
        x = one_tensor(x, "a rotation", "partition.name")
        if 4 * group % clusters == 0:
            return torch.rot90(x, 4 * group // clusters, (-2, -1)), y
        rotated = ndimage.rotate(
            x.numpy().astype(np.float32),
            group * 360 / clusters,
            axes=(-1, -2),
            reshape=False,
            order=1,
        )
        images = torch.from_numpy(rotated)
        return images.round().to(x.dtype) if x.dtype == torch.uint8 else images, y

    return transform


def distinct_swaps(
    labels: Index, clusters: int, swaps: int, classes: int, rng: np.random.Generator
) -> Index:
    """A table (clusters, classes) for `relabel` in which each cluster swaps other pairs of labels.

    Args:
        labels: the classes that occur.
        clusters: the number of clusters.
        swaps: the number of pairs of a cluster; pairs are disjoint if there are enough classes.
        classes: the number of classes.
        rng: the source of all random numbers.
    """
    chosen: dict[frozenset[frozenset[int]], None] = {}  # an ordered set
    while len(chosen) < clusters:
        order = rng.permutation(labels).tolist()
        for start in range(0, len(order) - 2 * swaps + 1, 2 * swaps):
            chosen[
                frozenset(frozenset(order[i : i + 2]) for i in range(start, start + 2 * swaps, 2))
            ] = None
    tables = np.tile(np.arange(classes), (clusters, 1))
    for table, pairs in zip(tables, chosen, strict=False):
        for a, b in pairs:
            table[a], table[b] = b, a
    return tables


def distinct_permutations(
    labels: Index, clusters: int, classes: int, rng: np.random.Generator
) -> Index:
    """A table (clusters, classes) for `relabel` in which each cluster has another permutation of
    `labels`. The arguments are those of `distinct_swaps`.
    """
    chosen: dict[tuple[int, ...], None] = {}  # an ordered set
    while len(chosen) < clusters:
        chosen[tuple(rng.permutation(labels).tolist())] = None
    tables = np.tile(np.arange(classes), (clusters, 1))
    tables[:, labels] = list(chosen)
    return tables
