"""Sums that are independent of the order of their terms, to the bit.

A sum of floats depends on the order because each addition rounds. Here no addition rounds. A term
weight · value is one float64, so its own rounding has no order. It is split into two digits, both
integers, in the units 2^-14 and 2^-60: `round` gives a digit, and the rest times 2^46 gives the
next one. Each digit is added to a bin, a float64. Sums of integers up to 2^53 are exact:

- The sum of the first digits is exact while the sum of |terms| is below 2^39, about 5.5e11.
- A second digit is at most 2^45, since a rest is at most 1/2. With 250 of them the bin is below
  252 · 2^45 < 2^53. Then it carries: c = floor(bin / 2^46 + 1/2) is added to the first bin, and
  2^46 c is subtracted from the second. This is exact too.

So the bins have the exact total of the terms, except for bits of a term below 2^-60 (8.7e-19): a
term of 2e-11 keeps the precision of a float32. Without a carry each bin is a sum of digits, which
has no order. After a carry the second bin is in [-2^45, 2^45). A number has only one such form, so
the bins depend on the total, not on the order of additions and carries. Which of the two forms a
result has depends on the number of terms alone (`_FEW_TERMS`). The result is one rounding of it.

If the sum of |terms| is 2^39 or more, the first bin rounds like any float64 sum. The result is as
precise as such a sum, but its last bits may depend on the order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

AddRows: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(sums, rows) adds each row to the sum of its segment."""
_UNIT = 2.0**-14
_BASE = 2.0**46
_MAX_TERMS = 250
# Sums of at most this number of terms never carry, in whatever parts they are added and merged: a
# merge counts as one more term.
_FEW_TERMS = _MAX_TERMS // 2
# The numbers in a temporary tensor. On the CPU larger tensors do not fit in the cache; on CUDA
# smaller ones need more kernels.
_CPU_BLOCK = 2**17
_CUDA_BLOCK = 2**24


@dataclass(frozen=True)
class Terms:
    """The terms of weighted sums.

    Args:
        rows: (terms,) the row of each term.
        segments: (terms,) the segment of each term.
        weights: (terms,) the weight of each term, in float64.
    """

    rows: Tensor
    segments: Tensor
    weights: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Terms:
        """The terms of a matrix (rows, segments) of weights. A weight of 0 is no term."""
        rows, segments = torch.nonzero(matrix, as_tuple=True)
        return cls(rows, segments, matrix[rows, segments].double())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: slice) -> Terms:
        return Terms(self.rows[places], self.segments[places], self.weights[places])


