"""CUDA graphs, the part that needs no GPU: the steps of each graph."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fedclade.engines.cuda_graphs import BLOCKS, _blocks, _plan_length


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40))
def test_blocks_hold_every_step_of_every_client(unsorted: list[int]) -> None:
    counts = sorted(unsorted, reverse=True)
    blocks = _blocks(counts)
    steps = [block for block in blocks for _ in range(block.steps)]
    assert [block.active for block in steps] == [
        sum(count > number for count in counts) for number in range(counts[0])
    ]
    assert all(
        block.active <= block.width <= len(counts) and block.steps in BLOCKS for block in blocks
    )


def test_blocks_by_hand() -> None:
    assert [tuple(block) for block in _blocks([20] * 4)] == [(4, 4, 16), (4, 4, 4)]
    # 20 clients. After 5 steps 18 are active; their stack has 20 rows (0.85 · 20 = 17 is too
    # narrow). Then 10 are active; their stack has 11 rows.
    assert [tuple(block) for block in _blocks([15] * 10 + [10] * 8 + [5] * 2)] == [
        (20, 20, 5),
        (18, 20, 5),
        (10, 11, 5),
    ]


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60))
def test_stacks_have_little_padding(unsorted: list[int]) -> None:
    counts = sorted(unsorted, reverse=True)
    for block in _blocks(counts):
        assert block.width - block.active <= max(1, 0.15 * block.width + 1)


def test_plans_have_a_few_lengths() -> None:
    assert [_plan_length(longest, 100) for longest in (100, 51, 50, 49, 25, 24, 1)] == [
        100,
        100,
        50,
        50,
        25,
        25,
        1,
    ]
    assert all(longest <= _plan_length(longest, 97) <= 97 for longest in range(1, 98))
