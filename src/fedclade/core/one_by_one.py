"""Functions that torch.func.vmap cannot run on many clients at once: one client after another.

A model may branch on the values of a tensor, call `.item()`, draw random numbers or use an operator
that vmap does not know. `one_by_one` makes such a function look like any other: under vmap it runs
on each client's own tensors, and its gradients come from ordinary autograd.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Function: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""Tensors -> tensors."""


def one_by_one(function: Function, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`function(*tensors)`, for each client alone where `tensors` are stacks of clients."""
    results: tuple[Tensor, ...] = _OneByOne.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return results


def _rows(
    apply: Callable[..., Any],
    clients: int,
    dims: tuple[int | None, ...],
    function: Any,
    tensors: Any,
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The vmap rule: `apply` for each client, and the results as stacks."""
    rows = [
        apply(
            function,
            *(
                value if dim is None else value.select(dim, row)
                for value, dim in zip(tensors, dims, strict=True)
            ),
        )
        for row in range(clients)
    ]
    stacks = tuple(torch.stack(values) for values in zip(*rows, strict=True))
    return stacks, (0,) * len(stacks)


def refuse_tracing() -> None:
    """Raise an error inside a trace, which would hold the branches, the sizes and the random
    numbers of one batch.
    """
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")  # the import takes seconds
    if tracer is not None and tracer.get_proxy_mode() is not None:
        raise RuntimeError("a function that runs client by client cannot be traced")


class _OneByOne(torch.autograd.Function):
    @staticmethod
    def forward(function: Function, *tensors: Tensor) -> tuple[Tensor, ...]:
        refuse_tracing()
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        function, *tensors = inputs
        ctx.function = function
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        wanted = tuple(place for place in range(len(tensors)) if ctx.needs_input_grad[place + 1])
        gradients = _Gradients.apply((ctx.function, wanted, len(tensors)), *tensors, *errors)  # type: ignore[no-untyped-call]
        by_place = dict(zip(wanted, gradients, strict=True))
        return None, *(by_place.get(place) for place in range(len(tensors)))

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], function: Function, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _rows(_OneByOne.apply, info.batch_size, in_dims[1:], function, tensors)


class _Gradients(torch.autograd.Function):
    """The gradients of `function`, by running it again with ordinary autograd."""

    @staticmethod
    def forward(
        request: tuple[Function, tuple[int, ...], int], *values: Tensor
    ) -> tuple[Tensor, ...]:
        function, wanted, count = request
        tensors = [value.detach() for value in values[:count]]
        for place in wanted:
            tensors[place].requires_grad_()
        with torch.enable_grad():
            results = function(*tensors)
        pairs = [
            (result, error)
            for result, error in zip(results, values[count:], strict=True)
            if result.requires_grad
        ]
        return torch.autograd.grad(
            [result for result, _ in pairs],
            [tensors[place] for place in wanted],
            [error for _, error in pairs],
            materialize_grads=True,
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass  # there are no second derivatives

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], request: Any, *values: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        return _rows(_Gradients.apply, info.batch_size, in_dims[1:], request, values)
