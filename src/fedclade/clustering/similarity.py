"""Similarity of updates and the split of CFL: cosine similarity, the optimal bipartition, the
separation gap. Similarity of predictions and the clusters of FLIS.

Symbols of the CFL paper: α_ij = cos(Δθ_i, Δθ_j); the bipartition c₁ ∪ c₂ = c minimises α_cross^max
= max over i ∈ c₁, j ∈ c₂ of α_ij. Of the FLIS paper: B_i, the predictions of client i's model on
the server's inputs; A_ij = cos(B_i, B_j); β, from where on two are alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from fedclade.aggregation.mean import mix
from fedclade.clustering.graph import square
from fedclade.clustering.linkage import ROUNDING, cut_height, cut_number
from fedclade.clustering.linkage import linkage as merge_tree
from fedclade.errors import require

# models, and samples of each, that run at once: their activations take no more, however many there
# are
MODELS, SAMPLES = (
    8,
    256,
)
SLAB = 8_000_000  # numbers held in float64 at a time beside the result: 64 MB


def cosine(updates: Tensor) -> Tensor:
    """α_ij = ⟨Δθ_i, Δθ_j⟩ / (‖Δθ_i‖ ‖Δθ_j‖) of M flat updates (M, P), in float64 on their device.

    A zero update is similar to none (0) and to itself (1). The products are summed over slabs of
    parameters, so that the stack is never copied to float64 as a whole.
    """
    require(
        updates.ndim == 2 and updates.numel() > 0,
        "updates.shape",
        tuple(updates.shape),
        "must be (M, P) with M, P ≥ 1",
    )
    # In units of its largest entry no update is too small or too large to be squared.
    scale = torch.linalg.vector_norm(updates, float("inf"), dim=1, keepdim=True).double()
    require(bool(scale.isfinite().all()), "updates", "NaN or infinity", "must be finite")
    zero = scale[:, 0] == 0
    scale = torch.where(scale == 0, 1.0, scale)
    clients, parameters = updates.shape
    products = torch.zeros(clients, clients, dtype=torch.float64, device=updates.device)
    width = max(1, SLAB // clients)
    for start in range(0, parameters, width):
        slab = updates[:, start : start + width].double() / scale
        products.addmm_(slab, slab.T)
    square_norm = torch.where(zero, 1.0, products.diagonal())
    strips = [
        slice(start, start + width) for start in range(0, clients, width)
    ]  # so that no second matrix is formed
    for strip in strips:
        # One root, not two: of whole numbers (FLIS's one-hot predictions) with equal norms it is
        # exact.
        products[strip].div_((square_norm[strip, None] * square_norm).sqrt_()).clamp_(-1, 1)
    for strip in strips:  # a matrix product need not be symmetric to the last digit
        half = (products[strip, strip.start :] + products[strip.start :, strip].T).div_(2)
        products[strip, strip.start :], products[strip.start :, strip] = half, half.T
    return products.fill_diagonal_(1)


def bipartition(
    similarity: NDArray[np.floating[Any]], linkage: Literal["single", "complete"] = "single"
) -> tuple[NDArray[np.bool_], float]:
    """CFL's split of a cluster in two: which side each client is on (the first client's is False),
    and α_cross^max between the sides.

    "single" is the paper's Algorithm 1: the bipartition with the least α_cross^max of all. Joining
    the most similar pairs until two components are left is the maximum spanning tree without its
    weakest edge; the tree takes O(M²). Of several optima, as with equal similarities, one is taken,
    always the same. "complete" (the authors' code) cuts the complete-linkage tree in two; it
    favours even sides and is not optimal.
    """
    require(
        linkage in ("single", "complete"), "linkage", linkage, "must be one of single, complete"
    )
    square(similarity, "similarity")
    require(
        len(similarity) >= 2,
        "similarity.shape",
        similarity.shape,
        "must be of at least two clients: one cannot be split",
    )
    side = _weakest_link(similarity) if linkage == "single" else _complete(similarity)
    return side, float(similarity[np.ix_(side, ~side)].max())


def _weakest_link(similarity: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    """The clients beyond the weakest edge of the maximum spanning tree (Prim's, grown from the
    first client).
    """
    clients = len(similarity)
    parent, order = np.zeros(clients, np.int64), np.zeros(clients, np.int64)
    strength = np.asarray(
        similarity[0], np.float64
    ).copy()  # of each client's best edge into the tree so far
    outside = np.ones(clients, bool)
    outside[0] = False
    for step in range(1, clients):
        new = int(np.where(outside, strength, -np.inf).argmax())
        order[step], outside[new] = new, False
        closer = outside & (similarity[new] > strength)
        strength[closer], parent[closer] = similarity[new, closer], new
    first = order[1:][strength[order[1:]].argmin()]
    beyond = np.zeros(clients, bool)
    for client in order[1:]:  # parents come before their children
        beyond[client] = client == first or beyond[parent[client]]
    return beyond


def _complete(similarity: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    return np.asarray(cut_number(merge_tree(similarity.max() - similarity, "complete"), 2) == 1)


def separation_gap(
    similarity: NDArray[np.floating[Any]], groups: NDArray[np.integer[Any]]
) -> float:
    """CFL's g(α) = α_intra^min − α_cross^max over pairs i ≠ j: above 0 the bipartition cannot tear
    a group apart.

    Without a pair across (one group) α_cross^max is −1, the least a cosine can be; without a pair
    inside (single clients only) α_intra^min is 1, the most. So nothing to confuse is never worse
    than something.
    """
    square(similarity, "similarity")
    groups = np.asarray(groups)
    require(
        groups.shape == (len(similarity),),
        "groups.shape",
        groups.shape,
        f"must be ({len(similarity)},), a group for each client",
    )
    same = groups[:, None] == groups
    inside = same & ~np.eye(len(groups), dtype=bool)
    return float(
        np.min(similarity, where=inside, initial=1.0)
        - np.max(similarity, where=~same, initial=-1.0)
    )


def predictions(
    outputs: Callable[[dict[str, Tensor], Tensor], Tensor],
    models: dict[str, Tensor],
    inputs: Tensor,
    labels: Literal["onehot", "soft"],
) -> Tensor:
    """FLIS's B: for each of a stack of models a row of samples × classes numbers, on the models'
    device.

    `outputs` runs one model on samples. "onehot": 1 for the class with the largest output (of equal
    ones the first); "soft": softmax.
    """
    first = next(iter(models.values()))
    run, samples = vmap(outputs, in_dims=(0, None)), torch.split(inputs.to(first.device), SAMPLES)
    rows = []
    for start in range(0, len(first), MODELS):
        some = {name: value[start : start + MODELS] for name, value in models.items()}
        rows.append(torch.cat([_labelled(run(some, x), labels) for x in samples], 1).flatten(1))
    return torch.cat(rows)


def _labelled(outputs: Tensor, labels: Literal["onehot", "soft"]) -> Tensor:
    ok = outputs.ndim == 3 and outputs.shape[2] >= 2
    require(
        ok,
        "model: shape of its outputs",
        tuple(outputs.shape[1:]),
        "must be (samples, classes) with two classes or more",
    )
    outputs = torch.nan_to_num(outputs)  # a model may overflow although its weights are finite
    return (
        outputs.softmax(2)
        if labels == "soft"
        else F.one_hot(outputs.argmax(2), outputs.shape[2]).to(outputs.dtype)
    )


def similarity_graph(predictions: Tensor, beta: float) -> Tensor:
    """FLIS-DC's Ã: which clients are alike, A_ij ≥ β; each with itself. For one-hot predictions
    A_ij is the share of equal ones.
    """
    return (
        cosine(predictions) >= beta - ROUNDING
    )  # soft predictions that are equal have a cosine of 1 up to rounding only


def cluster_predictions(
    predictions: Tensor, beta: float, linkage: Literal["average", "single", "complete"]
) -> Tensor:
    """FLIS-HC's clusters: the tree of 1 − A with all merges up to height 1 − β, that one
    included.
    """
    merges = merge_tree(1 - cosine(predictions).cpu().numpy(), linkage)
    return torch.from_numpy(
        cut_height(merges, 1 - beta + ROUNDING)
    )  # heights are means of rounded numbers


def cluster_centroids(predictions: Tensor, cluster: Tensor) -> Tensor:
    """The mean of B_j / ‖B_j‖ over each cluster: the product with B_i / ‖B_i‖ is the mean of A_ij
    over its clients j.
    """
    members = F.one_hot(cluster).T
    return mix(members, {"profile": F.normalize(predictions, dim=1)})["profile"]


def nearest_cluster(predictions: Tensor, profiles: Tensor) -> Tensor:
    """For each client the cluster with which its mean similarity is highest."""
    return (F.normalize(predictions, dim=1) @ profiles.to(predictions).T).argmax(1)
