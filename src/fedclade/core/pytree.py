"""Trees: flat dictionaries of tensors, such as parameters, carries, replies and client state."""

from __future__ import annotations

import math
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
    """The trees stacked along a new leading axis."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def tree_index(tree: Tree, rows: Tensor | slice) -> Tree:
    """These rows of every tensor. `rows` may be on another device."""
    if not isinstance(rows, Tensor) or not rows.ndim:
        return {name: value[rows] for name, value in tree.items()}
    whole = packed(tree)
    if whole is not None:
        return unpacked(whole.index_select(0, rows.to(whole.device)), tree)
    return {name: value.index_select(0, rows.to(value.device)) for name, value in tree.items()}


def concatenate(trees: Sequence[Tree]) -> Tree:
    """The rows of several trees, concatenated."""
    return (
        dict(trees[0])
        if len(trees) == 1
        else {name: torch.cat([tree[name] for tree in trees]) for name in trees[0]}
    )


def flatten(models: Tree) -> Tensor:
    """(models, P): each model of a stack as one vector."""
    rows = [value.reshape(len(value), math.prod(value.shape[1:])) for value in models.values()]
    return torch.cat(rows, 1)


def unflatten(vectors: Tensor, like: Tree) -> Tree:
    """The inverse of `flatten`; `like` is a stack of models of the same form."""
    parts = torch.split(vectors, [value[0].numel() for value in like.values()], 1)
    return {
        name: part.reshape(-1, *like[name].shape[1:]).to(like[name].dtype)
        for name, part in zip(like, parts, strict=True)
    }


def add_prefix(prefix: str, tree: Tree) -> Tree:
    """The tree with `prefix/` before every name, so that two trees fit into one."""
    return {f"{prefix}/{name}": value for name, value in tree.items()}


def strip_prefix(prefix: str, tree: Tree) -> Tree:
    """The entries whose names begin with `prefix/`, without it: the inverse of `add_prefix`."""
    start = f"{prefix}/"
    return {
        name.removeprefix(start): value for name, value in tree.items() if name.startswith(start)
    }


def shapes(*trees: Tree) -> tuple[tuple[str, torch.Size, torch.dtype], ...]:
    """Name, shape and dtype of every value: the key under which a compiled step is cached."""
    return tuple((name, value.shape, value.dtype) for tree in trees for name, value in tree.items())


def nbytes(tree: Tree) -> int:
    """The size of the values in bytes."""
    return sum(value.numel() * value.element_size() for value in tree.values())
