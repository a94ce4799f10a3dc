"""Features of each client for figures: its label counts, and the features by which the method
groups the clients.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from fedclade.core.method_state import State
from fedclade.data.federated_dataset import Clients
from fedclade.errors import InvalidInputError
from fedclade.io.checkpoint import read_tensors, write_tensors

FILE = "client_features.safetensors"
MOST_CLIENTS = 3_000  # more clients would not be visible in a figure
MOST_CLASSES = 256


@dataclass(frozen=True, eq=False)
class ClientFeatures:
    """A row for each of the clients `ids`: all clients, or an even sample of them."""

    ids: Tensor  # (M,)
    # (M, C) training examples by class; None if there are no classes or too many, or if the clients
    # are not in this process
    labels: Tensor | None
    # (M, d) None if the method keeps no features of the clients
    features: Tensor | None = None
    known: Tensor | None = None  # (M,) whether the row of features is valid
    what: str = ""  # the description of the features
    measure: str = "euclidean"  # or "cosine": how the method compares them
    # (models,) the distinct test samples of each model's clients; None for a run that is not
    # finished, or if the clients are not in this process
    test_samples: Tensor | None = None


def label_counts(clients: Clients | None) -> Tensor | None:
    """The training examples of each simulated client by class. They never change: a run counts
    them once.
    """
    few = clients is not None and clients.classes is not None and clients.classes <= MOST_CLASSES
    counts = clients.describe().counts if clients is not None and few else None
    return counts[_shown(len(counts))] if counts is not None else None


def _shown(number: int) -> Tensor:
    return (
        torch.arange(number)
        if number <= MOST_CLIENTS
        else torch.arange(MOST_CLIENTS) * number // MOST_CLIENTS
    )


def test_samples(clients: Clients | None, model_ids: Tensor) -> Tensor | None:
    """The distinct test samples of each model's clients: many of them may be tested on the same.

    Args:
        clients: the simulated clients; None if they are not in this process.
        model_ids: (clients,) the model of each client; -1 for none.
    """
    if clients is None:
        return None
    parts: list[set[int]] = [set() for _ in range(int(model_ids.max()) + 1)]
    for model, part in zip(model_ids.tolist(), clients.test_part_id.tolist(), strict=True):
        if model >= 0:
            parts[model].add(part)
    counts = {key: clients.distinct_test_samples(key) for key in set(map(frozenset, parts))}
    return torch.tensor([counts[frozenset(of_model)] for of_model in parts], dtype=torch.int64)


def collect(state: State, labels: Tensor | None) -> ClientFeatures:
    """The features in a method's state, with the `label_counts` of the clients."""
    ids = _shown(len(state.cluster_ids))
    features = state.features()
    if features is None:
        return ClientFeatures(ids, labels)
    return ClientFeatures(
        ids,
        labels,
        features.rows[ids].float().cpu(),
        features.known[ids].cpu(),
        features.what,
        features.measure,
    )


def write(folder: Path, features: ClientFeatures) -> None:
    """Write the features to a run directory."""
    optional = {
        "labels": features.labels,
        "features": features.features,
        "known": features.known,
        "test_samples": features.test_samples,
    }
    tensors = {
        "ids": features.ids,
        **{name: value for name, value in optional.items() if value is not None},
    }
    write_tensors(folder / FILE, tensors, {"what": features.what, "measure": features.measure})


def read(folder: Path) -> ClientFeatures | None:
    """The features in a run directory; None if it has none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        metadata, tensors = read_tensors(path)
        features = ClientFeatures(
            tensors["ids"],
            tensors.get("labels"),
            tensors.get("features"),
            tensors.get("known"),
            metadata["what"],
            metadata["measure"],
            tensors.get("test_samples"),
        )
        _check(features)
        return features
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{path}: damaged ({error}).", str(path)) from error


def _check(features: ClientFeatures) -> None:
    """Check what figures rely on, and their size: the file may come from any source."""
    rows = len(features.ids) if features.ids.ndim == 1 else -1
    kinds = (
        (features.ids, torch.int64, 1),
        (features.labels, torch.int64, 2),
        (features.features, torch.float32, 2),
        (features.known, torch.bool, 1),
    )
    for value, dtype, axes in kinds:
        if value is not None and (value.dtype != dtype or value.ndim != axes or len(value) != rows):
            raise ValueError(
                f"it has shape {tuple(value.shape)} and type {value.dtype} instead of {axes} axes"
                f" and type {dtype}"
            )
    if rows > MOST_CLIENTS or (rows and int(features.ids.min()) < 0):
        raise ValueError(
            f"it has {rows} clients; there must be at most {MOST_CLIENTS}, numbered from 0"
        )
    if (counts := features.test_samples) is not None and (
        counts.dtype != torch.int64 or counts.ndim != 1 or bool((counts < 0).any())
    ):
        raise ValueError("its numbers of test samples are not whole numbers from 0, one per model")
    if features.labels is not None and (
        features.labels.shape[1] > MOST_CLASSES or bool((features.labels < 0).any())
    ):
        raise ValueError(
            f"it has counts of {features.labels.shape[1]} classes; there must be at most"
            f" {MOST_CLASSES}, and no negative count"
        )
    if not isinstance(features.what, str) or not isinstance(features.measure, str):
        raise ValueError("its description of the features is not text")
