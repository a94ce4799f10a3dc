"""Sums of the clients' replies, and the results of a call of `map`."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import torch
from torch import Tensor

from fedclade.core.federation import (
    FIXED_POINT,
    ClientResults,
    Failure,
    SegmentSum,
    contribution_matrix,
)
from fedclade.core.packed_tree import column_offsets, packed
from fedclade.core.pytree import Tree, concatenate, tree_index
from fedclade.engines.exact_sum import ExactSum, Terms
from fedclade.engines.reply_validation import as_rows
from fedclade.errors import InvalidInputError


class Accumulator:
    """Adds replies as chunks arrive. Additions are exact (`exact_sum`), so neither the order of the
    clients nor the chunks change a bit of the sums.

    Args:
        reduce: the sums.
        all_segments: whether to have sums of all segments, or only of those with a client in the
            replies that `add` gets, once.
    """

    def __init__(self, reduce: SegmentSum, all_segments: bool = True) -> None:
        self.reduce = reduce
        self._all_segments, self._segments = all_segments, torch.arange(reduce.num_segments)
        # The first rows are (clients, all segments). A small tensor for each chunk, between the
        # large ones that come and go, would fragment the memory: 2 GB with 100,000 signatures.
        self._weights = torch.zeros(0, reduce.num_segments, dtype=torch.float64)
        self._clients = 0
        self._rows: ExactSum | None = None  # the sums of packed rows
        self._empty: Tree = {}  # the summed outputs of 0 clients: their names and shapes

    @classmethod
    def of_chunk(cls, reduce: SegmentSum, places: Tensor, reply: Tree) -> Accumulator:
        """The sums of one chunk, of the segments with a client in it."""
        chunk = cls(reduce, all_segments=False)
        chunk.add(places, reply)
        return chunk

    @property
    def weight(self) -> Tensor:
        """(segments,) the sum of the weights."""
        columns = self._matrix().T.tolist()
        weight = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64)
        return torch.where(self._is_shown(), weight, 0.0)

    def _matrix(self) -> Tensor:
        return self._weights[: self._clients]

    def _reserve(self, clients: int) -> None:
        """Allocate rows for this number of further clients."""
        needed = self._clients + clients
        if needed > len(self._weights):
            grown = self._weights.new_zeros(
                max(needed, 2 * len(self._weights)), self.reduce.num_segments
            )
            grown[: self._clients] = self._matrix()
            self._weights = grown

    def _count(self, matrix: Tensor) -> None:
        """Add the rows for which `_reserve` was called."""
        end = self._clients + len(matrix)
        self._weights[self._clients : end] = matrix
        self._clients = end

    def _is_shown(self) -> Tensor:
        """(segments,) whether the segment has enough clients."""
        return (self._matrix() != 0).sum(0) >= self.reduce.min_clients

    @property
    def sums(self) -> Tree:
        """(segments, …) the sum of each output; empty if no client replied."""
        sums, is_shown = self._all_sums(), self._is_shown()
        if bool(is_shown.all()):
            return sums
        for value in sums.values():
            value[~is_shown.to(value.device)] = 0.0
        return sums

    def _all_sums(self) -> Tree:
        if self._rows is None:
            return {}
        # On CUDA the sums are packed: one kernel then divides all of them.
        whole = self._rows.total() if self._rows.device.type != "cpu" else None
        result = {}
        for (name, empty), begin in zip(
            self._empty.items(), column_offsets(self._empty), strict=False
        ):
            end = begin + math.prod(empty.shape[1:])
            columns = self._rows.total(begin, end) if whole is None else whole[:, begin:end]
            result[name] = columns.view(len(columns), *empty.shape[1:])
        return result

    def keys(self, reply: Tree) -> tuple[str, ...]:
        return self.reduce.summed_keys(reply)

    def add(self, places: Tensor, reply: Tree) -> None:
        """Add the replies of the clients at these places of the call's `ids`. If memory runs out,
        nothing has been added.
        """
        if not len(places):
            return
        matrix = contribution_matrix(self.reduce, places, reply)
        if not self._all_segments:
            self._segments = torch.nonzero(matrix.any(0)).flatten()
        self._reserve(len(matrix))
        summed = {name: reply[name] for name in self.keys(reply)}
        if summed:
            terms = Terms.of(matrix[:, self._segments])
            self._rows_like(summed).add(_parts(summed), terms)
        self._count(matrix)

    def merge(self, chunk: Accumulator) -> None:
        """Add the sums of other clients. If memory runs out, nothing has been added.

        Args:
            chunk: the sums of some of the segments.
        """
        self._reserve(chunk._clients)
        if self._rows is None and len(chunk._segments) == len(self._segments):
            self._rows, self._empty = chunk._rows, chunk._empty
        elif chunk._rows is not None:
            self._rows_like(chunk._empty).merge(chunk._rows, chunk._segments)
        self._count(chunk._matrix())

    def without_empty_segments(self) -> Accumulator:
        """The same sums without the segments that no client is in: less to send. Another process
        can merge them, and gets the same bytes for any division of the clients.
        """
        partial = copy.copy(self)
        partial._weights = self._matrix().clone()
        if self._rows is None:
            return partial
        used = self._matrix().any(0)[self._segments]
        if not used.all():
            partial._rows = self._rows.only(torch.nonzero(used).flatten())
            partial._segments = self._segments[used]
        return partial

    def _rows_like(self, summed: Tree) -> ExactSum:
        """The sums of packed rows, which are made for the first reply."""
        if self._rows is None:
            device = next(iter(summed.values())).device
            unit = FIXED_POINT if self.reduce.fixed_point else 0.0
            self._rows = ExactSum(len(self._segments), column_offsets(summed)[-1], device, unit)
            self._empty = {
                name: value.new_empty(0, *value.shape[1:]) for name, value in summed.items()
            }
        return self._rows


def _parts(summed: Tree) -> list[Tensor]:
    """Matrices with the columns of the packed outputs: each output, then its padding."""
    matrix = packed(summed)
    if matrix is not None:
        return [matrix]
    zero = next(iter(summed.values())).new_zeros(1, 1)
    parts: list[Tensor] = []
    for value, (begin, end) in zip(summed.values(), pairwise(column_offsets(summed)), strict=True):
        rows = as_rows(value)
        parts += [rows, zero.expand(len(rows), end - begin - rows.shape[1])]
    return parts


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
    ordered = concatenate(outputs) if outputs and outputs[0] else {}
    if ordered and not torch.equal(order, torch.arange(len(order))):
        ordered = tree_index(ordered, order.to(next(iter(ordered.values())).device))
    failures = sorted(failures, key=lambda failure: failure.client)
    if total is None:
        return ClientResults(ids[place[order]], ordered, failures=failures)
    return ClientResults(ids[place[order]], ordered, total.sums, total.weight, failures)
