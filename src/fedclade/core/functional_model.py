"""A model and a loss as pure functions of the parameters, so that many clients' copies can be
trained in one step.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedclade.core.kernels import mlp
from fedclade.core.kernels.activation_taps import Tapped, with_taps
from fedclade.core.kernels.mlp import dense_form
from fedclade.core.pytree import Tree, tree_map
from fedclade.core.rng import hash_bits, uniform
from fedclade.core.torch_loss import TorchLoss, is_plain_cross_entropy
from fedclade.errors import InvalidInputError, VectorizationError, nearest

ExampleLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one number per example. Metrics have the same type."""


class Batch(NamedTuple):
    """The data of a step.

    Attributes:
        x: the inputs.
        y: the targets.
        weight: 1 for each example, and 0 for padding.
        key: the randomness of the step.
    """

    x: Tensor
    y: Tensor
    weight: Tensor
    key: Tensor

    @property
    def examples(self) -> Tensor:
        """The number of real examples."""
        return self.weight.sum(-1)

    def member(self, number: int) -> Batch:
        """One batch of a step that has several (`Batches.group`), with its own key."""
        return Batch(
            self.x[number], self.y[number], self.weight[number], hash_bits(self.key, number)
        )


class ClientStackedBatch(Batch):
    """The batches of many clients, one row per client. `share` is the weight of an example in the
    mean of its batch.
    """

    share: Tensor

    def __new__(
        cls, x: Tensor, y: Tensor, weight: Tensor, key: Tensor, share: Tensor | None = None
    ) -> ClientStackedBatch:
        stack = super().__new__(cls, x, y, weight, key)
        stack.share = share_of(weight) if share is None else share
        return stack

    def member(self, number: int) -> ClientStackedBatch:
        x, y, weight, share = (
            value[:, number] for value in (self.x, self.y, self.weight, self.share)
        )
        return ClientStackedBatch(x, y, weight, hash_bits(self.key, number), share)


def share_of(weight: Tensor) -> Tensor:
    """The weight of each example in the mean of its batch; 0 for padding."""
    return weight / weight.sum(-1, keepdim=True).clamp_min(1)


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """The default loss, one value per example. For a sequence of labels it is the mean over its
    positions.
    """
    if y.ndim == 1:
        return F.cross_entropy(outputs, y, reduction="none")
    return (
        F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none")
        .view(y.shape)
        .flatten(1)
        .mean(1)
    )


def accuracy(outputs: Tensor, y: Tensor) -> Tensor:
    """1 if the largest output is the label. For a sequence of labels it is the mean over its
    positions.
    """
    right = (outputs.argmax(-1) == y).to(torch.float32)
    return right if y.ndim == 1 else right.flatten(1).mean(1)


# The step's key, and a counter of the dropout layers in this forward pass: each call has its own
# mask.
_dropout: ContextVar[tuple[Tensor, Iterator[int]] | None] = ContextVar("dropout", default=None)


class _CounterDropout(nn.Module):
    """Dropout whose mask is a hash of the step's key. The mask of torch's dropout would depend on
    which clients run together.
    """

    def __init__(self, p: float, whole_channels: bool) -> None:
        super().__init__()
        self.p, self.whole_channels = p, whole_channels

    def forward(self, x: Tensor) -> Tensor:
        training = _dropout.get()
        if training is None or self.p == 0.0:
            return x
        key, calls = training
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if self.whole_channels else tuple(x.shape)
        keep = uniform(hash_bits(key, next(calls)), shape) >= self.p
        return x * keep / (1.0 - self.p) if self.p < 1 else torch.zeros_like(x)


def _with_counter_dropout(module: nn.Module, path: str = "") -> nn.Module:
    """The module with every dropout layer replaced by `_CounterDropout`."""
    if isinstance(module, nn.AlphaDropout | nn.FeatureAlphaDropout):
        raise VectorizationError(
            f"model: layer '{path}' ({type(module).__name__}) is not supported. Use nn.Dropout.",
            "model",
        )
    if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
        return _CounterDropout(module.p, not isinstance(module, nn.Dropout))
    for name, child in module._modules.items():
        if child is not None:
            module._modules[name] = _with_counter_dropout(child, f"{path}.{name}".lstrip("."))
    return module


def _example_loss(loss: ExampleLoss | None, module: nn.Module) -> ExampleLoss:
    if loss is None or is_plain_cross_entropy(loss):
        return cross_entropy
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        return TorchLoss(loss, next(module.parameters(), torch.empty(0)).device)
    if isinstance(loss, type) or not callable(loss):
        raise InvalidInputError(
            f"loss = {loss!r}: give a function of (outputs, targets) or a torch loss such as"
            " nn.MSELoss().",
            "loss",
        )
    return loss


