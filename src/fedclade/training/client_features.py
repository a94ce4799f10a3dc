"""What was known of each client, kept for pictures: its label counts, and what the method grouped
it by.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from fedclade.core.state import State
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
    # (M, C) training examples by class; None: no classes, too many, or clients elsewhere, who tell
    # nobody
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
    """What `state` grouped by, beside these `label_counts`."""
    ids = _shown(len(state.cluster_ids))
    told = state.features()
    if told is None:
        return ClientFeatures(ids, labels)
    return ClientFeatures(
        ids, labels, told.rows[ids].float().cpu(), told.known[ids].cpu(), told.what, told.measure
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
        about, got = read_tensors(path)
        found = ClientFeatures(
            got["ids"],
            got.get("labels"),
            got.get("features"),
            got.get("known"),
            about["what"],
            about["measure"],
        )
        _check(found)
        return found
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(f"{path}: damaged ({error}).") from error


def _check(found: ClientFeatures) -> None:
    """A file of another's making may hold anything: what pictures rely on, and what keeps them
    small.
    """
    rows = len(found.ids) if found.ids.ndim == 1 else -1
    kinds = (
        (found.ids, torch.int64, 1),
        (found.labels, torch.int64, 2),
        (found.features, torch.float32, 2),
        (found.known, torch.bool, 1),
    )
    for value, dtype, axes in kinds:
        if value is not None and (value.dtype != dtype or value.ndim != axes or len(value) != rows):
            raise ValueError(
                f"it has {tuple(value.shape)} of {value.dtype} where {axes} axes of {dtype} belong"
            )
    if rows > MOST_CLIENTS or (rows and int(found.ids.min()) < 0):
        raise ValueError(f"it has {rows} clients, at most {MOST_CLIENTS} are kept, numbered from 0")
    if found.labels is not None and (
        found.labels.shape[1] > MOST_CLASSES or bool((found.labels < 0).any())
    ):
        raise ValueError(
            f"it has counts of {found.labels.shape[1]} classes, at most {MOST_CLASSES} are kept,"
            " from 0 on"
        )
    if not isinstance(found.what, str) or not isinstance(found.measure, str):
        raise ValueError("it does not say in words what the features are")
