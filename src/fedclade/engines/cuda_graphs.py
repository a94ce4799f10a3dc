"""Steps on CUDA without Python between them: a program's step is captured in CUDA graphs, one for
each of a few stack widths.

A step of many small models takes microseconds on a GPU, much less than Python needs to launch its
kernels one by one. A graph holds all kernels, including those that gather the batch. A counter on
the device holds the number of the step, so that a step is one replay of the graph. Another graph
computes which samples each client reads in which step (the plan).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedclade.core.packed_tree import packed, packed_like
from fedclade.core.program import Step, batch_step
from fedclade.core.pytree import Tree, nbytes, shapes, tree_index
from fedclade.engines.compile_cache import LazyLRUCache
from fedclade.engines.device_dataset import BatchReader, Steps, active_counts

MIN_STEPS = 4  # fewer steps are not worth a capture
# The ratio of two successive captured widths. On average half of the difference is padding.
WIDTH_RATIO = 0.85
# Numbers of steps in one graph. The launch of a graph costs more than a small step. 5 fits runs of
# five epochs.
BLOCKS = (16, 8, 5, 4, 3, 2, 1)
MAX_CAPTURES = 8  # captured programs of a federation: each holds a stack
# A captured stack may take 1/SHARE of the device's memory: a capture needs three times that, and a
# larger stack gains little from a graph.
SHARE = 64
_WARM_UP = 2


class CapturedStep:
    """The captured step of one program, for stacks of up to K clients of one dataset, in buffers at
    fixed addresses.
    """

    def __init__(
        self,
        step: Step,
        reader: BatchReader,
        longest: int,
        broadcast: Tree,
        const: Tree,
        carry: Tree,
    ) -> None:
        self.step, self.dataset, self.batches, self.longest = (
            batch_step(step),
            reader.dataset,
            reader.batches,
            longest,
        )
        self.broadcast, self.const, self.carry = (
            packed_like(tree) for tree in (broadcast, const, carry)
        )
        self.packed_carry = packed(self.carry)
        device = self.dataset.device
        self.step_number = torch.zeros((), dtype=torch.int64, device=device)
        self.offsets = torch.arange(BLOCKS[0], device=device)
        # The parts and keys of the clients. The plan below reads them: a part that is not in this
        # chunk may have more than `longest` samples.
        self.inputs = _plan_inputs(reader).to(device)
        self.plan = Steps(*(torch.empty_like(value) for value in self._plan()))
        self.graph_pool: Any = None  # shared by all graphs: they never run at the same time
        self.plan_graph: torch.cuda.CUDAGraph | None = None
        self.blocks: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def run(self, reader: BatchReader, broadcast: Tree, const: Tree, carry: Tree) -> Tree:
        """The carry of every client after all its steps."""
        clock, counts = self.dataset.clock, reader.counts
        copy_into(self.broadcast, broadcast)
        copy_into(self.const, const)
        with clock.phase("plan"):
            self.inputs.copy_(_plan_inputs(reader))
            if self.plan_graph is None:
                self.plan_graph = self._capture(self._fill)
            self.plan_graph.replay()
        blocks = _blocks(counts)
        with clock.phase("steps"):
            for width, steps in sorted(
                {(block.width, block.steps) for block in blocks} - self.blocks.keys(), reverse=True
            ):
                copy_into(self.carry, carry)
                self.step_number.zero_()
                self.blocks[width, steps] = self._capture(partial(self._advance, width, steps))
            copy_into(self.carry, carry)
            self.step_number.zero_()
            final = packed_like(carry, zeros=False)
            rows = [(into, self.carry[name]) for name, into in final.items()]
            if self.packed_carry is not None:  # whole rows, with the gaps between values
                rows = [(cast(Tensor, packed(final)), self.packed_carry)]
            active = len(counts)
            for block in blocks:
                if block.active < active:
                    _copy_rows(rows, block.active, active)
                    active = block.active
                self.blocks[block.width, block.steps].replay()
            _copy_rows(rows, 0, active)
        clock.count(sum(counts), sum(block.width * block.steps for block in blocks))
        return final

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                work()
                self.step_number.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collected(), torch.cuda.graph(graph, pool=self.graph_pool):
            work()
        self.graph_pool = graph.pool()
        return graph

    def _plan(self) -> Steps:
        return self.dataset.steps(self.batches, self.inputs[0], self.inputs[1], self.longest)

    def _fill(self) -> None:
        for into, value in zip(self.plan, self._plan(), strict=True):
            into.copy_(value)

    def _advance(self, width: int, steps: int) -> None:
        """Run `steps` steps of the first `width` clients, in place."""
        numbers = self.step_number + self.offsets[:steps]
        reads = [value.index_select(0, numbers) for value in self.plan]
        before, const = tree_index(self.carry, slice(width)), tree_index(self.const, slice(width))
        after = before
        for step in range(steps):
            after = self.step(
                self.broadcast,
                const,
                dict(after),
                self.dataset.batch(*(value[step, :width] for value in reads)),
            )
        copy_into(
            {
                name: value
                for name, value in before.items()
                if after[name].data_ptr() != value.data_ptr()
            },
            after,
        )
        self.step_number += steps


def _plan_inputs(reader: BatchReader) -> Tensor:
    return torch.stack([reader.part_ids, reader.keys])


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Switch off garbage collection. It could destroy the graphs of an older federation, which
    aborts a capture.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CudaGraphCache:
    """The captured programs of a federation. A stack of clients that comes once is not captured.

    The kernels are the same with and without a graph, so results do not depend on when a program
    is captured.
    """

    def __init__(self) -> None:
        self._captures: LazyLRUCache[CapturedStep] = LazyLRUCache(after=1, max_keys=MAX_CAPTURES)

    def run(
        self, step: Step, reader: BatchReader, broadcast: Tree, const: Tree, carry: Tree
    ) -> Tree | None:
        """The carries after all steps, computed by CUDA graphs, or None if that is not possible or
        not worth it.
        """
        dataset, batches = reader.dataset, reader.batches
        if (
            dataset.device.type != "cuda"
            or not dataset.on_device  # a graph cannot read from the host
            or batches.augment is not None  # it draws new numbers in each step
            or not carry
            or batches.most(reader.longest) < MIN_STEPS
            or not _fits(carry)
        ):
            return None
        longest = _plan_length(reader.longest, dataset.longest)
        key = (
            step,
            batches,
            id(dataset),
            longest,
            len(reader.client_ids),
            shapes(broadcast, const, carry),
        )
        # Streams and graphs are made on the current device, which need not be that of the samples.
        with torch.cuda.device(dataset.device):
            captured = self._captures.get(
                key, lambda: CapturedStep(step, reader, longest, broadcast, const, carry)
            )
            if captured is None:
                return None
            try:
                return captured.run(reader, broadcast, const, carry)
            except RuntimeError as error:
                if "captur" not in str(error):
                    raise
                # The step reads a value from the device. From now on it runs without a graph.
                self._captures.give_up(key)
                return None


def _fits(carry: Tree) -> bool:
    """Whether a stack is small enough to be captured. This depends on the device's total memory,
    not on its free memory, so that runs are reproducible.
    """
    device = next(iter(carry.values())).device
    return nbytes(carry) <= torch.cuda.get_device_properties(device).total_memory // SHARE


def _plan_length(longest: int, maximum: int) -> int:
    """The number of samples of a client that a plan can hold. There are only a few such numbers, so
    that a few graphs are enough.
    """
    length = maximum
    while length // 2 >= longest:
        length //= 2
    return length


class _Block(NamedTuple):
    """Steps that one graph runs on a stack of `width` clients, of which the first `active` have
    steps left.
    """

    active: int
    width: int
    steps: int


def _blocks(counts: list[int]) -> list[_Block]:
    """All steps of the clients, whose numbers of steps are `counts`, in descending order. There are
    few different widths and lengths, so that a few graphs are enough.
    """
    widths = [len(counts)]
    blocks = []
    for active, group in groupby(active_counts(counts)):
        while widths[-1] > active:
            widths.append(min(widths[-1] - 1, int(widths[-1] * WIDTH_RATIO)))
        width = next(width for width in reversed(widths) if width >= active)
        steps = len(list(group))
        for length in BLOCKS:
            blocks += [_Block(active, width, length)] * (steps // length)
            steps %= length
    return blocks


def _copy_rows(rows: list[tuple[Tensor, Tensor]], first: int, last: int) -> None:
    for into, value in rows:
        into[first:last].copy_(value[first:last])


def copy_into(into: Tree, tree: Tree) -> None:
    """Copy the values of `tree` into the tensors of `into`."""
    if not into:
        return
    target, source = packed(into), packed(tree)
    if target is not None and source is not None and target.shape == source.shape:
        target.copy_(source)
    else:
        torch._foreach_copy_(list(into.values()), [tree[name] for name in into])
