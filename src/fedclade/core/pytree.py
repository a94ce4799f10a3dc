"""Trees: flat dictionaries of tensors. Parameters, carries, replies and client memory are all of
this form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from fedclade.core.packed_tree import packed, unpacked

Tree: TypeAlias = dict[str, Tensor]


def tree_map(function: Callable[..., Tensor], first: Tree, *others: Tree) -> Tree:
    """Apply `function` to the tensors of the same name."""
    return {
        name: function(value, *(tree[name] for tree in others)) for name, value in first.items()
    }


def stack(trees: Sequence[Tree]) -> Tree:
    """One tree with a new leading axis, a row for each tree."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def tree_index(tree: Tree, rows: Tensor | slice) -> Tree:
    """The given rows of every tensor, wherever they and their numbers lie."""
    if not isinstance(rows, Tensor) or not rows.ndim:
        return {name: value[rows] for name, value in tree.items()}
    whole = packed(tree)
    if whole is not None:
        return unpacked(whole.index_select(0, rows.to(whole.device)), tree)
    return {name: value.index_select(0, rows.to(value.device)) for name, value in tree.items()}


def concatenate(trees: Sequence[Tree]) -> Tree:
    """Rows of several trees after one another."""
    return (
        dict(trees[0])
        if len(trees) == 1
        else {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]}
    )


def flatten(models: Tree) -> Tensor:
    """(rows, P): every model of a stack as one vector."""
    return torch.cat([value.flatten(1) for value in models.values()], 1)


def unflatten(vectors: Tensor, like: Tree) -> Tree:
    """The inverse of `flatten`; `like` is a stack of models of the same form."""
    parts = torch.split(vectors, [value[0].numel() for value in like.values()], 1)
    return {
        name: part.reshape(-1, *like[name].shape[1:]).to(like[name].dtype)
        for name, part in zip(like, parts, strict=True)
    }


def add_prefix(prefix: str, tree: Tree) -> Tree:
    """The tree under names that begin with `prefix/`, so that two trees fit into one."""
    return {f"{prefix}/{name}": value for name, value in tree.items()}


def strip_prefix(prefix: str, tree: Tree) -> Tree:
    """What `prefixed` put in, under its own names again."""
    start = f"{prefix}/"
    return {
        name.removeprefix(start): value for name, value in tree.items() if name.startswith(start)
    }


def shapes(*trees: Tree) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """Name, shape and dtype of every value: what trees that a step can be made for once have in
    common.
    """
    return tuple((name, value.shape, value.dtype) for tree in trees for name, value in tree.items())


def nbytes(tree: Tree) -> int:
    """Bytes that the values of the tree take on a wire."""
    return sum(value.numel() * value.element_size() for value in tree.values())