class ExactSum:
    """Weighted sums of rows, one for each segment.

    Args:
        segments: the number of segments.
        columns: the length of a row.
        device: the device of the rows.
        unit: if it is above 0, each term is rounded to a multiple of this power of 2.
    """

    def __init__(
        self, segments: int, columns: int, device: torch.device, unit: float = 0.0
    ) -> None:
        self._digits_per_unit = unit / _UNIT
        self._bins = torch.zeros(2, segments, columns, dtype=torch.float64, device=device)
        self._terms = self._terms_since_carry = 0
        self._block = _CPU_BLOCK if device.type == "cpu" else _CUDA_BLOCK

    @property
    def device(self) -> torch.device:
        return self._bins.device

    def add(self, parts: Sequence[Tensor], terms: Terms) -> None:
        """Add weighted rows. If memory runs out, nothing has been added.

        Args:
            parts: matrices with the columns of the rows, one after another.
            terms: the terms, on the CPU.
        """
        device, (_, segments, columns) = self._bins.device, self._bins.shape
        everyone = torch.equal(terms.rows, torch.arange(len(parts[0])))
        # All allocations come first.
        height = max(segments, min(len(terms), _MAX_TERMS))
        size = max(height, min(height * columns, self._block))
        products, digits = (torch.empty(size, dtype=torch.float64, device=device) for _ in range(2))
        selected = {
            dtype: torch.empty(0 if everyone else size, dtype=dtype, device=device)
            for dtype in {part.dtype for part in parts}
        }
        by_index = device.type == "cpu" and segments > 1
        batches = []
        for first in range(0, len(terms), _MAX_TERMS):
            batch = terms[first : first + _MAX_TERMS]
            rows = slice(first, first + len(batch)) if everyone else batch.rows.to(device)
            add_rows = (_by_index if by_index else _by_product)(batch.segments, segments, device)
            batches.append((rows, (batch.weights / _UNIT)[:, None].to(device), add_rows))
        for rows, weights, add_rows in batches:
            if self._terms_since_carry + len(weights) > _MAX_TERMS:
                self._carry(digits)
            self._terms_since_carry += len(weights)
            self._terms += len(weights)
            for begin, end in self._blocks(len(weights)):
                block = _view(products, len(weights), end - begin)
                _read(block, begin, parts, rows, selected)
                block.mul_(weights)
                if self._digits_per_unit:
                    block.div_(self._digits_per_unit).round_().mul_(self._digits_per_unit)
                _add_digits(self._bins[..., begin:end], block, digits, add_rows)

    def merge(self, other: ExactSum, segments: Tensor) -> None:
        """Add sums of other rows. If memory runs out, nothing has been added.

        Args:
            other: the sums, of the same columns.
            segments: (segments of other,) the segment to which each of them is added.
        """
        if self._terms_since_carry + other._terms_since_carry + 1 > _MAX_TERMS:
            self._carry(self._buffer())
        # The second bin of `other` may have the rest of a carry, which is at most one digit.
        self._terms_since_carry += other._terms_since_carry + 1
        self._terms += other._terms
        if len(segments) == self._bins.shape[1]:
            self._bins.add_(other._bins)
        else:
            self._bins.index_add_(1, segments.to(self.device), other._bins)

    def only(self, segments: Tensor) -> ExactSum:
        """The sums of these segments."""
        selected = copy.copy(self)
        selected._bins = self._bins[:, segments.to(self.device)]
        return selected

    def total(self, begin: int = 0, end: int | None = None) -> Tensor:
        """The sums of these columns, in a tensor that nothing else uses."""
        if self._terms > _FEW_TERMS and self._terms_since_carry:
            self._carry(self._buffer())
        first, second = self._bins[..., begin:end]
        return torch.add(first, second, alpha=1 / _BASE).mul_(_UNIT)

    def _buffer(self) -> Tensor:
        """A temporary tensor for `_carry`."""
        segments, columns = self._bins.shape[1:]
        return self._bins.new_empty(max(segments, min(segments * columns, self._block)))

    def _carry(self, buffer: Tensor) -> None:
        """Reduce the second bin to [-_BASE / 2, _BASE / 2). `buffer` is a temporary tensor."""
        self._terms_since_carry = 0
        for begin, end in self._blocks(self._bins.shape[1]):
            first, second = self._bins[..., begin:end]
            carried = _view(buffer, *first.shape)
            torch.mul(second, 1 / _BASE, out=carried).add_(0.5).floor_()
            first.add_(carried)
            second.sub_(carried, alpha=_BASE)

    def _blocks(self, height: int) -> Iterator[tuple[int, int]]:
        """Ranges of columns. A block of this height and these columns fits in a buffer."""
        columns, width = self._bins.shape[2], max(1, self._block // max(1, height))
        for begin in range(0, columns, width):
            yield begin, min(begin + width, columns)


def _view(buffer: Tensor, height: int, width: int) -> Tensor:
    """The start of a buffer as a matrix."""
    return buffer[: height * width].view(height, width)


def _read(
    block: Tensor,
    begin: int,
    parts: Sequence[Tensor],
    rows: slice | Tensor,
    selected: dict[torch.dtype, Tensor],
) -> None:
    """Copy these rows of the parts, from column `begin` on, into the block."""
    column = -begin
    for part in parts:
        low, high = max(column, 0), min(column + part.shape[1], block.shape[1])
        if low < high:
            values = part[:, low - column : high - column]
            if isinstance(rows, slice):
                values = values[rows]
            else:
                buffer = _view(selected[part.dtype], len(rows), high - low)
                values = torch.index_select(values, 0, rows, out=buffer)
            block[:, low:high].copy_(values)
        column += part.shape[1]


def _add_digits(bins: Tensor, terms: Tensor, buffer: Tensor, add_rows: AddRows) -> None:
    """Add the digits of the terms to the bins. The terms are overwritten."""
    first = torch.round(terms, out=_view(buffer, *terms.shape))
    add_rows(bins[0], first)
    add_rows(bins[1], terms.sub_(first).mul_(_BASE).round_())


def _by_index(segments: Tensor, count: int, device: torch.device) -> AddRows:
    """Adds each row to the row of its segment."""
    on_device = segments.to(device)
    return lambda target, digits: target.index_add_(0, on_device, digits)


def _by_product(segments: Tensor, count: int, device: torch.device) -> AddRows:
    """Adds a matrix product. It is exact as well: its factors are 0, 1 and integers."""
    if len(segments) == count == 1:  # faster than a product with one number
        return lambda target, digits: target.add_(digits)
    one_hot = (segments == torch.arange(count)[:, None]).double().to(device)
    return lambda target, digits: target.addmm_(one_hot, digits)
