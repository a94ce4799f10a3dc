"""Replies: what is refused and why, and sums that are the dense float64 product, to the bit
whatever the chunks.
"""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedclade.core.federation import SegmentSum
from fedclade.core.pytree import Tree
from fedclade.engines.reply_validation import (
    LARGEST,
    Accumulator,
    rejection_reason,
    rows_out_of_range,
)

EXPECTED = {"w": ((2, 3), torch.float32), "n": ((), torch.int64), "examples": ((), torch.float64)}


def reply(**changed: Tensor) -> Tree:
    return {
        "w": torch.ones(2, 3),
        "n": torch.tensor(4),
        "examples": torch.tensor(5.0, dtype=torch.float64),
    } | changed


def examples(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float64)


@pytest.mark.parametrize("number", [0, 1, 5, 8])
def test_a_good_reply_is_taken(number: int) -> None:
    assert rejection_reason(reply(examples=examples(number)), EXPECTED, size=8) is None


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (
            reply(extra=torch.zeros(1)),
            r"names: expected \['examples', 'n', 'w'\], got \['examples', 'extra', 'n', 'w'\]",
        ),
        ({"w": torch.ones(2, 3)}, r"names: expected .* got \['w'\]"),
        ({}, r"names: expected .* got \[\]"),
        (reply(w=torch.ones(3, 2)), r"shape of 'w': expected \(2, 3\), got \(3, 2\)"),
        (reply(w=torch.ones(1, 2, 3)), r"shape of 'w': expected \(2, 3\), got \(1, 2, 3\)"),
        (reply(n=torch.tensor([4])), r"shape of 'n': expected \(\), got \(1,\)"),
        (
            reply(w=torch.ones(2, 3, dtype=torch.float64)),
            r"dtype of 'w': expected torch.float32, got torch.float64",
        ),
        (
            reply(w=torch.ones(2, 3, dtype=torch.int64)),
            r"dtype of 'w': expected torch.float32, got torch.int64",
        ),
        (reply(n=torch.tensor(4.0)), r"dtype of 'n': expected torch.int64, got torch.float32"),
        (reply(w=torch.tensor([[1, 1, 1], [1, float("nan"), 1]])), r"'w' is not finite"),
        (reply(w=torch.tensor([[float("inf"), 1, 1], [1, 1, 1]])), r"'w' is not finite"),
        (reply(w=torch.tensor([[1, 1, 1], [1, 1, -float("inf")]])), r"'w' is not finite"),
        (
            reply(w=torch.tensor([[1, 1, 1], [1, -1e30, 1]])),
            r"'w' has a number of size 1e\+30, more than 1e\+12",
        ),
        (reply(examples=examples(float("nan"))), r"'examples' is not finite"),
        (reply(examples=examples(9)), r"claims 9 examples, holds 8"),
        (reply(examples=examples(-1)), r"claims -1 examples, holds 8"),
        (reply(examples=examples(8.5)), r"claims 8.5 examples, holds 8"),
    ],
)
def test_a_bad_reply_is_refused_with_the_reason(bad: Tree, reason: str) -> None:
    given_reason = rejection_reason(bad, EXPECTED, size=8)
    assert given_reason is not None
    assert re.fullmatch(reason, given_reason)


def test_a_good_reply_under_names_in_another_order_is_taken() -> None:
    assert rejection_reason(dict(reversed(reply().items())), EXPECTED, size=8) is None


def test_finite_tells_the_rows_apart() -> None:
    rows = {
        "w": torch.ones(5, 2, 2),
        "v": torch.ones(5, 3),
        "n": torch.arange(5),
        "loss": torch.ones(5, dtype=torch.float64),
    }
    rows["w"][1, 0, 1] = float("nan")
    rows["v"][3, 2] = -float("inf")
    rows["loss"][4] = float("inf")
    assert rows_out_of_range(rows) == [1, 3, 4]


