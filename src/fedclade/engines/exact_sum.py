"""Sums that are independent of the order of their terms, to the bit.

A sum of floats depends on the order because each addition rounds. Here no addition rounds. A term
weight · value is one float64, so its own rounding has no order. It is split into three digits, all
integers, in the units 2^-10, 2^-56 and 2^-102: `round` gives a digit, and the rest times 2^46 gives
the next one. Each digit is added to a bin, a float64. Sums of integers up to 2^53 are exact:

- The sum of the first digits is exact while the sum of |terms| is below 2^43, about 9e12.
- The other digits are at most 2^45, since a rest is at most 1/2. With 250 of them a bin is below
  252 · 2^45 < 2^53. Then it carries: c = floor(bin / 2^46 + 1/2) is added to the bin above, and
  2^46 c is subtracted from the bin. This is exact too.

So the bins have the exact total of the terms, except for bits of a term below 2^-102 (2e-31). Terms
of at least 2^-50 (9e-16) have no such bits. After a carry the lower bins are in [-2^45, 2^45). A
number has only one such form, so the bins depend on the total, not on the order of additions and
carries. The same holds for the result, which is computed from them. It is less than one unit in the
last place from the total: the lower bins are rounded to one number first, with an error of at most
2^-55 first units, and that is a quarter of a unit in the last place if the first bin is not 0.

If the sum of |terms| is 2^43 or more, the first bin rounds like any float64 sum. The result is as
precise as such a sum, but its last bits may depend on the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

AddRows: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(sums, rows) adds each row to the sum of its segment."""
_UNIT = 2.0**-10
_BASE = 2.0**46
_BINS = 3
_MAX_TERMS = 250
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

    def to(self, device: torch.device) -> Terms:
        return Terms(self.rows.to(device), self.segments.to(device), self.weights.to(device))


class ExactSum:
    """Weighted sums of rows, one for each segment.

    Args:
        segments: the number of segments.
        columns: the length of a row.
        device: the device of the rows.
    """

    def __init__(self, segments: int, columns: int, device: torch.device) -> None:
        self._bins = torch.zeros(_BINS, segments, columns, dtype=torch.float64, device=device)
        self._terms_since_carry = 0
        self._block = _CPU_BLOCK if device.type == "cpu" else _CUDA_BLOCK

    @property
    def device(self) -> torch.device:
        return self._bins.device

    def copy(self) -> ExactSum:
        other = ExactSum(0, 0, self._bins.device)
        other._bins, other._terms_since_carry = self._bins.clone(), self._terms_since_carry
        return other

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
        terms = terms.to(device)
        for first in range(0, len(terms), _MAX_TERMS):
            places = slice(first, min(first + _MAX_TERMS, len(terms)))
            batch = terms[places]
            if self._terms_since_carry + len(batch) > _MAX_TERMS:
                self._carry(digits)
            self._terms_since_carry += len(batch)
            weights = (batch.weights / _UNIT)[:, None]
            one_by_one = device.type == "cpu" and segments > 1
            add_rows = (_by_index if one_by_one else _by_product)(batch, segments)
            for begin, end in self._blocks(len(batch)):
                block = _view(products, len(batch), end - begin)
                _read(block, begin, parts, places if everyone else batch.rows, selected)
                _add_digits(self._bins[..., begin:end], block.mul_(weights), digits, add_rows)

    def total(self, begin: int = 0, end: int | None = None) -> Tensor:
        """The sums of these columns, in a tensor that nothing else uses."""
        _, segments, columns = self._bins.shape
        self._carry(self._bins.new_empty(max(segments, min(segments * columns, self._block))))
        first, second, third = self._bins[..., begin:end]
        result = torch.add(second, third, alpha=1 / _BASE)
        return result.mul_(1 / _BASE).add_(first).mul_(_UNIT)

    def _carry(self, buffer: Tensor) -> None:
        """Reduce the lower bins to [-_BASE / 2, _BASE / 2). `buffer` is a temporary tensor."""
        if not self._terms_since_carry:
            return
        self._terms_since_carry = 0
        for begin, end in self._blocks(self._bins.shape[1]):
            bins = self._bins[..., begin:end]
            carried = _view(buffer, bins.shape[1], end - begin)
            for level in range(_BINS - 1, 0, -1):
                torch.mul(bins[level], 1 / _BASE, out=carried).add_(0.5).floor_()
                bins[level - 1].add_(carried)
                bins[level].sub_(carried, alpha=_BASE)

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
    digits = _view(buffer, *terms.shape)
    for level, target in enumerate(bins):
        torch.round(terms, out=digits)
        add_rows(target, digits)
        if level == _BINS - 1:
            return
        terms.sub_(digits)
        # Float32 values of at least 1e-10 with integer weights have no third digit. On CUDA the
        # test would wait for the device.
        if level == _BINS - 2 and terms.device.type == "cpu" and not _any(terms):
            return
        terms.mul_(_BASE)


def _any(terms: Tensor) -> bool:
    """Whether a term is not 0. Squares that underflow are of terms without a third digit."""
    flat = terms.view(-1)
    return float(torch.dot(flat, flat)) != 0


def _by_index(terms: Terms, segments: int) -> AddRows:
    """Adds each row to the row of its segment."""
    return lambda target, digits: target.index_add_(0, terms.segments, digits)


def _by_product(terms: Terms, segments: int) -> AddRows:
    """Adds a matrix product. It is exact as well: its factors are 0, 1 and integers."""
    every = torch.arange(segments, device=terms.segments.device)
    one_hot = (terms.segments == every[:, None]).double()
    return lambda target, digits: target.addmm_(one_hot, digits)
