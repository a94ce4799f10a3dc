"""Sums of the clients' replies in float64, and the results of a call of `map`."""

from __future__ import annotations

import torch
from torch import Tensor

from fedclade.core.federation import ClientResults, Failure, SegmentSum, contribution_matrix
from fedclade.core.packed_tree import packed, unpacked
from fedclade.core.pytree import Tree, concatenate, tree_index
from fedclade.engines.reply_validation import as_rows
from fedclade.errors import InvalidInputError


class Accumulator:
    """Adds replies in float64 as chunks arrive.

    On the CPU it adds one client after another, in the order of arrival. This order is the same for
    every chunk size, so chunking does not change a bit. On CUDA it adds a matrix product for each
    chunk.

    Args:
        reduce: the sums.
    """

    def __init__(self, reduce: SegmentSum) -> None:
        self.reduce = reduce
        self.sums: Tree = {}
        self.weight = torch.zeros(reduce.num_segments, dtype=torch.float64)

    def keys(self, reply: Tree) -> tuple[str, ...]:
        return self.reduce.summed_keys(reply)

    def copy(self) -> Accumulator:
        """A copy whose `add` leaves these sums unchanged on CUDA. On the CPU both share their
        tensors.
        """
        other = Accumulator(self.reduce)
        other.sums, other.weight = dict(self.sums), self.weight
        return other

    def add(self, places: Tensor, reply: Tree) -> None:
        """Add the replies of the clients at these places of the call's `ids`."""
        if not len(places):
            return
        contributions = contribution_matrix(self.reduce, places, reply)
        # One after another, like the sums: a subtotal of each chunk would depend on the chunk size.
        self.weight = torch.cat([self.weight[None], contributions]).cumsum(0)[-1]
        names = self.keys(reply)
        if any(reply[name].device.type != "cpu" for name in names):
            self._add_products(contributions.to(reply[names[0]].device), names, reply)
            return
        clients, segments = torch.nonzero(contributions, as_tuple=True)
        weights = contributions[clients, segments].tolist()
        terms = list(zip(clients.tolist(), segments.tolist(), weights, strict=True))
        # All allocations come first: if memory runs out, nothing has been added yet.
        for name in names:
            if name not in self.sums:
                self.sums[name] = reply[name].new_zeros(
                    (self.reduce.num_segments, *reply[name].shape[1:]), dtype=torch.float64
                )
        lengths = {name: as_rows(reply[name]).shape[1] for name in names}
        buffer = torch.empty(max(lengths.values(), default=0), dtype=torch.float64)
        for name in names:
            as_double = buffer[: lengths[name]].view(reply[name].shape[1:])
            for client, segment, weight in terms:
                self.sums[name][segment].add_(as_double.copy_(reply[name][client]), alpha=weight)

    def _add_products(self, contributions: Tensor, names: tuple[str, ...], reply: Tree) -> None:
        summed = {name: reply[name] for name in names}
        matrix = packed(summed)
        if matrix is not None and not self.sums:
            self.sums = unpacked(contributions.T @ matrix.double(), summed)
            return
        for name in names:
            value = reply[name]
            total = (contributions.T @ as_rows(value).double()).view(-1, *value.shape[1:])
            self.sums[name] = self.sums[name] + total if name in self.sums else total


def check_sum(reduce: SegmentSum, clients: int) -> None:
    """Raise if the sums do not match the clients of the call."""
    segments = reduce.segment_ids
    expected = (clients, reduce.num_segments) if segments is None else (clients,)
    if tuple(reduce.weights.shape) != expected:
        raise InvalidInputError(
            f"reduce.weights: the shape is {tuple(reduce.weights.shape)}; it must be {expected} for"
            f" {clients} clients.",
            "reduce.weights",
        )
    if isinstance(segments, Tensor):
        if len(segments) != clients:
            raise InvalidInputError(
                f"reduce.segment_ids: there are {len(segments)} segments for {clients} clients;"
                " give one for each client.",
                "reduce.segment_ids",
            )
        if clients and not 0 <= int(segments.min()) <= int(segments.max()) < reduce.num_segments:
            raise InvalidInputError(
                f"reduce.segment_ids: the segments are {int(segments.min())} to"
                f" {int(segments.max())}; they must be 0 to {reduce.num_segments - 1}"
                f" (num_segments = {reduce.num_segments}).",
                "reduce.segment_ids",
            )


def ordered_results(
    ids: Tensor,
    places: list[Tensor],
    outputs: list[Tree],
    total: Accumulator | None,
    failures: list[Failure],
) -> ClientResults:
    """The results of a call of `map`, in the order of its `ids`.

    Args:
        ids: the clients of the call.
        places: for each chunk the places of its clients in `ids`.
        outputs: for each chunk the outputs of its clients.
        total: the sums, if the call has some.
        failures: the clients without a valid reply.
    """
    place = torch.cat([*places, torch.empty(0, dtype=torch.int64)])
    order = place.argsort()
    ordered: Tree = {}
    if outputs and outputs[0]:
        joined = concatenate(outputs)
        ordered = tree_index(joined, order.to(next(iter(joined.values())).device))
    failures = sorted(failures, key=lambda failure: failure.client)
    if total is None:
        return ClientResults(ids[place[order]], ordered, failures=failures)
    return ClientResults(ids[place[order]], ordered, total.sums, total.weight, failures)
