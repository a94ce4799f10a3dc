"""FLIS: the similarity of predictions, and clusters of similar clients.

Symbols of the FLIS paper: B_i are the predictions of client i's model on the server's inputs,
A_ij = cos(B_i, B_j), and β is the least similarity of two related clients.
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
from fedclade.core.inputs import Inputs, map_inputs, samples_in, select
from fedclade.errors import require

# How many models and samples run at a time: bounds the memory of their activations.
MODELS_PER_CHUNK, SAMPLES_PER_CHUNK = 8, 256


def predictions(
    outputs: Callable[[dict[str, Tensor], Inputs], Tensor],
    models: dict[str, Tensor],
    inputs: Inputs,
    labels: Literal["onehot", "soft"],
) -> Tensor:
    """(M, samples × classes) the predictions B_i of each model, on the models' device.

    Args:
        outputs: (parameters, inputs) -> (samples, classes), the outputs of one model.
        models: (M, …) the models.
        inputs: the server's samples.
        labels: "onehot" gives 1 for the class with the largest output (the first, if several are
            equal) and 0 for the others; "soft" gives the softmax of the outputs.
    """
    first = next(iter(models.values()))
    run = vmap(outputs, in_dims=(0, None))
    on_device = map_inputs(lambda value: value.to(first.device), inputs)
    samples = [
        select(on_device, slice(start, start + SAMPLES_PER_CHUNK))
        for start in range(0, samples_in(inputs), SAMPLES_PER_CHUNK)
    ]
    rows = []
    for start in range(0, len(first), MODELS_PER_CHUNK):
        chunk = {name: value[start : start + MODELS_PER_CHUNK] for name, value in models.items()}
        rows.append(torch.cat([_to_labels(run(chunk, x), labels) for x in samples], 1).flatten(1))
    return torch.cat(rows)


def _to_labels(outputs: Tensor, labels: Literal["onehot", "soft"]) -> Tensor:
    require(
        outputs.ndim == 3 and outputs.shape[2] >= 2,
        "model.outputs",
        tuple(outputs.shape[1:]),
        "must be (samples, classes) with two classes or more",
    )
    outputs = torch.nan_to_num(outputs)  # outputs may overflow although all weights are finite
    return (
        outputs.softmax(2)
        if labels == "soft"
        else F.one_hot(outputs.argmax(2), outputs.shape[2]).to(outputs.dtype)
    )


def similarity_graph(predictions: Tensor, beta: float) -> Tensor:
    """FLIS-DC's Ã (M, M): whether A_ij ≥ β. Each client has an edge to itself.

    For one-hot predictions A_ij is the share of inputs with equal predictions.

    Args:
        predictions: (M, samples × classes) the predictions B_i.
        beta: β.
    """
    # The cosine of equal soft predictions is 1 only up to rounding.
    return cosine(predictions) >= beta - ROUNDING


def cluster_predictions(
    predictions: Tensor, beta: float, linkage: Literal["average", "single", "complete"]
) -> Tensor:
    """FLIS-HC's clusters (M,): hierarchical clustering of the distances 1 − A, with all merges of
    height 1 − β or less.

    Args:
        predictions: (M, samples × classes) the predictions B_i.
        beta: β.
        linkage: the linkage of the tree.
    """
    tree = linkage_matrix(1 - cosine(predictions).cpu().numpy(), linkage)
    # Heights are means of rounded numbers, so the comparison needs a tolerance.
    return torch.from_numpy(cut_height(tree, 1 - beta + ROUNDING))


def cluster_centroids(predictions: Tensor, cluster: Tensor) -> Tensor:
    """(clusters, samples × classes) the mean of B_j / ‖B_j‖ over the clients j of each cluster. Its
    product with B_i / ‖B_i‖ is the mean of A_ij over these clients.

    Args:
        predictions: (M, samples × classes) the predictions B_j.
        cluster: (M,) the cluster of each client.
    """
    members = F.one_hot(cluster).T.double()
    directions = F.normalize(predictions, dim=1)
    sums = members.to(directions.device) @ directions.double()
    return (sums / members.sum(1, keepdim=True).to(sums.device)).to(directions.dtype)


def nearest_cluster(predictions: Tensor, centroids: Tensor) -> Tensor:
    """(M,) the cluster with the highest mean similarity to each client.

    Args:
        predictions: (M, samples × classes) the predictions B_i.
        centroids: (clusters, samples × classes) of `cluster_centroids`.
    """
    return (F.normalize(predictions, dim=1) @ centroids.to(predictions).T).argmax(1)
