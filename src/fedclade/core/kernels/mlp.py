"""Gradients of dense networks by hand, for many clients at once.

A chain of linear layers and ReLUs has a backward pass of two matrix products a layer. Written out
for a stack of clients, the product that makes a layer's gradient adds it to what it changes in the
same pass over memory. Other models have that from activation_taps.py; this module also saves the
overhead of autograd (benchmarks/engine.py).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import grad, vmap

from fedclade.core.pytree import Tree

if TYPE_CHECKING:
    from fedclade.core.losses import ExampleLoss


class Layer(NamedTuple):
    """A linear layer, by the names of its parameters, and whether a ReLU follows it."""

    weight: str
    bias: str | None
    relu: bool


class Dense(NamedTuple):
    """A network of linear layers, all trained, with ReLUs between, and whether it flattens its
    inputs first.
    """

    layers: tuple[Layer, ...]
    flattens: bool


def dense_form(module: nn.Module, trained: tuple[str, ...]) -> Dense | None:
    """The layers of a module that is a dense network; None for any other module."""
    try:
        nodes = list(fx.symbolic_trace(module).graph.nodes)
    except Exception:  # a module that cannot be traced is not a plain chain
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
    return (
        isinstance(part, nn.ReLU)
        or node.target in (F.relu, torch.relu)
        or (node.op == "call_method" and node.target == "relu")
    )


def _is_flatten(node: fx.Node, part: nn.Module | None) -> bool:
    if isinstance(part, nn.Flatten):
        return part.start_dim == 1 and part.end_dim == -1
    named = node.target is torch.flatten or (node.op == "call_method" and node.target == "flatten")
    return named and (node.args[1:] == (1,) or dict(node.kwargs) == {"start_dim": 1})


def add_scaled_gradient(
    dense: Dense,
    loss: ExampleLoss | None,
    base: Tree,
    params: Tree,
    x: Tensor,
    y: Tensor,
    share: Tensor,
    overwrite: bool,
    bf16: bool = False,
) -> Tree:
    """For K clients, base + the gradient at `params` of the sum of a batch's losses, each times its
    `share`.

    x (K, B, …), y and share (K, B), the parameters (K, …). loss: None is cross-entropy. overwrite:
    the result may take base's memory. bf16: the products are in bfloat16, the loss and the result
    are not.
    """
    layers = dense.layers
    if bf16:
        x, params = x.bfloat16(), {name: value.bfloat16() for name, value in params.items()}
    inputs = [x.flatten(2)]
    for layer in layers:
        product = _product(
            inputs[-1],
            params[layer.weight].mT,
            params[layer.bias] if layer.bias is not None else None,
        )
        inputs.append(product.relu_() if layer.relu else product)
    outputs = inputs[-1].float() if bf16 else inputs[-1]
    error = (
        _cross_entropy_error(outputs, y, share) if loss is None else _error(loss, outputs, y, share)
    ).to(inputs[-1].dtype)
    result: Tree = {}
    for number in reversed(range(len(layers))):
        layer, layer_error = layers[number], error
        if layer.relu:
            layer_error = torch.ops.aten.threshold_backward(layer_error, inputs[number + 1], 0)
        if number:  # before the weights change: `base` may be `params`
            error = layer_error @ params[layer.weight]
        result[layer.weight] = add_product(
            base[layer.weight], layer_error, inputs[number], overwrite
        )
        if layer.bias is not None:
            result[layer.bias] = add_sum(base[layer.bias], layer_error, overwrite)
    return {name: result[name] for name in base}


def _product(rows: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
    return rows @ matrix if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, matrix)


def add_product(base: Tensor, error: Tensor, inputs: Tensor, overwrite: bool) -> Tensor:
    """base (K, out, in) + errorᵀ inputs, for error (K, N, out) and inputs (K, N, in): the gradient
    of a weight, in one pass over it.
    """
    if error.dtype != base.dtype:  # the product has the precision of the error, the sum has base's
        return plus(base, error.mT @ inputs.to(error.dtype), overwrite)
    return base.baddbmm_(error.mT, inputs) if overwrite else torch.baddbmm(base, error.mT, inputs)


def add_sum(base: Tensor, error: Tensor, overwrite: bool) -> Tensor:
    """base (K, out) + the sum of error (K, N, out): the gradient of a bias."""
    return plus(base, error.sum(1, dtype=base.dtype), overwrite)


def plus(base: Tensor, gradient: Tensor, overwrite: bool) -> Tensor:
    return base.add_(gradient) if overwrite else base + gradient


def _cross_entropy_error(outputs: Tensor, y: Tensor, share: Tensor) -> Tensor:
    """Softmax minus one-hot label, times the example's share."""
    return (
        outputs.softmax(2).scatter_(2, y.unsqueeze(2), -1.0, reduce="add").mul_(share.unsqueeze(2))
    )


def _error(loss: ExampleLoss, outputs: Tensor, y: Tensor, share: Tensor) -> Tensor:
    def total(outputs: Tensor, y: Tensor, share: Tensor) -> Tensor:
        return (loss(outputs, y) * share).sum()

    error: Tensor = vmap(grad(total))(outputs, y, share)
    return error
