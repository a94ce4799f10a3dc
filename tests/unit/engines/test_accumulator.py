"""Sums are the dense float64 product, to the bit for every order and chunk size."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedclade.core.federation import FIXED_POINT, SegmentSum
from fedclade.core.pytree import Tree
from fedclade.engines.accumulator import Accumulator


def replies(clients: int, seed: int = 0) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(clients, 3, 2, generator=generator),
        "b": torch.randn(clients, generator=generator).double(),
        "choice": torch.randint(0, 4, (clients,), generator=generator),
    }


def accumulate(
    reduce: SegmentSum, all_replies: Tree, chunk: int, order: Tensor | None = None
) -> Accumulator:
    order = torch.arange(len(all_replies["w"])) if order is None else order
    total = Accumulator(reduce)
    for first in range(0, len(order), chunk):
        places = order[first : first + chunk]
        total.add(places, {name: value[places] for name, value in all_replies.items()})
    return total


def dense(matrix: Tensor, value: Tensor) -> Tensor:
    """The definition: sums[r] = sum over k of matrix[k, r] value[k], in float64."""
    return torch.einsum("kr,k...->r...", matrix.double(), value.double())


def one_hot(row: Tensor, weight: Tensor, rows: int) -> Tensor:
    matrix = torch.zeros(len(row), rows, dtype=torch.float64)
    matrix[torch.arange(len(row)), row] = weight.double()
    return matrix


@given(
    clients=st.integers(1, 12),
    rows=st.integers(1, 4),
    chunk=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_sums_by_segment_ids_are_the_dense_product(
    clients: int, rows: int, chunk: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    row, weight = (
        torch.randint(0, rows, (clients,), generator=generator),
        torch.rand(clients, generator=generator),
    )
    total, matrix = (
        accumulate(
            SegmentSum(segment_ids=row, weights=weight, num_segments=rows), replies(clients), chunk
        ),
        one_hot(row, weight, rows),
    )
    assert total.sums.keys() == {"w", "b", "choice"}
    for name, value in replies(clients).items():
        torch.testing.assert_close(total.sums[name], dense(matrix, value), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(total.weight, matrix.sum(0), rtol=1e-12, atol=0)
    assert {value.dtype for value in total.sums.values()} == {torch.float64}


@given(
    clients=st.integers(1, 12),
    rows=st.integers(1, 4),
    chunk=st.integers(1, 12),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_sums_by_a_matrix_are_the_dense_product(
    clients: int, rows: int, chunk: int, seed: int
) -> None:
    matrix = torch.rand(clients, rows, generator=torch.Generator().manual_seed(seed))
    matrix[matrix < 0.3] = 0
    total = accumulate(
        SegmentSum(weights=matrix, num_segments=rows, keys=("w", "b")), replies(clients), chunk
    )
    assert total.sums.keys() == {"w", "b"}
    for name in ("w", "b"):
        torch.testing.assert_close(
            total.sums[name], dense(matrix, replies(clients)[name]), rtol=1e-12, atol=1e-12
        )
    torch.testing.assert_close(total.weight, matrix.double().sum(0), rtol=1e-12, atol=0)


@given(clients=st.integers(1, 12), chunk=st.integers(1, 12), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_sums_by_an_output_are_the_dense_product_and_that_output_is_not_summed(
    clients: int, chunk: int, seed: int
) -> None:
    all_replies = replies(clients, seed)
    weight = torch.arange(1, clients + 1)
    total, matrix = (
        accumulate(
            SegmentSum(segment_ids="choice", weights=weight, num_segments=4), all_replies, chunk
        ),
        one_hot(all_replies["choice"], weight, 4),
    )
    assert total.sums.keys() == {"w", "b"}
    for name in ("w", "b"):
        torch.testing.assert_close(
            total.sums[name], dense(matrix, all_replies[name]), rtol=1e-12, atol=1e-12
        )
    assert total.weight.tolist() == matrix.sum(0).tolist()


def test_a_chosen_segment_may_be_a_vector_of_one_number() -> None:
    """A reply of shape (1,) for each client stacks to (K, 1)."""
    all_replies = replies(5)
    vector = all_replies | {"choice": all_replies["choice"][:, None]}
    reduce = SegmentSum(segment_ids="choice", weights=torch.ones(5), num_segments=4)
    assert torch.equal(
        accumulate(reduce, vector, 2).sums["w"], accumulate(reduce, all_replies, 2).sums["w"]
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
    expected = accumulate(reduce, replies(40), 1)
    assert torch.equal(accumulate(reduce, replies(40), chunk, order).sums["w"], expected.sums["w"])


@pytest.mark.parametrize("form", CASES)
@pytest.mark.parametrize("shards", [1, 2, 4, 7, 40])
def test_partial_sums_of_other_processes_change_no_bit(form: str, shards: int) -> None:
    generator = torch.Generator().manual_seed(1)
    reduce, all_replies = CASES[form](generator), replies(400)
    reduce = replace(reduce, weights=reduce.weights.repeat(*[10] + [1] * (reduce.weights.ndim - 1)))
    if isinstance(reduce.segment_ids, Tensor):
        reduce = replace(reduce, segment_ids=reduce.segment_ids.repeat(10))
    expected = accumulate(reduce, all_replies, 400)
    shard_of = torch.randint(0, shards, (400,), generator=generator)
    total = Accumulator(reduce)
    for shard in range(shards):
        places = torch.nonzero(shard_of == shard).flatten()
        part = accumulate(reduce, all_replies, 3, order=places).without_empty_segments()
        total.merge(pickle.loads(pickle.dumps(part)))
    assert torch.equal(total.sums["w"], expected.sums["w"])
    assert torch.equal(total.weight, expected.weight)


def test_segments_without_clients_are_not_sent() -> None:
    reduce = SegmentSum(
        segment_ids=torch.tensor([4, 1, 4]), weights=torch.tensor([1.0, 2.0, 4.0]), num_segments=6
    )
    part = accumulate(reduce, replies(3), 3)
    whole, sent = pickle.dumps(part), pickle.dumps(part.without_empty_segments())
    assert len(sent) < len(whole)
    total = Accumulator(reduce)
    total.merge(pickle.loads(sent))
    assert torch.equal(total.sums["w"], part.sums["w"])


def test_chunks_change_no_bit_of_the_total_weight() -> None:
    weight = torch.rand(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    reduce = SegmentSum(
        segment_ids=torch.zeros(300, dtype=torch.int64), weights=weight, num_segments=1
    )
    expected = accumulate(reduce, replies(300), 1).weight
    for chunk in (2, 3, 7, 40, 300):
        assert torch.equal(accumulate(reduce, replies(300), chunk).weight, expected)


def test_sums_are_more_precise_than_float32() -> None:
    """2^24 + 1 is not a float32: adding ones to 2^24 in float32 would change nothing."""
    value = {"w": torch.cat([torch.tensor([[2.0**24]]), torch.ones(9, 1)])}
    total = accumulate(
        SegmentSum(
            segment_ids=torch.zeros(10, dtype=torch.int64), weights=torch.ones(10), num_segments=1
        ),
        value,
        3,
    )
    assert total.sums["w"].item() == 2**24 + 9


def test_a_client_that_is_not_added_affects_neither_sum_nor_weight() -> None:
    reduce = SegmentSum(
        segment_ids=torch.tensor([0, 1, 0, 1]),
        weights=torch.tensor([1.0, 2.0, 4.0, 8.0]),
        num_segments=2,
    )
    all_replies = {"w": torch.tensor([[1.0], [10.0], [100.0], [float("nan")]])}
    total = accumulate(reduce, all_replies, 2, order=torch.tensor([2, 1]))
    assert total.sums["w"].tolist() == [[400.0], [20.0]]
    assert total.weight.tolist() == [4.0, 2.0]


def test_a_weight_of_zero_adds_nothing_and_negative_weights_subtract() -> None:
    reduce = SegmentSum(
        segment_ids=torch.zeros(3, dtype=torch.int64),
        weights=torch.tensor([0.0, 2.0, -1.0]),
        num_segments=1,
    )
    total = accumulate(reduce, {"w": torch.tensor([[5.0], [7.0], [3.0]])}, 3)
    assert total.sums["w"].tolist() == [[11.0]]
    assert total.weight.tolist() == [1.0]


def test_only_the_outputs_of_keys_are_added() -> None:
    total = accumulate(
        SegmentSum(
            segment_ids=torch.zeros(4, dtype=torch.int64),
            weights=torch.ones(4),
            num_segments=1,
            keys=("b",),
        ),
        replies(4),
        4,
    )
    assert total.sums.keys() == {"b"}
    assert total.keys(replies(4)) == ("b",)


@given(clients=st.integers(1, 300), chunk=st.integers(1, 300), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_sums_in_fixed_point_are_sums_of_integers(clients: int, chunk: int, seed: int) -> None:
    """The arithmetic of a secure sum: each term as a whole number of units."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(1, 1000, (clients,), generator=generator).double() / 7
    everyone = torch.zeros(clients, dtype=torch.int64)
    reduce = SegmentSum(weights, 1, everyone, keys=("w",), fixed_point=True)
    all_replies = replies(clients, seed)
    order = torch.randperm(clients, generator=generator)
    total = accumulate(reduce, all_replies, chunk, order).sums["w"][0]
    values = all_replies["w"].double() * weights[:, None, None]
    units = torch.round(values / FIXED_POINT).to(torch.int64).sum(0)
    assert torch.equal(total, units.double() * FIXED_POINT)
