"""Sums have the same bytes for every order and every split, and are right to the last place."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedclade.engines import exact_sum
from fedclade.engines.exact_sum import ExactSum, Terms

CPU = torch.device("cpu")
Pair = tuple[float, float]


def total(pairs: list[Pair], chunk: int) -> Tensor:
    """The sum of weight · value."""
    result = ExactSum(1, 1, CPU)
    for first in range(0, len(pairs), chunk):
        part = torch.tensor(pairs[first : first + chunk], dtype=torch.float64)
        result.add([part[:, 1:]], Terms.of(part[:, :1]))
    return result.total()


def decimal(exponent: float, digits: float, negative: bool) -> float:
    return (-1 if negative else 1) * digits * 10**exponent


values = st.builds(decimal, st.floats(-12, 6), st.floats(1, 9), st.booleans())
weights = st.one_of(st.integers(1, 1000).map(float), st.floats(0.01, 100))
# Terms at the limits between the digits, where a rest is exactly one half or close to it.
ties = st.builds(
    lambda count, power, more: math.ldexp(count, power) + more,
    st.integers(-3, 3),
    st.sampled_from([-14, -15, -60, -61]),
    st.sampled_from([0.0, 2.0**-61, -(2.0**-61), 2.0**-60]),
)
pairs = st.lists(
    st.one_of(st.tuples(weights, values), st.tuples(st.just(1.0), ties)), min_size=2, max_size=40
)


@given(pairs=pairs, data=st.data(), chunks=st.tuples(st.integers(1, 40), st.integers(1, 40)))
@settings(max_examples=300, deadline=None)
def test_any_order_and_any_chunks_give_the_same_bytes(
    pairs: list[Pair], data: st.DataObject, chunks: tuple[int, int]
) -> None:
    shuffled = data.draw(st.permutations(pairs))
    assert torch.equal(total(pairs, chunks[0]), total(shuffled, chunks[1]))


def test_a_plain_sum_of_such_terms_depends_on_the_order() -> None:
    """So the test above can fail."""
    generator = torch.Generator().manual_seed(0)
    exponents = 18 * torch.rand(40, generator=generator, dtype=torch.float64) - 12
    terms = 10**exponents * torch.randn(40, generator=generator, dtype=torch.float64)
    assert sum(terms.tolist()) != sum(terms.flip(0).tolist())
    forward, backward = (
        total([(1.0, term) for term in order.tolist()], 7) for order in (terms, terms.flip(0))
    )
    assert torch.equal(forward, backward)


@given(pairs=st.lists(st.tuples(weights, values), min_size=1, max_size=40))
@settings(max_examples=300, deadline=None)
def test_a_sum_is_right_to_the_last_place(pairs: list[Pair]) -> None:
    expected = math.fsum(weight * value for weight, value in pairs)
    dropped = len(pairs) * 2.0**-61  # at most half of the second unit in each term
    assert abs(total(pairs, 7).item() - expected) <= dropped + math.ulp(expected)


def test_terms_that_cancel_leave_the_exact_rest() -> None:
    assert total([(1.0, 2.0**30), (1.0, 2.0**-60), (1.0, -(2.0**30))], 1).item() == 2.0**-60
    assert total([(3.0, 1e6), (1.0, 2.0**-60), (-3.0, 1e6)], 1).item() == 2.0**-60


def test_equal_totals_of_different_terms_have_the_same_bytes() -> None:
    """Both are 1.5 first units and a little, once with a first digit and once without."""
    unit, little = 2.0**-14, 1.375 * 2.0**-57
    first = total([(1.0, unit), (1.0, unit / 2), (1.0, little)], 3)
    second = total([(1.0, unit / 2)] * 3 + [(1.0, little)], 4)
    assert torch.equal(first, second)


@pytest.mark.parametrize("chunk", [1, 97, 250, 251, 5000])
def test_thousands_of_terms_carry_and_stay_exact(chunk: int) -> None:
    """Every rest is as large as possible, with one sign: without a carry its bins would round."""
    generator = torch.Generator().manual_seed(1)
    terms = (
        2.0**-15 - 2.0**-60 * torch.randint(1, 9, (5000,), generator=generator).double()
    ).tolist()
    assert total([(1.0, term) for term in terms], chunk).item() == math.fsum(terms)


@given(
    rows=st.integers(1, 9),
    segments=st.integers(1, 4),
    columns=st.integers(1, 11),
    block=st.integers(1, 30),
    seed=st.integers(0, 99),
)
@settings(max_examples=100, deadline=None)
def test_blocks_and_matrix_products_change_no_bit(
    rows: int, segments: int, columns: int, block: int, seed: int
) -> None:
    """CUDA adds matrix products. They are tested here with tensors on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(rows, segments, generator=generator, dtype=torch.float64)
    weights[weights < 0.3] = 0
    parts = [
        torch.randn(rows, columns, generator=generator),
        torch.randint(0, 9, (rows, 2), generator=generator),
    ]

    def sums() -> Tensor:
        result = ExactSum(segments, columns + 2, CPU)
        for _ in range(2):
            result.add(parts, Terms.of(weights))
        return result.total()

    expected = [
        [
            math.fsum(2 * [float(w) * float(v) for w, v in zip(by, column, strict=True)])
            for column in torch.cat([part.double() for part in parts], 1).T
        ]
        for by in weights.T
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_sum, "_by_product", exact_sum._by_index)
        by_index = sums()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact_sum, "_by_index", exact_sum._by_product)
        patch.setattr(exact_sum, "_CPU_BLOCK", block)
        by_product = sums()
    assert torch.equal(by_index, by_product)
    torch.testing.assert_close(
        by_index, torch.tensor(expected, dtype=torch.float64), rtol=2.3e-16, atol=rows * 2.0**-60
    )


