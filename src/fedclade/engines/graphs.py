"""Steps on CUDA without Python in between: a program's step is captured once in a CUDA graph for each of a few stack widths.

A step of many small models is over in microseconds on a GPU, far sooner than Python has launched its kernels one by one. A graph holds
them all, with the gather of the batch; a counter on the device says which step it is, so that replaying it is all there is to do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedclade.client.objective import Batch
from fedclade.client.tree import Tree, nbytes, take
from fedclade.engines.batches import Steps, batch_of, living

LEAST_STEPS = 4  # fewer are not worth a capture
NARROWER = 0.85  # of two captured widths: what is computed for nobody is half of the rest on average
KEPT = 8  # captured programs of a pool: each holds a stack of its own
SHARE = 64  # a captured stack may be this part of the device's memory: it takes five times that, and a larger one needs no graph
_WARM_UP = 2

Step = Callable[[Tree, Tree, Tree, Batch], Tree]


class Captured:
    """The step of one program for stacks of up to K clients of one pool, in buffers that stay where they are."""

    def __init__(self, step: Step, x: Tensor, y: Tensor, shared: Tree, const: Tree, carry: Tree, plan: Steps) -> None:
        self.step = vmap(step, in_dims=(None, 0, 0, 0))
        self.x, self.y, self.plan = x, y, plan
        self.shared, self.const, self.carry, self.final = (_like(tree) for tree in (shared, const, carry, carry))
        self.now = torch.zeros(1, dtype=torch.int64, device=x.device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.memory: Any = None  # what the graphs of all widths share: they never run at the same time

    def run(self, shared: Tree, const: Tree, carry: Tree, plan: Steps, counts: list[int]) -> Tree:
        """Every client's carry after its own number of steps (`counts`, falling)."""
        _copy(self.shared, shared)
        _copy(self.const, const)
        for room, value in zip(self.plan, plan, strict=True):
            room[:, : value.shape[1]] = value
        widths = _widths(counts)
        for width in sorted(set(widths) - self.graphs.keys(), reverse=True):
            _copy(self.carry, carry)
            self.graphs[width] = self._capture(width)
        _copy(self.carry, carry)
        self.now.zero_()
        alive = len(counts)
        for left, width in zip(living(counts), widths, strict=True):
            if left < alive:
                self._keep(left, alive)
                alive = left
            self.graphs[width].replay()
        self._keep(0, alive)
        return {name: value.clone() for name, value in self.final.items()}

    def _keep(self, first: int, last: int) -> None:
        torch._foreach_copy_([value[first:last] for value in self.final.values()], [self.carry[name][first:last] for name in self.final])

    def _capture(self, width: int) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        self.now.zero_()
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                self._advance(width)
                self.now.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            self._advance(width)
        self.memory = graph.pool()
        return graph

    def _advance(self, width: int) -> None:
        """One step of the first `width` clients, in place."""
        batch = batch_of(self.x, self.y, *(value[:width].index_select(1, self.now)[:, 0] for value in self.plan))
        here = slice(width)
        _copy(take(self.carry, here), self.step(self.shared, take(self.const, here), take(self.carry, here), batch))
        self.now += 1


class Captures:
    """The captured programs of a pool; those not used for long are let go."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, Captured | None] = OrderedDict()
        self._seen_once: set[Any] = set()

    def of(self, what: tuple[Any, ...], make: Callable[[], Captured]) -> Captured | None:
        """What was captured for this program and these shapes; None where it is seen for the first time, or cannot be captured.

        The kernels are the same with and without a graph, so it makes no difference to a result which call is the first.
        """
        if what not in self._known:
            self._known[what] = None
            self._seen_once.add(what)
        elif what in self._seen_once:
            self._seen_once.discard(what)
            self._known[what] = make()
        self._known.move_to_end(what)
        while len(self._known) > KEPT:
            self._seen_once.discard(self._known.popitem(last=False)[0])
        return self._known[what]

    def cannot(self, what: tuple[Any, ...]) -> None:
        """This program asks the device for something in its step: it runs without a graph from now on."""
        self._known[what] = None


def fits(carry: Tree) -> bool:
    """Whether a stack is small enough to be captured: by the size of the device, not by what is free on it just now."""
    device = next(iter(carry.values())).device
    return nbytes(carry) <= torch.cuda.get_device_properties(device).total_memory // SHARE


def shapes(*trees: Tree) -> tuple[Any, ...]:
    return tuple((name, tuple(value.shape), value.dtype) for tree in trees for name, value in tree.items())


def _widths(counts: list[int]) -> list[int]:
    """For each step the width of the stack that runs it: the least of a few that holds all who have steps left."""
    few = [len(counts)]
    while few[-1] > 1:
        few.append(min(few[-1] - 1, int(few[-1] * NARROWER)))
    widths = []
    for left in living(counts):
        while len(few) > 1 and few[1] >= left:
            few.pop(0)
        widths.append(few[0])
    return widths


def _like(tree: Tree) -> Tree:
    return {name: torch.empty_like(value) for name, value in tree.items()}


def _copy(into: Tree, tree: Tree) -> None:
    if into:
        torch._foreach_copy_(list(into.values()), [tree[name] for name in into])