def test_absurdly_large_numbers_are_told_from_many_large_ones() -> None:
    rows = torch.tensor(
        [[LARGEST, LARGEST], [1.0, 1.0], [1e30, -1e30], [2 * LARGEST, 0], [torch.inf, -torch.inf]]
    )
    assert rows_out_of_range({"w": rows}) == [2, 3, 4]
    assert rows_out_of_range({"w": rows.double(), "v": torch.ones(5, 1)}) == [2, 3, 4]


def test_whole_numbers_are_always_finite() -> None:
    assert rows_out_of_range({"n": torch.arange(3)}) == []


def test_finite_takes_replies_of_one_number_a_client() -> None:
    assert rows_out_of_range({"loss": torch.tensor([1.0, float("nan"), 3.0])}) == [1]


# Sums


def replies(clients: int, seed: int = 0) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(clients, 3, 2, generator=generator),
        "b": torch.randn(clients, generator=generator).double(),
        "choice": torch.randint(0, 4, (clients,), generator=generator),
    }


def accumulate(
    reduce: SegmentSum, given_replies: Tree, chunk: int, order: Tensor | None = None
) -> Accumulator:
    order = torch.arange(len(given_replies["w"])) if order is None else order
    total = Accumulator(reduce)
    for first in range(0, len(order), chunk):
        places = order[first : first + chunk]
        total.add(places, {name: value[places] for name, value in given_replies.items()})
    return total


def dense(give: Tensor, value: Tensor) -> Tensor:
    """The definition: sums[r] = sum over k of give[k, r] value[k], in float64."""
    return torch.einsum("kr,k...->r...", give.double(), value.double())


def one_hot(row: Tensor, weight: Tensor, rows: int) -> Tensor:
    give = torch.zeros(len(row), rows, dtype=torch.float64)
    give[torch.arange(len(row)), row] = weight.double()
    return give


