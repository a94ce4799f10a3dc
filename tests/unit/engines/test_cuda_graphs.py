"""CUDA graphs, the part that needs no GPU: the steps of each graph, and its plan."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fedclade.core.batching import Batches
from fedclade.core.program import natively_batched
from fedclade.core.pytree import Tree
from fedclade.data.federated_dataset import RaggedIndex
from fedclade.engines.cuda_graphs import BLOCKS, CapturedStep, _blocks, _plan_length
from fedclade.engines.device_dataset import BatchReader, DeviceDataset
from fedclade.engines.profiler import Profiler


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


def test_a_chunk_without_the_first_client_has_a_plan() -> None:
    """The chunk has clients 1 and 2, with 2 samples each. Client 0 has 6, more than the plan of
    the chunk can hold.
    """
    device = torch.device("cpu")
    parts = RaggedIndex.of([range(6), range(6, 8), range(8, 10)])
    dataset = DeviceDataset(
        torch.arange(10.0)[:, None], torch.arange(10), parts, device, Profiler(device)
    )
    clients = torch.tensor([1, 2])
    reader = BatchReader(dataset, Batches(size=4, epochs=2), clients, clients, key=0)

    @natively_batched
    def step(broadcast: Tree, const: Tree, carry: Tree, batch: object) -> Tree:
        return carry

    captured = CapturedStep(step, reader, 2, {}, {}, {"w": torch.zeros(2, 1)})
    captured._fill()
    # Two epochs of one step with two samples and two places of padding.
    assert captured.plan.rows.sort(-1).values.tolist() == [[[6, 6, 7, 7], [8, 8, 9, 9]]] * 2
