"""What an engine takes from a client: one policy for all methods and engines, and the sums made of
what was taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from fedclade.core.federation import ClientResults, Failure, SegmentSum, contribution_matrix
from fedclade.core.packed_tree import packed, unpacked
from fedclade.core.pytree import Tree, concatenate, tree_index
from fedclade.errors import InvalidInputError

EXAMPLES = "examples"
"""A reply under this name claims how many examples it was computed from."""
NO_ANSWER = "no answer"
LARGEST = 1e12
"""No weight, gradient or loss of training that goes well is larger than this, and squares of what
is smaller are still finite.
"""
Spec: TypeAlias = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each tensor of one client's reply."""


def rejection_reason(reply: Tree, expected: Spec, size: int) -> str | None:
    """Why one client's reply is refused, or None. `size` is what the client holds."""
    if reply.keys() != expected.keys():
        return f"names: expected {sorted(expected)}, got {sorted(reply)}"
    for name, (shape, dtype) in expected.items():
        value = reply[name]
        if tuple(value.shape) != shape:
            return f"shape of '{name}': expected {shape}, got {tuple(value.shape)}"
        if value.dtype != dtype:
            return f"dtype of '{name}': expected {dtype}, got {value.dtype}"
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            return f"'{name}' is not finite"
        if value.is_floating_point() and value.numel() and float(value.abs().max()) > LARGEST:
            return (
                f"'{name}' has a number of size {float(value.abs().max()):.1g}, more than"
                f" {LARGEST:.0e}"
            )
    if EXAMPLES in reply and not 0 <= float(reply[EXAMPLES]) <= size:
        return f"claims {float(reply[EXAMPLES]):g} examples, holds {size}"
    return None


def spec_of(reply: Tree) -> Spec:
    return {name: (tuple(value.shape), value.dtype) for name, value in reply.items()}


def rows_out_of_range(replies: Tree) -> list[int]:
    """Which rows of stacked replies have numbers that are not finite, or absurdly large."""
    whole = packed(replies)
    floats = (
        [whole]
        if whole is not None
        else [_as_rows(value) for value in replies.values() if value.is_floating_point()]
    )
    if not floats:
        return []
    # A norm tells in one fast pass whether anything may be wrong: no number is larger than it. Then
    # the suspects are looked at.
    norms = (
        torch.stack([torch.linalg.vector_norm(value, dim=1) for value in floats]).amax(0).tolist()
    )
    suspects = [row for row, norm in enumerate(norms) if not norm <= LARGEST]
    return [
        row
        for row in suspects
        if not all(bool((value[row].abs() <= LARGEST).all()) for value in floats)
    ]


def _as_rows(value: Tensor) -> Tensor:
    return value.reshape(len(value), math.prod(value.shape[1:]))


class Accumulator:
    """Adds replies up in float64 as chunks come in.

    On the CPU one client after another in the order of arrival, which the engine keeps the same for
    every chunk size: so chunking cannot change a bit. On CUDA by a matrix product of each chunk.
    """

    def __init__(self, reduce: SegmentSum) -> None:
        self.reduce = reduce
        self.sums: Tree = {}
        self.weight = torch.zeros(reduce.num_segments, dtype=torch.float64)

    def keys(self, reply: Tree) -> tuple[str, ...]:
        return self.reduce.summed_keys(reply)

    def copy(self) -> Accumulator:
        """The same sums, of which further ones can be made on CUDA without changing these. On the
        CPU they share their memory.
        """
        other = Accumulator(self.reduce)
        other.sums, other.weight = dict(self.sums), self.weight
        return other

    def add(self, places: Tensor, reply: Tree) -> None:
        """Add the replies of the clients that were asked at these places."""
        if not len(places):
            return
        give = contribution_matrix(self.reduce, places, reply)
        # One after another, as the sums are: a chunk's own subtotal would round by chunk size.
        self.weight = torch.cat([self.weight[None], give]).cumsum(0)[-1]
        names = self.keys(reply)
        if any(reply[name].device.type != "cpu" for name in names):
            self._add_products(give.to(reply[names[0]].device), names, reply)
            return
        client, row = torch.nonzero(give, as_tuple=True)
        shares = list(zip(client.tolist(), row.tolist(), give[client, row].tolist(), strict=True))
        # All memory first: where there is too little of it, nothing has been added yet.
        for name in names:
            if name not in self.sums:
                self.sums[name] = reply[name].new_zeros(
                    (self.reduce.num_segments, *reply[name].shape[1:]), dtype=torch.float64
                )
        lengths = {name: _as_rows(reply[name]).shape[1] for name in names}
        room = torch.empty(max(lengths.values(), default=0), dtype=torch.float64)
        for name in names:
            exact = room[: lengths[name]].view(reply[name].shape[1:])
            for params, where, share in shares:
                self.sums[name][where].add_(exact.copy_(reply[name][params]), alpha=share)

    def _add_products(self, give: Tensor, names: tuple[str, ...], reply: Tree) -> None:
        chosen = {name: reply[name] for name in names}
        whole = packed(chosen)
        if whole is not None and not self.sums:
            self.sums = unpacked(give.T @ whole.double(), chosen)
            return
        for name in names:
            value = reply[name]
            total = (give.T @ _as_rows(value).double()).view(-1, *value.shape[1:])
            self.sums[name] = self.sums[name] + total if name in self.sums else total


def check_sum(reduce: SegmentSum, clients: int) -> None:
    """Refuse sums that do not fit the clients asked."""
    row = reduce.segment_ids
    expected = (clients, reduce.num_segments) if row is None else (clients,)
    if tuple(reduce.weights.shape) != expected:
        raise InvalidInputError(
            f"reduce: weight has shape {tuple(reduce.weights.shape)}, expected {expected} for"
            f" {clients} clients."
        )
    if isinstance(row, Tensor):
        if len(row) != clients:
            raise InvalidInputError(f"reduce: {len(row)} rows for {clients} clients.")
        if clients and not 0 <= int(row.min()) <= int(row.max()) < reduce.num_segments:
            raise InvalidInputError(
                f"reduce: rows {int(row.min())} to {int(row.max())}, but there are"
                f" {reduce.num_segments}, numbered from 0."
            )


def in_order_asked(
    ids: Tensor,
    places: list[Tensor],
    kept: list[Tree],
    total: Accumulator | None,
    failures: list[Failure],
) -> ClientResults:
    """Replies that came in pieces, those of the clients asked at `places`, put together in the
    order of `ids`.
    """
    place = torch.cat([*places, torch.empty(0, dtype=torch.int64)])
    order = place.argsort()
    out: Tree = {}
    if kept and kept[0]:
        joined = concatenate(kept)
        out = tree_index(joined, order.to(next(iter(joined.values())).device))
    failures = sorted(failures, key=lambda failure: failure.client)
    if total is None:
        return ClientResults(ids[place[order]], out, failures=failures)
    return ClientResults(ids[place[order]], out, total.sums, total.weight, failures)
