"""A model and a loss as pure functions of the parameters, so that many clients' copies can be
trained in one step.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.flop_counter import FlopCounterMode

from fedclade.core.client_functions import ClientFunctions, uses_replaced_functions
from fedclade.core.inputs import (
    Inputs,
    call,
    describe_inputs,
    device_of,
    from_tensors,
    map_inputs,
    outputs_tensor,
    samples_in,
    select,
    tensors_of,
)
from fedclade.core.kernels import mlp
from fedclade.core.kernels.activation_taps import Tapped, with_taps
from fedclade.core.kernels.mlp import dense_form
from fedclade.core.losses import ExampleLoss, cross_entropy, example_loss, require_per_example
from fedclade.core.module_copy import copy_sharing, frozen_parameters, require_copyable
from fedclade.core.one_by_one import one_by_one, refuse_tracing
from fedclade.core.pytree import Tree
from fedclade.core.rng import hash_bits
from fedclade.core.running_statistics import batch_norm_names, statistic_names
from fedclade.core.seeded_generator import seeded_generator
from fedclade.core.transformers_attention import always_make_masks
from fedclade.errors import FedcladeWarning, InvalidInputError, VectorizationError, nearest

# On the CPU a batch with more operations than this in its forward pass runs client by client: the
# stacked kernels of convolutions and attention are slower than torch's own. Measured on one core
# with the models of fedclade.models and with transformer encoders (benchmarks/models.py): below
# this number vmap is up to three times as fast, above it up to 1.6 times as slow.
CPU_STACK_FLOPS = 3e8


class Batch(NamedTuple):
    """The data of a step.

    Attributes:
        x: the inputs.
        y: the targets.
        weight: the weight of each example in the mean of the loss: 1, or that of its class
            (`Batches.class_weight`); 0 for padding.
        key: the randomness of the step.
    """

    x: Inputs
    y: Tensor
    weight: Tensor
    key: Tensor

    @property
    def examples(self) -> Tensor:
        """The number of real examples."""
        return (self.weight > 0).to(self.weight.dtype).sum(-1)

    def member(self, number: int) -> Batch:
        """One batch of a step that has several (`Batches.group`), with its own key."""
        return Batch(
            select(self.x, number),
            self.y[number],
            self.weight[number],
            hash_bits(self.key, number),
        )


class ClientStackedBatch(Batch):
    """The batches of many clients, one row per client. `share` is the weight of an example in the
    mean of its batch.
    """

    share: Tensor

    def __new__(
        cls, x: Inputs, y: Tensor, weight: Tensor, key: Tensor, share: Tensor | None = None
    ) -> ClientStackedBatch:
        stack = super().__new__(cls, x, y, weight, key)
        stack.share = share_of(weight) if share is None else share
        return stack

    def member(self, number: int) -> ClientStackedBatch:
        y, weight, share = (value[:, number] for value in (self.y, self.weight, self.share))
        x = select(self.x, (slice(None), number))
        return ClientStackedBatch(x, y, weight, hash_bits(self.key, number), share)

    def of_client(self, row: int) -> Batch:
        """The batch of one client, without padding."""
        real = self.weight[row] > 0
        if bool(real.all()):
            return Batch(select(self.x, row), self.y[row], self.weight[row], self.key[row])
        x = map_inputs(lambda value: value[row][real], self.x)
        return Batch(x, self.y[row][real], self.weight[row][real], self.key[row])


def share_of(weight: Tensor) -> Tensor:
    """The weight of each example in the mean of its batch; 0 for padding."""
    return weight / _total(weight, keepdim=True)


def _total(weight: Tensor, keepdim: bool = False) -> Tensor:
    """The sum of the weights; 1 for a batch without examples."""
    total = weight.sum(-1, keepdim=keepdim)
    return torch.where(total > 0, total, 1.0)


class PerThread(threading.local):
    """A module with one copy per thread, since `functional_call` sets the weights of the module
    while it runs. It does not write into them, so the copies share the memory of their weights.
    """

    def __init__(self, module: nn.Module) -> None:
        self.own = copy_sharing(module, module.parameters())


class Objective:
    """What a client minimizes: `loss(params, batch)`, made from a module and a loss per example.

    Args:
        module: the model.
        loss: a function of (outputs, targets) with one value per example, or a loss module of
            torch; None for cross-entropy.
        x: a few inputs, to find out which buffers training changes and whether the model can run
            on many clients at once. None: only BatchNorm and InstanceNorm have such buffers, and
            it can.
        augment: what training does with the inputs of a batch first (core/augmentation.py).
        bf16: whether the model computes its matrix products in bfloat16 (torch's autocast).
            Weights, losses and sums stay in float32.

    Attributes:
        trained: the names of the trained weights.
        statistics: the names of the running statistics.
        names: all names of a model's tree: `trained` and `statistics`.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: ExampleLoss | None = None,
        x: Inputs | None = None,
        augment: Callable[[Any], Any] | None = None,
        bf16: bool = False,
    ) -> None:
        self.bf16 = bf16
        require_copyable(module)
        plain = copy_sharing(module, frozen_parameters(module)).requires_grad_(False).eval()
        always_make_masks(plain)
        for layer in plain.modules():
            if isinstance(layer, nn.TransformerEncoder):
                layer.use_nested_tensor = False  # vmap has no nested tensors
        device = next(module.parameters(), torch.empty(0)).device
        self.example_loss = example_loss(loss, device)
        self.augment = augment
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
        self._replaces_functions = uses_replaced_functions(module, x)
        if not self.trained:
            raise InvalidInputError(
                "model: it has no trainable parameter. Set requires_grad for some.", "model"
            )
        self._dense = None if self._replaces_functions else dense_form(plain, self.trained)
        with_taps(plain, self.trained)
        self._in_use = PerThread(plain)
        self._in_training = PerThread(copy_sharing(plain, plain.parameters()).train())
        self._tapped = Tapped(self.training_outputs, self._stacked_losses, self.statistics)
        self.programs: dict[Hashable, Any] = {}  # see core/program_cache.py
        # None: not tried yet
        self._not_vectorized: str | None = None
        self._flops = 0.0  # of the forward pass of an example
        if x is not None:
            self._not_vectorized = self._why_not_vectorized(x)
            self._flops = self._count_flops(x)

    @property
    def vectorized(self) -> bool:
        """Whether the model runs on many clients at once, by vmap. If not, clients run one by
        one.
        """
        return not self._not_vectorized

    def runs_alone(self, examples: int, device: torch.device) -> bool:
        """Whether clients run one by one: because the model cannot be vectorized, or because that
        is faster.

        Args:
            examples: the number of examples of a batch.
            device: the device of the batch.
        """
        is_large = self._dense is None and self._flops * examples > CPU_STACK_FLOPS
        return not self.vectorized or (is_large and device.type == "cpu")

    def execution(self, examples: int, device: torch.device) -> str:
        """How clients with batches of this size run, as text for `--profile`."""
        if not self.runs_alone(examples, device):
            return "Clients run together, many in one step."
        if self._not_vectorized:
            return f"Clients run one by one. {self._not_vectorized}"
        flops = self._flops * examples
        return (
            f"Clients run one by one: on the CPU this is faster for a batch of {flops:.1e}"
            f" operations (more than {CPU_STACK_FLOPS:.0e})."
        )

    def _count_flops(self, x: Inputs) -> float:
        try:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                outputs = self._outputs(self.params(), x)
        except Exception:  # a model that cannot take these inputs is refused later, with the reason
            return 0.0
        return float(counter.get_total_flops()) / max(1, len(outputs))

    @property
    def module(self) -> nn.Module:
        """This thread's copy of the module, in evaluation mode."""
        return self._in_use.own

    def ndim_of(self, name: str) -> int:
        """The number of axes of a weight of one client."""
        return self.module.get_parameter(name).ndim

    def params(self) -> Tree:
        """The module's weights and running statistics: the initial model of the federation."""
        values = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return {
            # Counters are averaged too, so they are numbers of float32 in a tree.
            name: values[name].detach().to(torch.float32 if name in self._dtypes else None).clone()
            for name in self.names
        }

    def outputs(self, params: Tree, x: Inputs, key: Tensor | None = None) -> Tensor:
        """The model's outputs. With a key it is in training mode, with dropout."""
        if key is not None:
            weight = torch.ones(samples_in(x), device=device_of(x))
            return self.training_outputs(params, x, key, weight)[0]
        if not self.runs_alone(samples_in(x), device_of(x)):
            return self._outputs(params, x)
        return self._one_by_one(lambda params, x: (self._outputs(params, x),), params, x)[0]

    def _outputs(self, params: Tree, x: Inputs) -> Tensor:
        with ClientFunctions() if self._replaces_functions else nullcontext():
            return self._call(self._in_use.own, self._as_buffers(params), x)

    def training_outputs(
        self, params: Tree, x: Inputs, key: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tree]:
        """The model's outputs in training mode, with dropout, and its new running statistics.

        Args:
            params: the weights and running statistics.
            x: the inputs of one client's batch.
            key: the randomness of dropout.
            weight: the weight of each example, 0 for padding.
        """
        if self.vectorized:
            return self._training_outputs(params, x, key, weight)

        def run(params: Tree, x: Inputs, key: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            outputs, statistics = self._training_outputs(params, x, key, weight)
            return outputs, *statistics.values()

        outputs, *statistics = self._one_by_one(run, params, x, key, weight)
        return outputs, {
            name: value.detach() for name, value in zip(self.statistics, statistics, strict=True)
        }

    def _training_outputs(
        self, params: Tree, x: Inputs, key: Tensor, weight: Tensor | None, alone: bool = False
    ) -> tuple[Tensor, Tree]:
        values = self._as_buffers(params)
        values |= {name: values[name].clone() for name in self.statistics}
        with (
            ClientFunctions(key, weight, alone) if self._replaces_functions else nullcontext(),
            nullcontext() if self.vectorized else seeded_generator(key),
        ):
            outputs = self._call(self._in_training.own, values, x)
        # functional_call leaves the new values of buffers in `values`.
        return outputs, {
            name: values[name].detach().to(params[name].dtype) for name in self.statistics
        }

    def _one_by_one(
        self, run: Callable[..., tuple[Tensor, ...]], params: Tree, x: Inputs, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """`run(params, x, *tensors)` for each client alone."""
        names, parts = tuple(params), tensors_of(x)

        def flat(*values: Tensor) -> tuple[Tensor, ...]:
            own, rest = dict(zip(names, values, strict=False)), values[len(names) :]
            return run(own, from_tensors(rest[: len(parts)], x), *rest[len(parts) :])

        return one_by_one(flat, *params.values(), *parts, *tensors)

    def _as_buffers(self, params: Tree) -> Tree:
        """The tree with counters as the integers that the module expects."""
        return params | {
            name: params[name].round().to(dtype) for name, dtype in self._dtypes.items()
        }

    def _call(self, module: nn.Module, values: Tree, x: Inputs) -> Tensor:
        def run(*args: Tensor, **kwargs: Tensor) -> object:
            return functional_call(module, values, args, kwargs)

        if not self.bf16:
            return outputs_tensor(call(run, x), module)
        # Without the cache of casts, which a CUDA graph cannot hold.
        with torch.autocast(device_of(x).type, torch.bfloat16, cache_enabled=False):
            return outputs_tensor(call(run, x), module).float()

    def features(self, params: Tree, x: Inputs) -> tuple[Tensor, Tensor]:
        """The inputs of the last linear layer, and the model's outputs."""
        if not self.runs_alone(samples_in(x), device_of(x)):
            return self._features(params, x)
        features, outputs = self._one_by_one(self._features, params, x)
        return features, outputs

    def _features(self, params: Tree, x: Inputs) -> tuple[Tensor, Tensor]:
        captured: list[Tensor] = []
        hook = self.head_layer().register_forward_pre_hook(
            lambda _, inputs: captured.append(inputs[0])
        )
        try:
            outputs = self._outputs(params, x)
        finally:
            hook.remove()
        if not captured:
            raise InvalidInputError(
                "model: its last linear layer is not used, so its features and that layer's"
                " gradient are not defined. Define the output layer last, or use another method.",
                "model",
            )
        return captured[-1].to(outputs.dtype), outputs

    def head_error(self, params: Tree, batch: Batch) -> Tensor:
        """The gradient of the sum of a batch's losses by the outputs of the last linear layer, for
        one client, in evaluation mode. For a model that does more after that layer.
        """
        if not self.runs_alone(samples_in(batch.x), device_of(batch.x)):
            return self._head_error(params, batch.x, batch.y)[0]
        return self._one_by_one(self._head_error, params, batch.x, batch.y)[0]

    def _head_error(self, params: Tree, x: Inputs, y: Tensor) -> tuple[Tensor, ...]:
        h, _ = self._features(params, x)
        head = self.head_layer()

        def loss(tap: Tensor) -> Tensor:
            hook = head.register_forward_hook(lambda _, inputs, outputs: outputs + tap)
            try:
                return self.example_loss(self._outputs(params, x), y).sum()
            finally:
                hook.remove()

        return (grad(loss)(h.new_zeros(*h.shape[:-1], head.out_features)),)

    def head_layer(self) -> nn.Linear:
        """The model's head: its last linear layer."""
        return last_linear_layer(self.module)

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
        """The weighted mean loss of the examples of a batch in training."""
        return self._loss_and_statistics(params, batch)[0]

    def _loss_and_statistics(self, params: Tree, batch: Batch) -> tuple[Tensor, Tree]:
        outputs, statistics = self.training_outputs(params, batch.x, batch.key, batch.weight)
        losses = self.example_loss(outputs, batch.y)
        return (losses * batch.weight).sum() / _total(batch.weight), statistics

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
        if self.runs_alone(batch.weight.shape[-1], batch.weight.device):
            return self._add_gradients_one_by_one(base, scale, params, batch, overwrite)
        share = batch.share * scale.view(-1, 1)
        if (
            self._dense is not None
            and isinstance(batch.x, Tensor)
            and (self._dense.flattens or batch.x.ndim == 3)
        ):
            loss = None if self.example_loss is cross_entropy else self.example_loss
            return mlp.add_scaled_gradient(
                self._dense, loss, base, params, batch.x, batch.y, share, overwrite, self.bf16
            )
        return self._tapped.add_scaled_gradient(base, params, batch, share, overwrite)

    def _add_gradients_one_by_one(
        self, base: Tree, scale: Tensor, params: Tree, batch: ClientStackedBatch, overwrite: bool
    ) -> Tree:
        """`add_scaled_gradient` by ordinary autograd, without padding."""
        refuse_tracing()
        result = base if overwrite else {name: value.clone() for name, value in base.items()}
        scales = scale.reshape(-1).expand(len(batch.weight))
        for row in range(len(batch.weight)):
            own = batch.of_client(row)
            model = {name: value[row].detach() for name, value in params.items()}
            leaves = {name: model[name].requires_grad_() for name in self.trained if name in base}
            with torch.enable_grad():
                # torch's BatchNorm refuses a single example; there is no padding otherwise.
                weight = own.weight if len(own.weight) == 1 else None
                outputs, statistics = self._training_outputs(model, own.x, own.key, weight, True)
                losses = self.example_loss(outputs, own.y)
                loss = (losses * own.weight).sum() / own.weight.sum()
                gradients = torch.autograd.grad(
                    loss, tuple(leaves.values()), materialize_grads=True
                )
            for name, gradient in zip(leaves, gradients, strict=True):
                result[name][row].addcmul_(gradient, scales[row])
            for name, value in statistics.items():
                if name in result:
                    result[name][row].copy_(value)
        return result

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

    def checked_outputs(self, x: Inputs) -> Tensor:
        """The outputs for a few inputs. Raises an error if the model cannot take them."""
        with _layer_of_failure(self.module) as where:
            try:
                return self.outputs(self.params(), x)
            except Exception as error:
                if isinstance(error, InvalidInputError) and not where():  # not of a layer
                    raise
                raise InvalidInputError(
                    f"model{where()}: it cannot take inputs of shape {describe_inputs(x)}: {error}",
                    "model",
                ) from error

    def check(self, x: Inputs, y: Tensor) -> None:
        """Raise an error if the model or the loss cannot run on these data or on several clients at
        once.
        """
        require_per_example("loss", self.example_loss, self.checked_outputs(x), y)
        if self._not_vectorized is None:
            self._not_vectorized = self._why_not_vectorized(x)
        if self._not_vectorized:
            warnings.warn(
                FedcladeWarning(
                    f"{self._not_vectorized} Clients run one by one, which is slower.", "model"
                ),
                stacklevel=6,
            )
        self._check_training(x, y)

    def _why_not_vectorized(self, x: Inputs) -> str:
        """Why the model cannot run on two clients at once; "" if it can."""
        device = device_of(x)
        key, weight = torch.arange(2, device=device), torch.ones(2, samples_in(x), device=device)
        with _layer_of_failure(self._in_training.own) as where, torch.no_grad():
            try:
                two, inputs = self._two_clients(), _twice(x)
                vmap(self._training_outputs)(two, inputs, key, weight)
                vmap(self._outputs)(two, inputs)
            except Exception as error:
                return _why_not(error, f"model{where()}")
        return ""

    def _two_clients(self) -> Tree:
        return {name: torch.stack([value, value]) for name, value in self.params().items()}

    def _check_training(self, x: Inputs, y: Tensor) -> None:
        """Try a gradient for two clients, as a program has it that is written for one client."""
        y, weight = (torch.stack([v, v]) for v in (y, torch.ones(len(y), device=y.device)))
        batch = Batch(_twice(x), y, weight, torch.arange(2, device=y.device))
        with _layer_of_failure(self._in_training.own) as where:
            try:
                vmap(self._gradient_of_one)(self._two_clients(), batch)
            except Exception as error:
                what = f"model{where()}" if where() else "loss"
                raise VectorizationError(_why_not(error, what), what.partition(",")[0]) from error


def last_linear_layer(module: nn.Module) -> nn.Linear:
    """The last linear layer of a model; raises `InvalidInputError` if it has none."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    if not layers:
        raise InvalidInputError(
            "model: it has no linear layer, so its features and its last layer's gradient are"
            " not defined. Use a model with nn.Linear, or another method.",
            "model",
        )
    return layers[-1]


def _twice(x: Inputs) -> Inputs:
    return map_inputs(lambda value: torch.stack([value, value]), x)


def _why_not(error: Exception, what: str) -> str:
    text = str(error)
    if "randomness" in text:
        return (
            f"{what}: it draws random numbers with torch's generator, so clients cannot share a"
            " step. Only dropout (nn.Dropout, F.dropout) may draw."
        )
    if "data-dependent" in text or "item()" in text:
        return (
            f"{what}: it branches on the values of a tensor (if, while, .item()), so clients cannot"
            " share a step. Use torch.where."
        )
    reason = next(iter(text.splitlines()), type(error).__name__).rstrip(" .")
    return f"{what}: torch.func.vmap cannot run it on several clients at once: {reason}."


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
