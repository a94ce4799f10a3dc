"""Gradients of any model for a stack of clients, without storing the gradient of a large weight.

The gradient of a linear layer's weight is a product of its inputs and the error of its outputs.
Autograd would store it, as large as the weights of all clients, then scale and add it. Here a
tensor of zeros, the tap, is attached to the layer's outputs: its gradient is the error, and a
single product adds the weight's gradient to its target. Small convolutions on CUDA work the same
way with im2col inputs (im2col.py); large ones run client by client (per_client_convolution.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from fedclade.core.inputs import Inputs, select, tensors_of
from fedclade.core.kernels.im2col import Convolution, in_columns, weight_gradient
from fedclade.core.kernels.mlp import add_product, add_sum, plus
from fedclade.core.kernels.per_client_convolution import (
    PerClientConvolution,
    is_large,
    settings_of,
)
from fedclade.core.pytree import Tree, tree_index

if TYPE_CHECKING:
    from fedclade.core.functional_model import Batch


_Kind: TypeAlias = tuple[torch.Size, torch.dtype]


class _Attach(torch.autograd.Function):
    """outputs + tap, for a tap of zeros: the gradient of the tap is that of the outputs."""

    generate_vmap_rule = True

    @staticmethod
    def forward(outputs: Tensor, tap: Tensor) -> Tensor:
        return outputs.view_as(outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor, Tensor]:
        return error, error


class _Passing:
    """One forward pass of one client: the tap and the inputs of each tapped layer."""

    def __init__(self, taps: Tree) -> None:
        self.taps = taps
        self.inputs: Tree = {}
        self.outputs: dict[str, _Kind] = {}
        self.calls: Counter[str] = Counter()

    def through(self, layer: str, inputs: Tensor, outputs: Tensor) -> Tensor:
        self.calls[layer] += 1
        self.outputs[layer] = (outputs.shape, outputs.dtype)
        if layer not in self.taps:
            return outputs
        self.inputs[layer] = inputs
        attached: Tensor = _Attach.apply(outputs, self.taps[layer])  # type: ignore[no-untyped-call]
        return attached


_passing: ContextVar[_Passing | None] = ContextVar("passing", default=None)


def in_stacked_pass() -> bool:
    """Whether a model runs on a stack of clients whose gradients autograd takes outside of vmap.
    Only there a kernel needs no gradient inside vmap.
    """
    return _passing.get() is not None


class _Linear(nn.Linear):
    path: str

    def forward(self, x: Tensor) -> Tensor:
        outputs = F.linear(x, self.weight, self.bias)
        passing = _passing.get()
        return outputs if passing is None else passing.through(self.path, x, outputs)


class _Conv2d(nn.Conv2d):
    path: str

    def forward(self, x: Tensor) -> Tensor:
        passing = _passing.get()
        if passing is None or not in_columns(x):
            return super().forward(x)
        is_plain = _is_plain(self)
        alone = is_large(self, x, columns=is_plain)
        if not alone and not is_plain:
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):  # autocast has no rule for these functions
            x, weight = x.bfloat16(), weight.bfloat16()
            bias = None if bias is None else bias.bfloat16()
        if alone:
            outputs: Tensor = PerClientConvolution.apply(x, weight, settings_of(self))  # type: ignore[no-untyped-call]
            return outputs if bias is None else outputs + bias[:, None, None]
        assert not isinstance(self.padding, str)
        x, weight = x.movedim(1, -1), weight.permute(0, 2, 3, 1)
        if more := _missing_channels(x):
            x, weight = F.pad(x, (0, more)), F.pad(weight, (0, more))
        outputs, columns = Convolution.apply(x, weight, *self.padding)  # type: ignore[no-untyped-call]
        outputs = outputs if bias is None else outputs + bias
        return passing.through(self.path, columns, outputs).movedim(-1, 1)


def with_taps(module: nn.Module, trained: tuple[str, ...]) -> tuple[str, ...]:
    """Add taps to the layers of `module` that can have one, in place, and return their names.

    These are linear layers and convolutions whose weight is trained and not shared.
    """
    holders = Counter(id(value) for _, value in module.named_parameters(remove_duplicate=False))
    tapped: list[str] = []
    for path, layer in module.named_modules():
        if f"{path}.weight" not in trained or any(
            holders[id(value)] > 1 for value in layer.parameters()
        ):
            continue
        # Only the class changes: the layer keeps its parameters, names and hooks.
        if type(layer) is nn.Linear:
            layer.__class__ = _Linear
        elif (
            type(layer) is nn.Conv2d
            and layer.padding_mode == "zeros"
            and not isinstance(layer.padding, str)
        ):
            layer.__class__ = _Conv2d
        else:
            continue
        layer.path = path
        tapped.append(path)
    return tuple(tapped)


def _add_gradient(base: Tensor, error: Tensor, rows: Tensor, overwrite: bool) -> Tensor:
    """base + the gradient of a weight, from the error and the inputs of its layer."""
    if base.ndim == 3:
        return add_product(base, error, rows, overwrite)
    clients, out, channels, *kernel = base.shape
    gradient = weight_gradient(error, rows).view(clients, out, *kernel, -1)[..., :channels]
    return plus(base, gradient.movedim(-1, 2), overwrite)


def _missing_channels(x: Tensor) -> int:
    """How many zero channels make the columns of x (…, channels) fit tensor cores, which take four
    float32 at once. One or two channels would need too many.
    """
    return -x.shape[-1] % 4 if x.shape[-1] > 2 else 0


def _is_plain(layer: nn.Conv2d) -> bool:
    """Whether a convolution can be computed in columns."""
    return layer.groups == 1 and set(layer.dilation) == set(layer.stride) == {1}


class Tapped:
    """The gradients of one model whose layers have taps.

    Args:
        outputs: (params, x, key, weight) -> the model's outputs for one client, and its new
            running statistics.
        losses: (stack of outputs, stack of targets) -> (K, B) losses.
        statistics: the names of the running statistics.
    """

    def __init__(
        self,
        outputs: Callable[[Tree, Inputs, Tensor, Tensor], tuple[Tensor, Tree]],
        losses: Callable[[Tensor, Tensor], Tensor],
        statistics: tuple[str, ...] = (),
    ) -> None:
        self._outputs, self._losses, self._statistics = outputs, losses, statistics
        self._known: dict[tuple[torch.Size, ...], dict[str, _Kind]] = {}

    def add_scaled_gradient(
        self, base: Tree, params: Tree, batch: Batch, share: Tensor, overwrite: bool
    ) -> Tree:
        """For K clients, base + the gradient at `params` of the sum of a batch's losses, each times
        its `share` (K, B).

        `overwrite`: the result may use the memory of `base`.
        """
        clients = len(share)
        taps = {
            layer: share.new_zeros((), dtype=dtype).expand(clients, *shape).requires_grad_()
            for layer, (shape, dtype) in self._kinds(params, batch).items()
        }
        by_product = {f"{layer}.{kind}" for layer in taps for kind in ("weight", "bias")}
        others = {
            name: params[name].detach().requires_grad_()
            for name in base
            if name not in by_product and name not in self._statistics
        }

        def forward(
            params: Tree, taps: Tree, x: Inputs, key: Tensor, weight: Tensor
        ) -> tuple[Tensor, Tree, Tree]:
            passing = _Passing(taps)
            outputs, statistics = self._pass(params, x, key, weight, passing)
            return outputs, passing.inputs, statistics

        # Clients do not mix, so the gradient of the sum over them is each one's own: autograd runs
        # on the stack itself, without vmap.
        with torch.enable_grad():
            outputs, inputs, statistics = vmap(forward)(
                params | others, taps, batch.x, batch.key, batch.weight
            )
            total = (self._losses(outputs, batch.y) * share).sum()
            gradients = torch.autograd.grad(
                total, [*taps.values(), *others.values()], materialize_grads=True
            )
        result: Tree = {name: value.detach() for name, value in statistics.items()}
        for layer, error in zip(taps, gradients, strict=False):
            flat = error.reshape(clients, math.prod(error.shape[1:-1]), error.shape[-1])
            rows = inputs[layer].detach().reshape(clients, flat.shape[1], -1)
            result[f"{layer}.weight"] = _add_gradient(
                base[f"{layer}.weight"], flat, rows, overwrite
            )
            if f"{layer}.bias" in base:
                result[f"{layer}.bias"] = add_sum(base[f"{layer}.bias"], flat, overwrite)
        for name, gradient in zip(others, gradients[len(taps) :], strict=True):
            result[name] = plus(base[name], gradient, overwrite)
        return {name: result[name] for name in base}

    def _pass(
        self, params: Tree, x: Inputs, key: Tensor, weight: Tensor, passing: _Passing
    ) -> tuple[Tensor, Tree]:
        token = _passing.set(passing)
        try:
            return self._outputs(params, x, key, weight)
        finally:
            _passing.reset(token)

    def _kinds(self, params: Tree, batch: Batch) -> dict[str, _Kind]:
        """The shape and dtype of each tap for such a batch. Only layers that are used once have a
        tap; autograd handles the others.
        """
        kind = tuple(value.shape[1:] for value in tensors_of(batch.x))
        if kind not in self._known:
            passing = _Passing({})
            with torch.no_grad():
                self._pass(
                    tree_index(params, torch.tensor(0)),
                    select(batch.x, 0),
                    batch.key[0],
                    batch.weight[0],
                    passing,
                )
            self._known[kind] = {
                layer: output
                for layer, output in passing.outputs.items()
                if passing.calls[layer] == 1
            }
        return self._known[kind]
