"""Steps on CUDA without Python in between: a program's step is captured once in a CUDA graph for
each of a few stack widths.

A step of many small models is over in microseconds on a GPU, far sooner than Python has launched
its kernels one by one. A graph holds them all, with the gather of the batch; a counter on the
device says which step it is, so that replaying it is all there is to do. What clients read in which
step is drawn by a graph too.
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

LEAST_STEPS = 4  # fewer are not worth a capture
# of two captured widths: what is computed for nobody is half of the rest on average
NARROWER = 0.85
# steps in one graph: launching it costs more than a small step does; five epochs make five steps
# alike
BLOCKS = (
    16,
    8,
    5,
    4,
    3,
    2,
    1,
)
KEPT = 8  # captured programs of a federation: each holds a stack of its own
# a captured stack may be this part of the device's memory: it takes three times that, and a larger
# one needs no graph
SHARE = 64
_WARM_UP = 2


class CapturedStep:
    """The step of one program for stacks of up to K clients of one pool, in buffers that stay where
    they are.
    """

    def __init__(
        self,
        step: Step,
        reading: BatchReader,
        longest: int,
        broadcast: Tree,
        const: Tree,
        carry: Tree,
    ) -> None:
        self.step, self.pool, self.batches, self.longest = (
            batch_step(step),
            reading.pool,
            reading.batches,
            longest,
        )
        self.broadcast, self.const, self.carry = (
            packed_like(tree) for tree in (broadcast, const, carry)
        )
        self.whole = packed(self.carry)
        device = self.pool.device
        self.now = torch.zeros((), dtype=torch.int64, device=device)
        self.ahead = torch.arange(BLOCKS[0], device=device)
        self.asked = torch.zeros(
            2, len(reading.client), dtype=torch.int64, device=device
        )  # parts and keys
        self.plan = Steps(*(torch.empty_like(value) for value in self._drawn()))
        self.memory: Any = None  # what all graphs share: they never run at the same time
        self.draw: torch.cuda.CUDAGraph | None = None
        self.blocks: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}

    def run(self, reading: BatchReader, broadcast: Tree, const: Tree, carry: Tree) -> Tree:
        """Every client's carry after its own number of steps."""
        clock, counts = self.pool.clock, reading.counts
        copy_into(self.broadcast, broadcast)
        copy_into(self.const, const)
        with clock.phase("plan"):
            self.asked.copy_(torch.stack([reading.part, reading.keys]))
            if self.draw is None:
                self.draw = self._capture(self._fill)
            self.draw.replay()
        blocks = _blocks(counts)
        with clock.phase("steps"):
            for width, steps in sorted(
                {(block.width, block.steps) for block in blocks} - self.blocks.keys(), reverse=True
            ):
                copy_into(self.carry, carry)
                self.now.zero_()
                self.blocks[width, steps] = self._capture(partial(self._advance, width, steps))
            copy_into(self.carry, carry)
            self.now.zero_()
            final = packed_like(carry, zeros=False)
            rows = [(room, self.carry[name]) for name, room in final.items()]
            if self.whole is not None:  # whole rows, with what is between the values
                rows = [(cast(Tensor, packed(final)), self.whole)]
            alive = len(counts)
            for block in blocks:
                if block.living < alive:
                    _copy_rows(rows, block.living, alive)
                    alive = block.living
                self.blocks[block.width, block.steps].replay()
            _copy_rows(rows, 0, alive)
        clock.count(sum(counts), sum(block.width * block.steps for block in blocks))
        return final

    def _capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                work()
                self.now.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collected(), torch.cuda.graph(graph, pool=self.memory):
            work()
        self.memory = graph.pool()
        return graph

    def _drawn(self) -> Steps:
        return self.pool.steps(self.batches, self.asked[0], self.asked[1], self.longest)

    def _fill(self) -> None:
        for room, value in zip(self.plan, self._drawn(), strict=True):
            room.copy_(value)

    def _advance(self, width: int, steps: int) -> None:
        """So many steps of the first `width` clients, in place."""
        number = self.now + self.ahead[:steps]
        reads = [value.index_select(0, number) for value in self.plan]
        before, const = tree_index(self.carry, slice(width)), tree_index(self.const, slice(width))
        after = before
        for step in range(steps):
            after = self.step(
                self.broadcast,
                const,
                dict(after),
                self.pool.batch(*(value[step, :width] for value in reads)),
            )
        copy_into(
            {
                name: value
                for name, value in before.items()
                if after[name].data_ptr() != value.data_ptr()
            },
            after,
        )
        self.now += steps


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """An older federation's graphs must not be collected during a capture: to destroy a graph is
    among what breaks one off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class CudaGraphCache:
    """The captured programs of a federation. What is asked for once is not captured.

    The kernels are the same with and without a graph, so it makes no difference to a result which
    call is the first.
    """

    def __init__(self) -> None:
        self._kept: LazyLRUCache[CapturedStep] = LazyLRUCache(after=1, most=KEPT)

    def run(
        self, step: Step, reading: BatchReader, broadcast: Tree, const: Tree, carry: Tree
    ) -> Tree | None:
        """The carries after all steps by way of CUDA graphs, or None where that is not possible or
        not worth while.
        """
        pool, batches = reading.pool, reading.batches
        if (
            pool.device.type != "cuda"
            or not carry
            or batches.most(reading.longest) < LEAST_STEPS
            or not _fits(carry)
        ):
            return None
        longest = _room(reading.longest, pool.longest)
        what = (
            step,
            batches,
            id(pool),
            longest,
            len(reading.client),
            shapes(broadcast, const, carry),
        )
        captured = self._kept.get(
            what, lambda: CapturedStep(step, reading, longest, broadcast, const, carry)
        )
        if captured is None:
            return None
        try:
            return captured.run(reading, broadcast, const, carry)
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            self._kept.give_up(
                what
            )  # it asks the device for something in its step: it runs without a graph from now on
            return None


def _fits(carry: Tree) -> bool:
    """Whether a stack is small enough to be captured: by the size of the device, not by what is
    free on it just now.
    """
    device = next(iter(carry.values())).device
    return nbytes(carry) <= torch.cuda.get_device_properties(device).total_memory // SHARE


def _room(longest: int, most: int) -> int:
    """How many samples of a client a plan has room for: one of a few numbers, so that a few graphs
    will do.
    """
    room = most
    while room // 2 >= longest:
        room //= 2
    return room


class _Block(NamedTuple):
    """Steps that one graph runs: in all of them so many clients have steps left, in a stack that
    may be wider.
    """

    living: int
    width: int
    steps: int


def _blocks(counts: list[int]) -> list[_Block]:
    """All steps of clients whose numbers of steps fall; widths and lengths are of a few kinds, so
    that a few graphs will do.
    """
    widths = [len(counts)]
    blocks = []
    for left, same in groupby(active_counts(counts)):
        while widths[-1] > left:
            widths.append(min(widths[-1] - 1, int(widths[-1] * NARROWER)))
        width = next(width for width in reversed(widths) if width >= left)
        steps = len(list(same))
        for length in BLOCKS:
            blocks += [_Block(left, width, length)] * (steps // length)
            steps %= length
    return blocks


def _copy_rows(rows: list[tuple[Tensor, Tensor]], first: int, last: int) -> None:
    for into, value in rows:
        into[first:last].copy_(value[first:last])


def copy_into(into: Tree, tree: Tree) -> None:
    """Write the tree's values over those of another."""
    if not into:
        return
    room, whole = packed(into), packed(tree)
    if room is not None and whole is not None and room.shape == whole.shape:
        room.copy_(whole)
    else:
        torch._foreach_copy_(list(into.values()), [tree[name] for name in into])
