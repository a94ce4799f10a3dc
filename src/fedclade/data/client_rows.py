"""Clients from rows of which each has a client, and the split of each client's rows into a training
and a test part.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade.core.inputs import Inputs
from fedclade.core.names import Names
from fedclade.core.rng import fold_in
from fedclade.data.federated_dataset import Clients, RaggedIndex
from fedclade.data.validation_split import stable_order, validation_positions
from fedclade.errors import FedcladeWarning, InvalidInputError, is_number, require, require_int

Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


class Rows(NamedTuple):
    """Samples and the number of the client of each."""

    x: Inputs
    y: Tensor
    client: Tensor


def check_test_share(share: object, seed: object) -> None:
    """Raise `InvalidInputError` unless `share` is a share of rows, 0 for no test part."""
    require(
        is_number(share) and 0 <= share < 1,  # type: ignore[operator]
        "test",
        share,
        "must be a share of each client's rows, at least 0 and below 1, such as 0.2",
    )
    require_int("seed", seed, 0)


def rows_by_client(client: Ints, clients: int, chosen: Bools | None = None) -> list[Ints]:
    """The rows of each client, in their order.

    Args:
        client: (rows,) the client of each row.
        clients: the number of clients.
        chosen: (rows,) which rows are meant; None for all.
    """
    rows = np.arange(len(client)) if chosen is None else chosen.nonzero()[0]
    ids = client[rows]
    sizes = np.bincount(ids, minlength=clients)
    return np.split(rows[stable_order(ids)], np.cumsum(sizes)[:-1])


def is_held_out(
    client: Ints, labels: Ints | None, share: float, seed: int, chosen: Bools | None = None
) -> Bools:
    """Which rows are held out. Every class of a client has about the same share, and the rows of a
    client depend on its own rows only.

    Args:
        client: (rows,) the client of each row.
        labels: (rows,) the class of each row; None where there are no classes.
        share: the share of each client's rows. A client with fewer than 1 / share has none.
        seed: the seed of the split.
        chosen: (rows,) the rows of which some are held out; None for all.
    """
    held_out = np.zeros(len(client), bool)
    for rows in rows_by_client(client, int(client.max()) + 1, chosen):
        classes = np.zeros_like(rows) if labels is None else labels[rows]
        positions = validation_positions(torch.from_numpy(classes), share, seed)
        held_out[rows[positions.numpy()]] = True
    return held_out


def is_test_row(client: Tensor, labels: Tensor | None, share: float, seed: int) -> Tensor:
    """Whether each row is a test row: `is_held_out` for tensors.

    Args:
        client: (rows,) the client of each row.
        labels: (rows,) the class of each row; None where there are no classes.
        share: the share of each client's rows.
        seed: the seed of the data.
    """
    classes = None if labels is None else labels.numpy()
    return torch.from_numpy(is_held_out(client.numpy(), classes, share, test_seed(seed)))


def test_seed(seed: int) -> int:
    """The seed of the split into training and test rows.

    Args:
        seed: the seed of the data.
    """
    return fold_in(seed, "test")


def clients_of_rows(
    train: Rows, test: Rows, names: Names, classes: int | None, dataset: str
) -> Clients:
    """The clients of these rows. A client without test rows is not evaluated on test data; a
    warning counts such clients if others have some.

    Args:
        train: the training rows.
        test: the test rows; there may be none.
        names: the names of all clients, and of classes and features.
        classes: the number of classes; None if the targets are not class labels.
        dataset: the name of the data in results.
    """
    assert names.clients is not None
    number = len(names.clients)
    train_rows = rows_by_client(train.client.numpy(), number)
    for name, rows in zip(names.clients, train_rows, strict=True):
        if len(rows) == 0:
            raise InvalidInputError(
                f"client {name}: it has no training samples. Give it some, or leave it out.",
                f"client {name}",
            )
    test_rows = rows_by_client(test.client.numpy(), number)
    has_test = torch.tensor([len(rows) > 0 for rows in test_rows])
    without_test = number - int(has_test.sum())
    if 0 < without_test < number:
        have = "client has" if without_test == 1 else "clients have"
        message = f"{dataset}: {without_test:,} {have} no test part, and will not be evaluated."
        warnings.warn(FedcladeWarning(message, "test"), stacklevel=4)
    return Clients(
        train.x,
        train.y,
        RaggedIndex.of(map(torch.from_numpy, train_rows)),
        test.x,
        test.y,
        RaggedIndex.of(torch.from_numpy(rows) for rows in test_rows if len(rows)),
        test_part_id=torch.where(has_test, has_test.cumsum(0) - 1, -1),
        test_sample_id=torch.arange(len(test.y)),
        classes=classes,
        dataset=dataset,
        partition="clients",
        names=names,
    )
