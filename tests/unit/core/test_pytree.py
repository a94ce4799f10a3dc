"""Trees: rows, prefixes and sizes, for trees that are packed and trees that are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fedclade.core.packed_tree import packed, packed_like
from fedclade.core.pytree import (
    Tree,
    add_prefix,
    concatenate,
    nbytes,
    shapes,
    stack,
    strip_prefix,
    tree_index,
    tree_map,
)


def plain_tree() -> Tree:
    return {"weight": torch.arange(12.0).reshape(3, 2, 2), "bias": torch.tensor([[5.0], [6], [7]])}


def packed_tree() -> Tree:
    """The same values, one after another in one block of memory."""
    tree = packed_like(plain_tree())
    for name, value in plain_tree().items():
        tree[name].copy_(value)
    return tree


def same(one: Tree, other: Tree) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_tree_map_pairs_tensors_by_name_in_the_order_of_the_first() -> None:
    first = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}
    second = {"b": torch.tensor([20.0]), "a": torch.tensor([10.0])}
    difference = tree_map(torch.sub, second, first)
    assert list(difference) == ["b", "a"]
    assert {name: value.item() for name, value in difference.items()} == {"b": 18.0, "a": 9.0}


def test_stack_and_index_are_inverse() -> None:
    trees = [{"a": torch.tensor([1, 2])}, {"a": torch.tensor([3, 4])}]
    stacked = stack(trees)
    assert stacked["a"].shape == (2, 2)
    for row, tree in enumerate(trees):
        assert same(tree_index(stacked, torch.tensor(row)), tree)


@pytest.mark.parametrize("make", [plain_tree, packed_tree])
@pytest.mark.parametrize(
    "rows", [torch.tensor([2, 0, 2]), torch.tensor([], dtype=torch.int64), slice(1, 3)]
)
def test_index_takes_rows_in_order_and_again(
    make: Callable[[], Tree], rows: torch.Tensor | slice
) -> None:
    tree = make()
    assert same(tree_index(tree, rows), {name: value[rows] for name, value in plain_tree().items()})


def test_rows_of_a_packed_tree_are_packed() -> None:
    assert packed(packed_tree()) is not None
    assert packed(tree_index(packed_tree(), torch.tensor([1, 2]))) is not None


def test_concatenate_appends_rows_and_copies_no_single_tree() -> None:
    tree = plain_tree()
    both = concatenate([tree, tree_index(tree, slice(0, 1))])
    assert both["bias"].flatten().tolist() == [5.0, 6.0, 7.0, 5.0]
    alone = concatenate([tree])
    assert alone is not tree
    assert alone["weight"] is tree["weight"]


def test_prefixes_keep_two_trees_apart() -> None:
    params, momentum = {"a/b": torch.tensor(1)}, {"a/b": torch.tensor(2), "c": torch.tensor(3)}
    joined = add_prefix("p", params) | add_prefix("pm", momentum)
    assert set(joined) == {"p/a/b", "pm/a/b", "pm/c"}
    assert same(strip_prefix("p", joined), params)
    assert same(strip_prefix("pm", joined), momentum)
    assert strip_prefix("m", joined) == {}


def test_shapes_differ_if_a_separate_step_is_needed() -> None:
    tree = {"a": torch.zeros(2, 3)}
    assert shapes(tree) == (("a", torch.Size([2, 3]), torch.float32),)
    assert shapes(tree) == shapes({"a": torch.ones(2, 3)})
    others = ({"b": torch.zeros(2, 3)}, {"a": torch.zeros(3, 2)}, {"a": torch.zeros(2, 3).double()})
    assert all(shapes(tree) != shapes(other) for other in others)


def test_nbytes_counts_elements_of_every_type() -> None:
    tree = {"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.uint8)}
    assert nbytes(tree) == 2 * 3 * 4 + 5
    # A view of one number is sent as many numbers.
    assert nbytes({"a": torch.zeros(1).expand(7)}) == 28
    assert nbytes({}) == 0