@given(
    clients=st.integers(1, 12),
    rows=st.integers(1, 4),
    chunk=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_row_form_is_the_dense_product(clients: int, rows: int, chunk: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    row, weight = (
        torch.randint(0, rows, (clients,), generator=generator),
        torch.rand(clients, generator=generator),
    )
    got, give = (
        accumulate(
            SegmentSum(segment_ids=row, weights=weight, num_segments=rows), replies(clients), chunk
        ),
        one_hot(row, weight, rows),
    )
    assert got.sums.keys() == {"w", "b", "choice"}
    for name, value in replies(clients).items():
        torch.testing.assert_close(got.sums[name], dense(give, value), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got.weight, give.sum(0), rtol=1e-12, atol=0)
    assert {value.dtype for value in got.sums.values()} == {torch.float64}


@given(
    clients=st.integers(1, 12),
    rows=st.integers(1, 4),
    chunk=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_matrix_form_is_the_dense_product(clients: int, rows: int, chunk: int, seed: int) -> None:
    give = torch.rand(clients, rows, generator=torch.Generator().manual_seed(seed))
    give[give < 0.3] = 0
    got = accumulate(
        SegmentSum(weights=give, num_segments=rows, keys=("w", "b")), replies(clients), chunk
    )
    assert got.sums.keys() == {"w", "b"}
    for name in ("w", "b"):
        torch.testing.assert_close(
            got.sums[name], dense(give, replies(clients)[name]), rtol=1e-12, atol=1e-12
        )
    torch.testing.assert_close(got.weight, give.double().sum(0), rtol=1e-12, atol=0)


@given(clients=st.integers(1, 12), chunk=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_row_by_reply_is_the_dense_product_and_is_not_summed_itself(
    clients: int, chunk: int, seed: int
) -> None:
    given_replies = replies(clients, seed)
    weight = torch.arange(1, clients + 1)
    got, give = (
        accumulate(
            SegmentSum(segment_ids="choice", weights=weight, num_segments=4), given_replies, chunk
        ),
        one_hot(given_replies["choice"], weight, 4),
    )
    assert got.sums.keys() == {"w", "b"}
    for name in ("w", "b"):
        torch.testing.assert_close(
            got.sums[name], dense(give, given_replies[name]), rtol=1e-12, atol=1e-12
        )
    assert got.weight.tolist() == give.sum(0).tolist()


def test_a_chosen_row_may_come_as_a_vector_of_one() -> None:
    """A reply of shape (1,) for each client stacks to (K, 1)."""
    given_replies = replies(5)
    vector = given_replies | {"choice": given_replies["choice"][:, None]}
    reduce = SegmentSum(segment_ids="choice", weights=torch.ones(5), num_segments=4)
    assert torch.equal(
        accumulate(reduce, vector, 2).sums["w"], accumulate(reduce, given_replies, 2).sums["w"]
    )


CASES = {
    "row": lambda generator: SegmentSum(
        segment_ids=torch.randint(0, 3, (40,), generator=generator),
        weights=torch.rand(40, generator=generator),
        num_segments=3,
        keys=("w",),
    ),
    "matrix": lambda generator: SegmentSum(
        weights=torch.rand(40, 3, generator=generator), num_segments=3, keys=("w",)
    ),
    "reply": lambda generator: SegmentSum(
        segment_ids="choice",
        weights=torch.rand(40, generator=generator),
        num_segments=4,
        keys=("w",),
    ),
}


@pytest.mark.parametrize("form", CASES)
@pytest.mark.parametrize("chunk", [2, 3, 7, 39, 40, 100])
def test_chunks_change_no_bit_of_the_sums(form: str, chunk: int) -> None:
    reduce = CASES[form](torch.Generator().manual_seed(1))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    expected = accumulate(reduce, replies(40), 1, order)
    assert torch.equal(accumulate(reduce, replies(40), chunk, order).sums["w"], expected.sums["w"])


def test_chunks_change_no_bit_of_the_total_weight() -> None:
    weight = torch.rand(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reduce = SegmentSum(
        segment_ids=torch.zeros(300, dtype=torch.int64), weights=weight, num_segments=1
    )
    expected = accumulate(reduce, replies(300), 1).weight
    for chunk in (2, 3, 7, 40, 300):
        assert torch.equal(accumulate(reduce, replies(300), chunk).weight, expected)


def test_sums_keep_what_float32_would_lose() -> None:
    """2^24 + 1 is no float32: adding ones to it in float32 would stand still."""
    value = {"w": torch.cat([torch.tensor([[2.0**24]]), torch.ones(9, 1)])}
    got = accumulate(
        SegmentSum(
            segment_ids=torch.zeros(10, dtype=torch.int64), weights=torch.ones(10), num_segments=1
        ),
        value,
        3,
    )
    assert got.sums["w"].item() == 2**24 + 9


def test_who_is_not_added_has_no_part_in_sum_or_weight() -> None:
    reduce = SegmentSum(
        segment_ids=torch.tensor([0, 1, 0, 1]),
        weights=torch.tensor([1.0, 2.0, 4.0, 8.0]),
        num_segments=2,
    )
    given_replies = {"w": torch.tensor([[1.0], [10.0], [100.0], [float("nan")]])}
    got = accumulate(reduce, given_replies, 2, order=torch.tensor([2, 1]))
    assert got.sums["w"].tolist() == [[400.0], [20.0]]
    assert got.weight.tolist() == [4.0, 2.0]


def test_a_weight_of_zero_gives_nothing_and_negative_weights_subtract() -> None:
    reduce = SegmentSum(
        segment_ids=torch.zeros(3, dtype=torch.int64),
        weights=torch.tensor([0.0, 2.0, -1.0]),
        num_segments=1,
    )
    got = accumulate(reduce, {"w": torch.tensor([[5.0], [7.0], [3.0]])}, 3)
    assert got.sums["w"].tolist() == [[11.0]]
    assert got.weight.tolist() == [1.0]


def test_keys_choose_what_is_added() -> None:
    got = accumulate(
        SegmentSum(
            segment_ids=torch.zeros(4, dtype=torch.int64),
            weights=torch.ones(4),
            num_segments=1,
            keys=("b",),
        ),
        replies(4),
        4,
    )
    assert got.sums.keys() == {"b"}
    assert got.keys(replies(4)) == ("b",)
