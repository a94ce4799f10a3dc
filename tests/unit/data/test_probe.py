"""Probe data of clients that no partition made."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedclade as fc
from fedclade.errors import InvalidInputError


def three_clients() -> fc.data.Clients:
    """Every input is different; the clients have 20, 10 and 4 training samples."""
    start, parts = 0, []
    for size in (20, 10, 4):
        x = np.arange(start, start + size, dtype="float32")[:, None]
        parts.append((x, np.arange(size) % 2, x[:2] + 1000, np.array([0, 1])))
        start += size
    return fc.data.from_arrays(parts)


def test_a_share_of_each_client_is_in_no_part_by_hand() -> None:
    clients = three_clients()
    some = clients.with_probe(0.2)
    assert some.sizes.tolist() == [16, 8, 4]  # a fifth of 4 is less than one
    assert some.test_sizes.tolist() == [2, 2, 2]
    assert isinstance(some.probe, torch.Tensor)
    assert isinstance(clients.x, torch.Tensor)
    assert len(some.probe) == 6
    kept = clients.x[some.train.index].flatten().tolist()
    apart = some.probe.flatten().tolist()
    assert sorted(kept + apart) == list(range(34))
    assert [sum(low <= value < high for value in apart) for low, high in ((0, 20), (20, 30))] == [
        4,
        2,
    ]
    for client, numbers in enumerate(([8, 8], [4, 4], [2, 2])):
        assert some.y[some.train[client]].bincount().tolist() == numbers
    assert "6 probe samples" in some.sizes_in_words


def test_the_seed_decides_and_validation_data_stay() -> None:
    clients = three_clients().with_validation(0.25)
    one, same, other = (clients.with_probe(0.25, seed) for seed in (1, 1, 2))
    assert torch.equal(one.probe, same.probe)  # type: ignore[arg-type]
    assert not torch.equal(one.probe, other.probe)  # type: ignore[arg-type]
    assert one.validation_sizes.tolist() == clients.validation_sizes.tolist()  # type: ignore[union-attr]
    assert set(one.train.index.tolist()).isdisjoint(one.validation.index.tolist())  # type: ignore[union-attr]


@pytest.mark.parametrize("share", [0, 1, -0.5, "0.1", 0.04, None])
def test_a_wrong_share_is_named(share: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        three_clients().with_probe(share)  # type: ignore[arg-type]
    assert caught.value.field == "data.probe"
    with pytest.raises(InvalidInputError) as caught:
        three_clients().with_probe(0.5).with_probe(0.5)
    assert caught.value.field == "data.probe"
