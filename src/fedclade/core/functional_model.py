"""A model and a loss as pure functions of the parameters, so that many clients' copies can be
trained in one step.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
from fedclade.core.pytree import Tree
from fedclade.core.rng import hash_bits, uniform
from fedclade.core.running_statistics import MaskedBatchNorm, batch_norm_names, statistic_names
from fedclade.core.torch_loss import TorchLoss, is_plain_cross_entropy
from fedclade.errors import InvalidInputError, VectorizationError, nearest

ExampleLoss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one number per example. Metrics have the same type."""


class Batch(NamedTuple):
    """The data of a step. `weight` is 0 for padding; `key` is the randomness of the step."""

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
            f"model: layer '{path}' ({type(module).__name__}) is not supported: use nn.Dropout."
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
    """What a client minimises: `loss(params, batch)`, made from a module and a loss per example.

    Args:
        module: the model.
        loss: a function of (outputs, targets) with one value per example, or a loss module of
            torch; None for cross-entropy.
        x: a few inputs, on which buffers are found that training changes; None to look only for
            the running statistics of BatchNorm and InstanceNorm.

    Attributes:
        trained: the names of the trained weights.
        statistics: the names of the running statistics.
        names: all names of a model's tree: `trained` and `statistics`.
    """

    def __init__(
        self, module: nn.Module, loss: ExampleLoss | None = None, x: Tensor | None = None
    ) -> None:
        plain = _with_counter_dropout(copy.deepcopy(module)).requires_grad_(False).eval()
        self.example_loss = _example_loss(loss, module)
        # Frozen parameters stay in the module: they are neither trained nor sent.
        self.trained = tuple(
            name for name, value in module.named_parameters() if value.requires_grad
        )
        self.statistics = statistic_names(module, x)
        self.batch_norm = batch_norm_names(module, self.trained)
        self.names = (*self.trained, *self.statistics)
        self._dtypes = {
            name: value.dtype
            for name, value in module.named_buffers()
            if name in self.statistics and not value.is_floating_point()
        }
        self._has_batch_norm = any(
            isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()
        )
        if not self.trained:
            raise InvalidInputError(
                "model: it has no trainable parameter, so there is nothing to train."
            )
        # Tracing would skip our dropout.
        drops = any(isinstance(part, _CounterDropout) for part in plain.modules())
        self._dense = None if drops else dense_form(plain, self.trained)
        with_taps(plain, self.trained)
        self._in_use, self._in_training = PerThread(plain), PerThread(copy.deepcopy(plain).train())
        self._tapped = Tapped(self.training_outputs, self._stacked_losses, self.statistics)
        self.programs: dict[Hashable, Any] = {}  # see core/program_cache.py

    @property
    def module(self) -> nn.Module:
        """This thread's copy of the module, in evaluation mode."""
        return self._in_use.own

    def params(self) -> Tree:
        """The module's weights and running statistics: the initial model of the federation."""
        values = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {
            # Counters are averaged too, so they are numbers of float32 in a tree.
            name: values[name].detach().to(torch.float32 if name in self._dtypes else None).clone()
            for name in self.names
        }

    def outputs(self, params: Tree, x: Tensor, key: Tensor | None = None) -> Tensor:
        """The model's outputs. With a key it is in training mode, with dropout."""
        if key is not None:
            return self.training_outputs(params, x, key, torch.ones(len(x), device=x.device))[0]
        return self._call(self._in_use.own, self._as_buffers(params), x)

    def training_outputs(
        self, params: Tree, x: Tensor, key: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tree]:
        """The model's outputs in training mode, with dropout, and its new running statistics.

        Args:
            params: the weights and running statistics.
            x: the inputs of one client's batch.
            key: the randomness of dropout.
            weight: the weight of each example, 0 for padding.
        """
        values = self._as_buffers(params)
        values |= {name: values[name].clone() for name in self.statistics}
        token = _dropout.set((key, count()))
        try:
            with MaskedBatchNorm(weight) if self._has_batch_norm else nullcontext():
                outputs = self._call(self._in_training.own, values, x)
        finally:
            _dropout.reset(token)
        # functional_call leaves the new values of buffers in `values`.
        return outputs, {
            name: values[name].detach().to(params[name].dtype) for name in self.statistics
        }

    def _as_buffers(self, params: Tree) -> Tree:
        """The tree with counters as the integers that the module expects."""
        return params | {
            name: params[name].round().to(dtype) for name, dtype in self._dtypes.items()
        }

    @staticmethod
    def _call(module: nn.Module, values: Tree, x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(module, values, (x,))
        return outputs

    def features(self, params: Tree, x: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs of the last linear layer, and the model's outputs."""
        seen: list[Tensor] = []
        hook = self.head_layer().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            outputs = self.outputs(params, x)
        finally:
            hook.remove()
        return seen[-1], outputs

    def head_layer(self) -> nn.Linear:
        """The model's head: its last linear layer."""
        layers = [layer for layer in self.module.modules() if isinstance(layer, nn.Linear)]
        if not layers:
            raise InvalidInputError(
                "model: it has no linear layer, so its features and last layer's gradient are not"
                " defined."
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
                    f" name.{nearest(layer, every)}"
                )
        return tuple(
            name
            for name in self.names
            if any(name == layer or name.startswith(f"{layer}.") for layer in layers)
        )

    def loss(self, params: Tree, batch: Batch) -> Tensor:
        """The mean loss of the real examples of a batch in training."""
        return self._loss_and_statistics(params, batch)[0]

    def _loss_and_statistics(self, params: Tree, batch: Batch) -> tuple[Tensor, Tree]:
        outputs, statistics = self.training_outputs(params, batch.x, batch.key, batch.weight)
        losses = self.example_loss(outputs, batch.y)
        return (losses * batch.weight).sum() / batch.examples.clamp_min(1), statistics

    def _stacked_losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        if self.example_loss is cross_entropy:  # per example, so clients can be flattened
            return cross_entropy(outputs.flatten(0, 1), y.flatten(0, 1)).view(y.shape[:2])
        losses: Tensor = vmap(self.example_loss)(outputs, y)
        return losses

    def add_scaled_gradient(
        self, base: Tree, scale: Tensor, params: Tree, batch: Batch, overwrite: bool = False
    ) -> Tree:
        """base + scale · the gradient of `loss` at `params`: the core of every training step.

        For running statistics in `base` the result is their value after the batch.

        Args:
            base: the tree to add to.
            scale: the factor; for a `ClientStackedBatch` one number or one per client.
            params: where the gradient is taken.
            batch: the batch of one client, or a `ClientStackedBatch`.
            overwrite: whether the result may use the memory of `base`.
        """
        if not isinstance(batch, ClientStackedBatch):
            gradient, statistics = self._gradient_of_one(params, batch)
            return {
                name: statistics[name] if name in statistics else value + scale * gradient[name]
                for name, value in base.items()
            }
        share = batch.share * scale.view(-1, 1)
        if self._dense is not None and (self._dense.flattens or batch.x.ndim == 3):
            loss = None if self.example_loss is cross_entropy else self.example_loss
            return mlp.add_scaled_gradient(
                self._dense, loss, base, params, batch.x, batch.y, share, overwrite
            )
        return self._tapped.add_scaled_gradient(base, params, batch, share, overwrite)

    def _gradient_of_one(self, params: Tree, batch: Batch) -> tuple[Tree, Tree]:
        fixed = {name: params[name] for name in params if name not in self.trained}

        def loss(trained: Tree) -> tuple[Tensor, Tree]:
            return self._loss_and_statistics(trained | fixed, batch)

        result: tuple[Tree, Tree] = grad(loss, has_aux=True)(
            {name: params[name] for name in self.trained if name in params}
        )
        return result

    def gradient(self, params: Tree, batch: Batch) -> Tree:
        """The gradient of `loss` by the trained weights, for one client or a
        `ClientStackedBatch`.
        """
        zeros = {name: torch.zeros_like(params[name]) for name in self.trained}
        return self.add_scaled_gradient(
            zeros, batch.weight.new_ones(()), params, batch, overwrite=True
        )

    def checked_outputs(self, x: Tensor) -> Tensor:
        """The outputs for a few inputs. Raises an error if the model cannot take them."""
        with _layer_of_failure(self.module) as where:
            try:
                return self.outputs(self.params(), x)
            except Exception as error:
                raise InvalidInputError(
                    f"model{where()}: it cannot take inputs of shape {tuple(x.shape[1:])}: {error}"
                ) from error

    def check(self, x: Tensor, y: Tensor) -> None:
        """Raise an error if the model or the loss cannot run on these data or on several clients at
        once.
        """
        require_per_example("loss", self.example_loss, self.checked_outputs(x), y)
        self._check_vectorised(x, y)

    def _check_vectorised(self, x: Tensor, y: Tensor) -> None:
        def twice(value: Tensor) -> Tensor:
            return torch.stack([value, value])

        two = {name: twice(value) for name, value in self.params().items()}
        batch = Batch(
            twice(x),
            twice(y),
            twice(torch.ones(len(y), device=x.device)),
            torch.arange(2, device=x.device),
        )

        def total(trained: Tree, statistics: Tree, batch: Batch) -> Tensor:
            params = trained | statistics
            return self.training_outputs(params, batch.x, batch.key, batch.weight)[0].sum()

        trained, statistics = (
            {name: two[name] for name in names} for names in (self.trained, self.statistics)
        )
        with _layer_of_failure(self._in_training.own) as where:
            try:
                vmap(grad(total))(trained, statistics, batch)
            except Exception as error:
                raise VectorizationError(_why_not(error, f"model{where()}")) from error
        try:
            vmap(self._gradient_of_one)(two, batch)
        except Exception as error:
            raise VectorizationError(_why_not(error, "loss")) from error


def _why_not(error: Exception, what: str) -> str:
    text = str(error)
    if "randomness" in text:
        return (
            f"{what}: it draws random numbers itself (torch.nn.functional.dropout?): use the module"
            " nn.Dropout instead."
        )
    if "data-dependent" in text or "item()" in text:
        return (
            f"{what}: it branches on the values of a tensor (if, while, .item()), so clients cannot"
            " share a step: use torch.where."
        )
    return (
        f"{what}: it cannot be run on several clients at once with torch.func.vmap:"
        f" {text.splitlines()[0]}"
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
