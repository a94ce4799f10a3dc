"""Features of each client for figures: its label counts, and what the method grouped it by."""

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
MOST_CLIENTS = 3_000  # a picture of more shows no more
MOST_CLASSES = 256


@dataclass(frozen=True, eq=False)
class ClientFeatures:
    """A row for each of the clients `ids`: all, or an even sample of them."""

    ids: Tensor  # (M,)
    # (M, C) training examples by class; None: no classes, too many, or clients that are not in this
    # process
    labels: Tensor | None
    # (M, d) None: the method groups by nothing that it keeps for each client
    features: Tensor | None = None
    known: Tensor | None = None  # (M,) which rows of features are real
    what: str = ""  # what the features are, in words
    measure: str = "euclidean"  # or "cosine": how the method compares them


def label_counts(clients: Clients | None) -> Tensor | None:
    """Training examples of each simulated client by class: they stay, so a run counts them once."""
    few = clients is not None and clients.classes is not None and clients.classes <= MOST_CLASSES
    counts = clients.describe().counts if clients is not None and few else None
    return counts[_shown(len(counts))] if counts is not None else None


def _shown(number: int) -> Tensor:
    return (
        torch.arange(number)
        if number <= MOST_CLIENTS
        else torch.arange(MOST_CLIENTS) * number // MOST_CLIENTS
    )


def collect(state: State, labels: Tensor | None) -> ClientFeatures:
    """What `state` grouped the clients by, and these `label_counts`."""
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


def write(folder: Path, what: ClientFeatures) -> None:
    optional = {"labels": what.labels, "features": what.features, "known": what.known}
    tensors = {
        "ids": what.ids,
        **{name: value for name, value in optional.items() if value is not None},
    }
    write_tensors(folder / FILE, tensors, {"what": what.what, "measure": what.measure})


def read(folder: Path) -> ClientFeatures | None:
    """What a run directory has of it, or None."""
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
        )
        _check(features)
        return features
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{path}: damaged ({error}).") from error


def _check(features: ClientFeatures) -> None:
    """Check what figures rely on, and what keeps them small: a file from elsewhere may hold
    anything.
    """
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
                f"it has {tuple(value.shape)} of {value.dtype} where {axes} axes of {dtype} belong"
            )
    if rows > MOST_CLIENTS or (rows and int(features.ids.min()) < 0):
        raise ValueError(f"it has {rows} clients, at most {MOST_CLIENTS} are kept, numbered from 0")
    if features.labels is not None and (
        features.labels.shape[1] > MOST_CLASSES or bool((features.labels < 0).any())
    ):
        raise ValueError(
            f"it has counts of {features.labels.shape[1]} classes, at most {MOST_CLASSES} are kept,"
            " from 0 on"
        )
    if not isinstance(features.what, str) or not isinstance(features.measure, str):
        raise ValueError("it does not say in words what the features are")