def require_per_example(field: str, function: ExampleLoss, outputs: Tensor, y: Tensor) -> None:
    """Raise `InvalidInputError` unless a loss or metric gives each example a value of its own.

    Outputs (n, 1) and targets (n,) broadcast to (n, n): every value would then depend on all
    targets, and a wrong model would be trained without an error.

    Args:
        field: the name in the message.
        function: the loss or metric.
        outputs: the model's outputs for a few examples, of which two have different targets.
        y: the targets of these examples.
    """
    try:
        values = function(outputs, y)
        singles = torch.cat(
            [function(outputs[i : i + 1], y[i : i + 1]).reshape(-1) for i in range(len(y))]
        )
    except Exception as error:
        raise InvalidInputError(
            f"{field}: it cannot take outputs of shape {tuple(outputs.shape)} and targets of shape"
            f" {tuple(y.shape)} ({y.dtype}): {error}",
            field,
        ) from error
    if not isinstance(values, Tensor) or values.shape != y.shape[:1]:
        shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise InvalidInputError(
            f"{field}: it must give one value for each example, shape ({len(y)},), got {shape}:"
            " leave the mean out (reduction='none').",
            field,
        )
    if values.shape != singles.shape or not torch.allclose(
        values.float(), singles.float(), 1e-3, 1e-5, equal_nan=True
    ):
        raise InvalidInputError(
            f"{field}: the value of an example changes with the other examples of the batch."
            f" Outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(y.shape)} may"
            " broadcast: give both the same shape, as outputs.squeeze(1) does for one output.",
            field,
        )


class PerThread(threading.local):
    """A module with one copy per thread, since `functional_call` sets the weights of the module
    while it runs.
    """

    def __init__(self, module: nn.Module) -> None:
        self.own = copy.deepcopy(module)


