"""Faster steps on the CPU: a program's step is traced once for each stack width into a plain list
of torch operations.

A step of a few small models takes a millisecond. vmap, autograd and the Python code around the
operations add half a millisecond. The trace has the same operations on the same numbers, so results
do not depend on whether a step is traced.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fedclade.core.functional_model import ClientStackedBatch
from fedclade.core.inputs import from_tensors, tensors_of
from fedclade.core.program import StackStep, Step, batch_step
from fedclade.core.pytree import Tree, shapes, tree_map
from fedclade.engines.compile_cache import LazyLRUCache

# A step is traced after this many runs: tracing takes as long as about fifty runs.
TRACE_AFTER = 30
# Steps before the first trace: importing the tracer takes two seconds, and a node's process may end
# sooner.
WARMUP_STEPS = 10_000
MAX_TRACES = 64

# Operations that return their input if the shape stays the same.
_IDENTITY: set[Any] = {
    torch.ops.aten.view.default,
    torch.ops.aten.expand.default,
    torch.ops.aten._unsafe_view.default,
}


class TraceCache:
    """The traced steps of a federation."""

    def __init__(self) -> None:
        self._traces: LazyLRUCache[StackStep] = LazyLRUCache(after=TRACE_AFTER, max_keys=MAX_TRACES)
        self._steps_run = 0

    def step(
        self,
        step: Step,
        steps: int,
        broadcast: Tree,
        const: Tree,
        carry: Tree,
        batch: ClientStackedBatch,
    ) -> StackStep:
        """The function that runs this step, for the next `steps` steps on stacks like these."""
        if batch.weight.device.type != "cpu":  # on CUDA, steps are captured in graphs
            return batch_step(step)
        self._steps_run += steps
        if self._steps_run < WARMUP_STEPS and "torch._inductor" not in sys.modules:
            return batch_step(step)
        tensors = {str(place): value for place, value in enumerate(_tensors(batch))}
        key = (step, shapes(broadcast, const, carry, tensors))
        return self._traces.get(
            key, lambda: _trace(step, broadcast, const, carry, batch), steps
        ) or batch_step(step)


def _flat(broadcast: Tree, const: Tree, carry: Tree, batch: ClientStackedBatch) -> list[Tensor]:
    return [*broadcast.values(), *const.values(), *carry.values(), *_tensors(batch)]


def _tensors(batch: ClientStackedBatch) -> list[Tensor]:
    return [*tensors_of(batch.x), batch.y, batch.weight, batch.key, batch.share]


def _trace(
    step: Step, broadcast: Tree, const: Tree, carry: Tree, batch: ClientStackedBatch
) -> StackStep | None:
    """The step as a list of operations, or None if it cannot be traced."""
    run = batch_step(step)
    names = list(run(broadcast, const, tree_map(torch.clone, carry), batch))

    def flat(*values: Tensor) -> list[Tensor]:
        remaining = iter(values)
        shared, fixed, changing = (
            {name: next(remaining) for name in tree} for tree in (broadcast, const, carry)
        )
        x = from_tensors([next(remaining) for _ in tensors_of(batch.x)], batch.x)
        after = run(shared, fixed, changing, ClientStackedBatch(x, *remaining))
        return [after[name] for name in names]

    try:
        # Tracing runs the step, which writes into the carry.
        traced = make_fx(flat)(*_flat(broadcast, const, tree_map(torch.clone, carry), batch))
    except Exception:  # a step that cannot be traced still runs without a trace
        return None
    _shorten(traced)

    def run_trace(broadcast: Tree, const: Tree, carry: Tree, batch: ClientStackedBatch) -> Tree:
        return dict(zip(names, traced(*_flat(broadcast, const, carry, batch)), strict=True))

    return run_trace


def _shorten(traced: fx.GraphModule) -> None:
    """Remove operations that change nothing."""
    for node in traced.graph.nodes:
        before = node.args[0] if node.args else None
        same = (
            node.target in _IDENTITY
            and isinstance(before, fx.Node)
            and _shape(node) == _shape(before) is not None
        )
        if same or node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(before)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    for node in traced.graph.nodes:
        node.meta.clear()  # the metadata is larger than the trace


def _shape(node: fx.Node) -> torch.Size | None:
    value = node.meta.get("tensor_meta") or node.meta.get("val")
    return getattr(value, "shape", None)