def test_a_sum_beyond_the_exact_range_is_as_precise_as_a_float64_sum() -> None:
    generator = torch.Generator().manual_seed(2)
    terms = (1e20 * torch.rand(300, generator=generator, dtype=torch.float64)).tolist()
    assert total([(1e6, term) for term in terms], 9).item() == pytest.approx(
        math.fsum(1e6 * term for term in terms), rel=1e-13
    )


def test_bits_below_the_last_unit_are_dropped() -> None:
    assert total([(1.0, 2.0**-60)] * 3, 2).item() == 3 * 2.0**-60
    assert total([(1.0, 2.0**-62)] * 3, 2).item() == 0


@given(pairs=pairs, data=st.data(), parts=st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=200, deadline=None)
def test_merged_sums_have_the_same_bytes(
    pairs: list[Pair], data: st.DataObject, parts: list[int]
) -> None:
    """Each part is summed alone, as by a worker, and merged into segment 1 of 3."""
    shuffled = data.draw(st.permutations(pairs))
    limits = sorted({0, len(pairs), *(limit for limit in parts if limit < len(pairs))})
    merged = ExactSum(3, 1, CPU)
    for begin, end in pairwise(limits):
        part = torch.tensor(shuffled[begin:end], dtype=torch.float64)
        alone = ExactSum(1, 1, CPU)
        alone.add([part[:, 1:]], Terms.of(part[:, :1]))
        merged.merge(alone, torch.tensor([1]))
    expected = total(pairs, len(pairs)).item()
    assert merged.total().flatten().tolist() == [0.0, expected, 0.0]


def test_thousands_of_merged_terms_carry_and_stay_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    rests = 2.0**-15 - 2.0**-60 * torch.randint(1, 9, (5000,), generator=generator).double()
    merged = ExactSum(1, 1, CPU)
    for part in rests.split(170):
        alone = ExactSum(1, 1, CPU)
        alone.add([part[:, None]], Terms.of(torch.ones(len(part), 1)))
        merged.merge(alone, torch.tensor([0]))
    assert merged.total().item() == math.fsum(rests.tolist())
