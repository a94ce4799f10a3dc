"""Clients from rows of which each has a client, and the split of each client's rows into a training
and a test part.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedclade.core.inputs import Inputs
from fedclade.core.names import Names
from fedclade.core.rng import fold_in
from fedclade.data.federated_dataset import Clients, RaggedIndex
from fedclade.data.validation_split import validation_positions
from fedclade.errors import InvalidInputError, is_number, require, require_int


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


def is_test_row(client: Tensor, labels: Tensor | None, share: float, seed: int) -> Tensor:
    """Whether each row is a test row. Every class of a client has about the same share, and a
    client's test rows depend on its own rows only.

    Args:
        client: (rows,) the client of each row.
        labels: (rows,) the class of each row; None where there are no classes.
        share: the share of each client's rows. A client with fewer than 1 / share has none.
        seed: the seed of the split.
    """
    held_out = torch.zeros(len(client), dtype=torch.bool)
    for rows in _rows_of_clients(client, int(client.max()) + 1):
        classes = torch.zeros_like(rows) if labels is None else labels[rows]
        held_out[rows[validation_positions(classes, share, fold_in(seed, "test"))]] = True
    return held_out


def clients_of_rows(
    train: Rows, test: Rows, names: Names, classes: int | None, dataset: str
) -> Clients:
    """The clients of these rows. A client without test rows is not evaluated on test data.

    Args:
        train: the training rows.
        test: the test rows; there may be none.
        names: the names of all clients, and of classes and features.
        classes: the number of classes; None if the targets are not class labels.
        dataset: the name of the data in results.
    """
    assert names.clients is not None
    number = len(names.clients)
    train_rows = _rows_of_clients(train.client, number)
    for name, rows in zip(names.clients, train_rows, strict=True):
        if len(rows) == 0:
            raise InvalidInputError(
                f"client {name}: it has no training samples. Give it some, or leave it out.",
                f"client {name}",
            )
    test_rows = _rows_of_clients(test.client, number)
    has_test = torch.tensor([len(rows) > 0 for rows in test_rows])
    return Clients(
        train.x,
        train.y,
        RaggedIndex.of(train_rows),
        test.x,
        test.y,
        RaggedIndex.of([rows for rows in test_rows if len(rows)]),
        test_part_id=torch.where(has_test, has_test.cumsum(0) - 1, -1),
        test_sample_id=torch.arange(len(test.y)),
        classes=classes,
        dataset=dataset,
        partition="clients",
        names=names,
    )


def _rows_of_clients(client: Tensor, number: int) -> list[Tensor]:
    """The rows of each client, in their order."""
    order = client.argsort(stable=True)
    return list(torch.split(order, client.bincount(minlength=number).tolist()))
