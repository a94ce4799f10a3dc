"""Gradients of dense networks by hand, for many clients at once on the CPU.

A chain of linear layers and ReLUs has a backward pass of two matrix products a layer. Written out for a stack of clients, the product
that makes a layer's gradient can add it to what it changes in the same pass over memory, which autograd cannot: a step of local
training then reads and writes the weights once, and that is what it costs on a CPU (benchmarks/engine.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import grad, vmap

from fedclade.client.tree import Tree

if TYPE_CHECKING:
    from fedclade.client.objective import ExampleLoss


class Layer(NamedTuple):
    """A linear layer, by the names of its parameters, and whether a ReLU follows it."""

    weight: str
    bias: str | None
    relu: bool


class Dense(NamedTuple):
    """A network that is nothing but linear layers, all trained, with ReLUs between, and whether it flattens its inputs first."""

    layers: tuple[Layer, ...]
    flattens: bool


def dense_form(module: nn.Module, trained: tuple[str, ...]) -> Dense | None:
    """What a module is, if it is a dense network; None for any other module."""
    try:
        nodes = list(fx.symbolic_trace(module).graph.nodes)
    except Exception:  # whatever a module does that cannot be traced, it is no plain chain
        return None
    layers: list[Layer] = []
    flattens = False
    modules = dict(module.named_modules())
    for before, node in pairwise(nodes):
        if node.all_input_nodes != [before] or len(before.users) != 1:
            return None
        part = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(part, nn.Linear):
            bias = f"{node.target}.bias" if part.bias is not None else None
            layers.append(Layer(f"{node.target}.weight", bias, relu=False))
        elif layers and _is_relu(node, part):
            layers[-1] = layers[-1]._replace(relu=True)
        elif not layers and _is_flatten(node, part):
            flattens = True
        elif node.op != "output":
            return None
    used = [name for layer in layers for name in (layer.weight, layer.bias) if name is not None]
    return Dense(tuple(layers), flattens) if sorted(used) == sorted(trained) else None


def _is_relu(node: fx.Node, part: nn.Module | None) -> bool:
    return isinstance(part, nn.ReLU) or node.target in (F.relu, torch.relu) or (node.op == "call_method" and node.target == "relu")


def _is_flatten(node: fx.Node, part: nn.Module | None) -> bool:
    if isinstance(part, nn.Flatten):
        return part.start_dim == 1 and part.end_dim == -1
    named = node.target is torch.flatten or (node.op == "call_method" and node.target == "flatten")
    return named and (node.args[1:] == (1,) or dict(node.kwargs) == {"start_dim": 1})


def plus_gradient(dense: Dense, loss: ExampleLoss | None, base: Tree, params: Tree, x: Tensor, y: Tensor, weight: Tensor) -> Tree:
    """base + the gradient at `params` of the sum of a batch's losses times their weights; under vmap for a stack of clients.

    loss: None is cross-entropy.
    """
    names = tuple(base)
    values = (*base.values(), *(params[name] for name in names))
    out = _PlusGradient.apply(_Form(dense.layers, loss, names), x, y, weight, *values)  # type: ignore[no-untyped-call]
    return dict(zip(names, out, strict=True))


@dataclass(frozen=True, slots=True)
class _Form:
    """What is no tensor, in one piece: vmap would look into tuples for tensors, at every step."""

    layers: tuple[Layer, ...]
    loss: ExampleLoss | None
    names: tuple[str, ...]


class _PlusGradient(torch.autograd.Function):
    """The bridge from one client's view to the stack: under vmap its rule gets the stacked tensors."""

    @staticmethod
    def forward(form: _Form, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(value[0] for value in _stacked(form, *(value[None] for value in tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], form: _Form, *tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        stacked = [
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in zip(tensors, in_dims[1:], strict=True)
        ]
        return _stacked(form, *stacked), (0,) * len(form.names)


def _stacked(form: _Form, x: Tensor, y: Tensor, weight: Tensor, *trees: Tensor) -> tuple[Tensor, ...]:
    """The same for K clients: x (K, B, …), the parameters (K, …)."""
    layers, count = form.layers, len(form.names)
    base, params = dict(zip(form.names, trees[:count], strict=True)), dict(zip(form.names, trees[count:], strict=True))
    inputs = [x.flatten(2)]
    for layer in layers:
        product = inputs[-1] @ params[layer.weight].mT
        if layer.bias is not None:
            product += params[layer.bias][:, None]
        inputs.append(product.relu_() if layer.relu else product)
    error = _cross_entropy_error(inputs[-1], y, weight) if form.loss is None else _error(form.loss, inputs[-1], y, weight)
    result: Tree = {}
    for number in reversed(range(len(layers))):
        layer = layers[number]
        if layer.relu:
            error = error * (inputs[number + 1] > 0)
        result[layer.weight] = torch.baddbmm(base[layer.weight], error.mT, inputs[number])
        if layer.bias is not None:
            result[layer.bias] = base[layer.bias] + error.sum(1)
        if number:
            error = error @ params[layer.weight]
    return tuple(result[name] for name in form.names)


def _cross_entropy_error(outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Softmax less one for the label, times what the example counts for."""
    error = outputs.softmax(2)
    at = y[..., None]
    error.scatter_add_(2, at, torch.full_like(at, -1, dtype=error.dtype))
    return error.mul_(weight[..., None])


def _error(loss: ExampleLoss, outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    def total(outputs: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return (loss(outputs, y) * weight).sum()

    error: Tensor = vmap(grad(total))(outputs, y, weight)
    return error
