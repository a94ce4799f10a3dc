"""Packed trees: one tensor under many names."""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.core.packed_tree import packed, packed_like, unpacked
from fedclade.core.pytree import tree_index

TREE = {
    "a": torch.arange(30.0).view(2, 3, 5),
    "b": torch.arange(6.0).view(2, 3),
    "c": torch.arange(8.0).view(2, 2, 2),
}


def filled() -> dict[str, Tensor]:
    room = packed_like(TREE)
    for name, value in TREE.items():
        room[name].copy_(value)
    return room


def test_a_packed_tree_is_one_tensor_with_the_same_values() -> None:
    tree = filled()
    whole = packed(tree)
    # 15, 3 and 4 numbers, each begun at a multiple of four.
    assert whole is not None
    assert whole.shape == (2, 16 + 4 + 4)
    assert float(whole.sum()) == sum(float(value.sum()) for value in TREE.values())
    for name, value in unpacked(whole, TREE).items():
        assert torch.equal(value, TREE[name])
        assert value.data_ptr() == tree[name].data_ptr()


def test_only_adjacent_values_in_order_are_packed() -> None:
    tree = filled()
    assert packed(TREE) is None
    assert packed({}) is None
    assert packed({"a": tree["a"]}) is None
    assert packed({"b": tree["b"], "a": tree["a"], "c": tree["c"]}) is None
    assert packed({"a": tree["a"], "c": tree["c"]}) is None
    assert packed({**tree, "c": tree["c"].clone()}) is None
    assert packed({**tree, "c": tree["c"].mT}) is None
    assert packed({**tree, "c": tree["c"].double()}) is None


def test_rows_of_a_packed_tree_are_packed() -> None:
    for rows in (torch.tensor([1, 0, 1]), slice(1, 2)):
        got = tree_index(filled(), rows)
        assert packed(got) is not None
        for name, value in TREE.items():
            assert torch.equal(got[name], value[rows])


def test_trees_of_several_kinds_are_not_packed() -> None:
    room = packed_like({"a": TREE["a"], "n": torch.arange(2)})
    assert packed(room) is None
    assert {name: value.shape for name, value in room.items()} == {"a": (2, 3, 5), "n": (2,)}
