"""Before a run: the module is built, and model, loss and metrics are tried on a few samples, so
that nothing fails an hour later.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedclade.core.functional_model import ExampleLoss, Objective, accuracy
from fedclade.core.rng import fold_in
from fedclade.data.client_metadata import ClientMetadata
from fedclade.data.federated_dataset import Clients, as_inputs
from fedclade.errors import InvalidInputError
from fedclade.methods.base import Method
from fedclade.methods.requirements import (
    NeedsEncoder,
    NeedsInputShape,
    NeedsProbe,
    NeedsTrueGroups,
)
from fedclade.models import ModelSpec
from fedclade.training import encoder_pretraining
from fedclade.training.metrics import RESERVED


def inject_context(method: Method, clients: Clients | ClientMetadata, seed: int) -> Method:
    """The method with what it needs of the federation besides the clients' replies; see
    `methods.requirements`. A value that the user gave stays.
    """
    context: dict[str, Any] = {}
    if isinstance(method, NeedsEncoder) and method.encoder_module is None:
        context["encoder_module"] = encoder_pretraining.resolve(
            method.encoder_source, clients.shape, seed
        )
    if isinstance(method, NeedsProbe):
        probe = clients.probe if method.probe is None else method.probe
        context["probe"] = None if probe is None else _probe(probe, clients.shape)
    if isinstance(method, NeedsTrueGroups) and method.truth is None:
        context["truth"] = clients.groups
    if isinstance(method, NeedsInputShape) and clients.x.dtype in (
        torch.uint8,
        torch.float32,
        torch.float64,
    ):
        context["input_shape"] = clients.shape
    return replace(method, **context) if context else method


def _probe(probe: Any, shape: tuple[int, ...]) -> Tensor:
    """Probe inputs, as a client would read them."""
    try:
        x = as_inputs(torch.as_tensor(probe))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"probe: not an array of inputs ({error}).") from error
    if tuple(x.shape[1:]) != shape or len(x) == 0:
        raise InvalidInputError(
            f"probe: its shape is {tuple(x.shape)}, it must be (samples,"
            f" {', '.join(map(str, shape))}), as the clients' inputs."
        )
    return x


def module_for(
    model: ModelSpec | nn.Module, clients: Clients | ClientMetadata, seed: int
) -> nn.Module:
    """The user's module, or the spec's with weights that depend on the seed alone."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if isinstance(model, type) or not hasattr(model, "build"):
        raise InvalidInputError(
            f"model = {model!r}: give one of fc.models, such as fc.models.MLP(200), or an"
            " nn.Module."
        )
    if clients.classes is None:
        raise InvalidInputError(
            "model: the targets are not class labels, so there is no number of outputs; give an"
            " nn.Module and a loss."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold_in(seed, "model"))
        try:
            return model.build(clients.shape, clients.classes)
        except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
            raise InvalidInputError(f"model: {model!r} cannot be built ({error}).") from error


def metrics_for(
    objective: Objective,
    clients: ClientMetadata,
    own_loss: bool,
    metrics: Mapping[str, ExampleLoss] | None,
    device: torch.device,
) -> dict[str, ExampleLoss]:
    """Try the objective and the user's metrics on a few samples; what is measured: accuracy, where
    there is one, and those metrics.
    """
    found = measured(objective, clients, own_loss, metrics, device)
    objective.check(as_inputs(clients.x.to(device)), clients.y.to(device))
    return found


def measured(
    objective: Objective,
    clients: ClientMetadata,
    own_loss: bool,
    metrics: Mapping[str, ExampleLoss] | None,
    device: torch.device,
) -> dict[str, ExampleLoss]:
    """The same without a try of the gradient, which takes seconds the first time: every letter to a
    node starts a process.
    """
    x, y = as_inputs(clients.x.to(device)), clients.y.to(device)
    outputs = objective.checked_outputs(x)
    classifies = clients.classes is not None and outputs.shape[:-1] == y.shape
    if not own_loss and not classifies:
        shape, labels = (
            tuple(outputs.shape[1:]),
            "one label a sample" if y.ndim == 1 else f"{y.shape[1]} labels a sample",
        )
        what = labels if clients.classes is not None else "none"
        raise InvalidInputError(
            f"loss: cross-entropy needs class labels ({what} here) and an output for each class,"
            f" the model gives {shape}; give a loss."
        )
    if not own_loss and clients.classes is not None and clients.classes > outputs.shape[-1]:
        raise InvalidInputError(
            f"model: it has {outputs.shape[-1]} outputs, but labels go up to {clients.classes - 1}:"
            f" give it at least {clients.classes} outputs, or number the labels from 0."
        )
    for name, metric in (metrics or {}).items():
        if name in RESERVED or name.startswith("train_") or name.endswith("_tuned"):
            raise InvalidInputError(
                f"metrics: '{name}' is the name of one of fedclade's own numbers; choose another."
            )
        shape = tuple(metric(outputs, y).shape)
        if shape != (len(y),):
            raise InvalidInputError(
                f"metrics: '{name}' must give one value for each example, shape ({len(y)},), got"
                f" {shape}."
            )
    return {**({"accuracy": accuracy} if classifies else {}), **(metrics or {})}
