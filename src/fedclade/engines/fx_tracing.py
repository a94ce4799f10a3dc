"""Steps on the CPU with less Python: a program's step is traced once for each width of a stack into
a plain list of torch's operations.

A step of a few small models is over in a millisecond, and vmap, autograd and the Python around them
take half as long again. The list has what they came to: the same operations on the same numbers, so
that it makes no difference to a result when a step is traced.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fedclade.core.functional_model import ClientStackedBatch
from fedclade.core.program import StackStep, Step, batch_step
from fedclade.core.pytree import Tree, shapes, tree_map
from fedclade.engines.compile_cache import LazyLRUCache

# a step is traced once it has been made so often: to trace it takes as long as about fifty
TRACE_AFTER = 30
# steps that a process makes before it loads what tracing needs, which takes two seconds: a node's
# may be over by then
WARMUP_STEPS = 10_000
KEPT = 64

# These give what they got, where the shape stays the same.
_SAME: set[Any] = {
    torch.ops.aten.view.default,
    torch.ops.aten.expand.default,
    torch.ops.aten._unsafe_view.default,
}


class TraceCache:
    """The traced steps of a federation."""

    def __init__(self) -> None:
        self._kept: LazyLRUCache[StackStep] = LazyLRUCache(after=TRACE_AFTER, most=KEPT)
        self._made = 0

    def step(
        self,
        step: Step,
        steps: int,
        broadcast: Tree,
        const: Tree,
        carry: Tree,
        batch: ClientStackedBatch,
    ) -> StackStep:
        """What to run for so many steps on stacks like these."""
        if batch.weight.device.type != "cpu":  # there, steps are captured
            return batch_step(step)
        self._made += steps
        if self._made < WARMUP_STEPS and "torch._inductor" not in sys.modules:
            return batch_step(step)
        what = (step, shapes(broadcast, const, carry, batch._asdict()))
        return self._kept.get(
            what, lambda: _trace(step, broadcast, const, carry, batch), steps
        ) or batch_step(step)


def _flat(broadcast: Tree, const: Tree, carry: Tree, batch: ClientStackedBatch) -> list[Tensor]:
    return [*broadcast.values(), *const.values(), *carry.values(), *batch, batch.share]


def _trace(
    step: Step, broadcast: Tree, const: Tree, carry: Tree, batch: ClientStackedBatch
) -> StackStep | None:
    """The step as a list of operations, or None where it cannot be had."""
    run = batch_step(step)
    names = list(run(broadcast, const, tree_map(torch.clone, carry), batch))

    def flat(*values: Tensor) -> list[Tensor]:
        left = iter(values)
        params, fixed, moving = (
            {name: next(left) for name in tree} for tree in (broadcast, const, carry)
        )
        after = run(params, fixed, moving, ClientStackedBatch(*left))
        return [after[name] for name in names]

    try:
        traced = make_fx(flat)(
            *_flat(broadcast, const, tree_map(torch.clone, carry), batch)
        )  # tracing runs it, and it writes into the carry
    except Exception:  # whatever a model does that cannot be traced, it can be run
        return None
    _shorten(traced)

    def again(broadcast: Tree, const: Tree, carry: Tree, batch: ClientStackedBatch) -> Tree:
        return dict(zip(names, traced(*_flat(broadcast, const, carry, batch)), strict=True))

    return again


def _shorten(traced: fx.GraphModule) -> None:
    """Leave out what changes nothing."""
    for node in traced.graph.nodes:
        before = node.args[0] if node.args else None
        same = (
            node.target in _SAME
            and isinstance(before, fx.Node)
            and _shape(node) == _shape(before) is not None
        )
        if same or node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(before)
    traced.graph.eliminate_dead_code()
    traced.recompile()
    for node in traced.graph.nodes:
        node.meta.clear()  # what tracing noted down is larger than the trace


def _shape(node: fx.Node) -> torch.Size | None:
    about = node.meta.get("tensor_meta") or node.meta.get("val")
    return getattr(about, "shape", None)