class Objective:
    """What a client minimizes: `loss(params, batch)`, made from a module and a loss per example.

    Args:
        module: the model.
        loss: a function of (outputs, targets) with one value per example, or a loss module of
            torch; None for cross-entropy.
    """

    def __init__(self, module: nn.Module, loss: ExampleLoss | None = None) -> None:
        plain = _with_counter_dropout(copy.deepcopy(module)).requires_grad_(False).eval()
        self.example_loss = _example_loss(loss, module)
        # Frozen parameters stay in the module: they are neither trained nor sent.
        self.names = tuple(name for name, value in module.named_parameters() if value.requires_grad)
        if not self.names:
            raise InvalidInputError(
                "model: it has no trainable parameter. Set requires_grad for some.", "model"
            )
        # Tracing would skip our dropout.
        drops = any(isinstance(part, _CounterDropout) for part in plain.modules())
        self._dense = None if drops else dense_form(plain, self.names)
        with_taps(plain, self.names)
        self._in_use, self._in_training = PerThread(plain), PerThread(copy.deepcopy(plain).train())
        self._tapped = Tapped(self.outputs, self._stacked_losses)
        self.programs: dict[Hashable, Any] = {}  # see core/program_cache.py

    @property
    def module(self) -> nn.Module:
        """This thread's copy of the module, in evaluation mode."""
        return self._in_use.own

    def params(self) -> Tree:
        """The module's weights: the initial model of the federation."""
        values = dict(self.module.named_parameters())
        return {name: values[name].detach().clone() for name in self.names}

    def outputs(self, params: Tree, x: Tensor, key: Tensor | None = None) -> Tensor:
        """The model's outputs. With a key, dropout is on."""
        token = _dropout.set(None if key is None else (key, count()))
        try:
            result: Tensor = functional_call(
                (self._in_use if key is None else self._in_training).own, params, (x,)
            )
            return result
        finally:
            _dropout.reset(token)

    def features(self, params: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the last linear layer, and the model's outputs."""
        captured: list[Tensor] = []
        hook = self.head_layer().register_forward_pre_hook(
            lambda _, inputs: captured.append(inputs[0])
        )
        try:
            outputs = self.outputs(params, x)
        finally:
            hook.remove()
        return captured[-1], outputs

    def head_layer(self) -> nn.Linear:
        """The model's head: its last linear layer."""
        layers = [layer for layer in self.module.modules() if isinstance(layer, nn.Linear)]
        if not layers:
            raise InvalidInputError(
                "model: it has no linear layer, so its features and its last layer's gradient are"
                " not defined. Use a model with nn.Linear, or another method.",
                "model",
            )
        return layers[-1]

    def head_param_names(self) -> tuple[str, ...]:
        """The names of the last linear layer's parameters."""
        last = self.head_layer()
        layer = next(name for name, module in self.module.named_modules() if module is last)
        return self.param_names_under([layer]) if layer else self.names  # the model is that layer

    def param_names_under(self, layers: Sequence[str]) -> tuple[str, ...]:
        """The names of the parameters of these layers. `layers` may also name single parameters."""
        for layer in layers:
            if not any(name == layer or name.startswith(f"{layer}.") for name in self.names):
                every = dict.fromkeys(name.rpartition(".")[0] or name for name in self.names)
                raise InvalidInputError(
                    f"layer '{layer}': the model has no trainable parameter of that"
                    f" name.{nearest(layer, every)}",
                    layer,
                )
        return tuple(
            name
            for name in self.names
            if any(name == layer or name.startswith(f"{layer}.") for layer in layers)
        )

    def loss(self, params: Tree, batch: Batch) -> Tensor:
        """The mean loss of the real examples of a batch."""
        losses = self.example_loss(self.outputs(params, batch.x, batch.key), batch.y)
        return (losses * batch.weight).sum() / batch.examples.clamp_min(1)

    def _stacked_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.example_loss is cross_entropy:  # per example, so clients can be flattened
            return cross_entropy(outputs.flatten(0, 1), y.flatten(0, 1)).view(y.shape[:2])
        losses: Tensor = vmap(self.example_loss)(outputs, y)
        return losses

    def add_scaled_gradient(
        self, base: Tree, scale: Tensor, params: Tree, batch: Batch, overwrite: bool = False
    ) -> Tree:
        """base + scale · the gradient of `loss` at `params`: the core of every training step.

        Args:
            base: the tree to add to.
            scale: the factor; for a `ClientStackedBatch` one number or one per client.
            params: where the gradient is taken.
            batch: the batch of one client, or a `ClientStackedBatch`.
            overwrite: whether the result may use the memory of `base`.
        """
        if not isinstance(batch, ClientStackedBatch):
            return tree_map(lambda base, g: base + scale * g, base, grad(self.loss)(params, batch))
        share = batch.share * scale.view(-1, 1)
        if self._dense is not None and (self._dense.flattens or batch.x.ndim == 3):
            loss = None if self.example_loss is cross_entropy else self.example_loss
            return mlp.add_scaled_gradient(
                self._dense, loss, base, params, batch.x, batch.y, share, overwrite
            )
        return self._tapped.add_scaled_gradient(base, params, batch, share, overwrite)

    def gradient(self, params: Tree, batch: Batch) -> Tree:
        """The gradient of `loss`, for one client or a `ClientStackedBatch`."""
        return self.add_scaled_gradient(
            tree_map(torch.zeros_like, params),
            batch.weight.new_ones(()),
            params,
            batch,
            overwrite=True,
        )

    def checked_outputs(self, x: Tensor) -> Tensor:
        """The outputs for a few inputs. Raises an error if the model cannot take them."""
        _refuse_running_statistics(self.module)
        with _layer_of_failure(self.module) as where:
            try:
                return self.outputs(self.params(), x)
            except Exception as error:
                raise InvalidInputError(
                    f"model{where()}: it cannot take inputs of shape {tuple(x.shape[1:])}: {error}",
                    "model",
                ) from error

    def check(self, x: Tensor, y: Tensor) -> None:
        """Raise an error if the model or the loss cannot run on these data or on several clients at
        once.
        """
        require_per_example("loss", self.example_loss, self.checked_outputs(x), y)
        self._check_vectorized(x, y)

    def _check_vectorized(self, x: Tensor, y: Tensor) -> None:
        def twice(value: Tensor) -> Tensor:
            return torch.stack([value, value])

        two = {name: twice(value) for name, value in self.params().items()}
        batch = Batch(
            twice(x),
            twice(y),
            twice(torch.ones(len(y), device=x.device)),
            torch.arange(2, device=x.device),
        )

        def total(params: Tree, batch: Batch) -> Tensor:
            return self.outputs(params, batch.x, batch.key).sum()

        with _layer_of_failure(self._in_training.own) as where:
            try:
                vmap(grad(total))(two, batch)
            except Exception as error:
                raise VectorizationError(_why_not(error, f"model{where()}"), "model") from error
        try:
            vmap(grad(self.loss))(two, batch)
        except Exception as error:
            raise VectorizationError(_why_not(error, "loss"), "loss") from error


def _refuse_running_statistics(module: nn.Module) -> None:
    for name, child in module.named_modules():
        if getattr(child, "track_running_stats", False):
            kind = type(child).__name__
            channels = getattr(child, "num_features", "channels")
            raise VectorizationError(
                f"model: layer '{name}' ({kind}) keeps running statistics, which belong to no"
                f" client and cannot be averaged: use nn.GroupNorm(groups, {channels}), or"
                f" {kind}(…, track_running_stats=False) for the statistics of each batch.",
                "model",
            )


def _why_not(error: Exception, what: str) -> str:
    text = str(error)
    if "randomness" in text:
        return (
            f"{what}: it draws random numbers with torch's generator, as"
            " torch.nn.functional.dropout does. Use the module nn.Dropout."
        )
    if "data-dependent" in text or "item()" in text:
        return (
            f"{what}: it branches on the values of a tensor (if, while, .item()), so clients cannot"
            " share a step. Use torch.where."
        )
    return (
        f"{what}: torch.func.vmap cannot run it on several clients at once: {text.splitlines()[0]}"
    )


@contextmanager
def _layer_of_failure(module: nn.Module) -> Iterator[Callable[[], str]]:
    """Track which layer is running, so that an error can name it."""
    running: list[str] = []
    hooks = []
    for name, child in module.named_modules():
        if name:
            label = f"layer '{name}' ({type(child).__name__.removeprefix('_')})"
            hooks.append(
                child.register_forward_pre_hook(lambda *_, label=label: running.append(label))
            )
            hooks.append(child.register_forward_hook(lambda *_: running.pop() and None))
    try:
        yield lambda: f", {running[-1]}" if running else ""
    finally:
        for hook in hooks:
            hook.remove()
