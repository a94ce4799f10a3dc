"""Shards are even in clients and samples."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade.engines.sharded.placement import place_clients


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    shards=st.integers(1, 8),
)
@settings(max_examples=100, deadline=None)
def test_every_client_has_one_place_in_one_even_shard(sizes: list[int], shards: int) -> None:
    placement = place_clients(torch.tensor(sizes), shards)
    ids = [placement.ids_of(shard) for shard in range(shards)]
    assert sorted(torch.cat(ids).tolist()) == list(range(len(sizes)))
    for clients in ids:
        assert placement.place[clients].tolist() == list(range(len(clients)))
    assert max(map(len, ids)) - min(map(len, ids)) <= 1
    samples = [int(torch.tensor(sizes)[clients].sum()) for clients in ids]
    assert max(samples) - min(samples) <= 2 * max(sizes)
