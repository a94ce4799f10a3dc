"""Similarity of predictions and the clusters of FLIS.

Symbols of the FLIS paper: B_i are the predictions of client i's model on the server's inputs,
A_ij = cos(B_i, B_j), and β is the least similarity of two clients of one cluster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from fedclade.clustering.cosine import cosine
from fedclade.clustering.linkage import ROUNDING, cut_height
from fedclade.clustering.linkage import linkage as linkage_matrix
from fedclade.errors import require

# Models, and samples of each, that run at once: bounds the memory of their activations.
MODELS_PER_CHUNK, SAMPLES_PER_CHUNK = 8, 256


def predictions(
    outputs: Callable[[dict[str, Tensor], Tensor], Tensor],
    models: dict[str, Tensor],
    inputs: Tensor,
    labels: Literal["onehot", "soft"],
) -> Tensor:
    """FLIS's B: for each of a stack of models a row of samples × classes numbers, on the models'
    device.

    `outputs` runs one model on samples. "onehot": 1 for the class with the largest output (the
    first, if several are equal); "soft": softmax.
    """
    first = next(iter(models.values()))
    run = vmap(outputs, in_dims=(0, None))
    samples = torch.split(inputs.to(first.device), SAMPLES_PER_CHUNK)
    rows = []
    for start in range(0, len(first), MODELS_PER_CHUNK):
        chunk = {name: value[start : start + MODELS_PER_CHUNK] for name, value in models.items()}
        rows.append(torch.cat([_labelled(run(chunk, x), labels) for x in samples], 1).flatten(1))
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
    """FLIS-DC's Ã: which pairs of clients have A_ij ≥ β; each client has an edge to itself. For
    one-hot predictions A_ij is the share of inputs with equal predictions.
    """
    # Equal soft predictions have a cosine of 1 only up to rounding.
    return cosine(predictions) >= beta - ROUNDING


def cluster_predictions(
    predictions: Tensor, beta: float, linkage: Literal["average", "single", "complete"]
) -> Tensor:
    """FLIS-HC's clusters: hierarchical clustering of 1 − A with all merges up to height 1 − β,
    that height included.
    """
    tree = linkage_matrix(1 - cosine(predictions).cpu().numpy(), linkage)
    # Heights are means of rounded numbers.
    return torch.from_numpy(cut_height(tree, 1 - beta + ROUNDING))


def cluster_centroids(predictions: Tensor, cluster: Tensor) -> Tensor:
    """The mean of B_j / ‖B_j‖ over each cluster: its product with B_i / ‖B_i‖ is the mean of A_ij
    over the cluster's clients j.
    """
    members = F.one_hot(cluster).T.double()
    directions = F.normalize(predictions, dim=1)
    sums = members.to(directions.device) @ directions.double()
    return (sums / members.sum(1, keepdim=True).to(sums.device)).to(directions.dtype)


def nearest_cluster(predictions: Tensor, centroids: Tensor) -> Tensor:
    """For each client the cluster with the highest mean similarity to it."""
    return (F.normalize(predictions, dim=1) @ centroids.to(predictions).T).argmax(1)
