"""Before a run: the module is built, and model, loss and metrics are tried on a few samples, so that nothing fails an hour later."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import nn

from fedclade.client.keys import fold
from fedclade.client.objective import ExampleLoss, Objective, accuracy
from fedclade.data.clients import Clients, as_inputs
from fedclade.errors import InvalidInput
from fedclade.experiment.metrics import RESERVED
from fedclade.models import ModelSpec


def module_for(model: ModelSpec | nn.Module, clients: Clients, seed: int) -> nn.Module:
    """The user's module, or the spec's with weights that depend on the seed alone."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if isinstance(model, type) or not hasattr(model, "build"):
        raise InvalidInput(f"model = {model!r}: give one of fc.models, such as fc.models.MLP(200), or an nn.Module.")
    if clients.classes is None:
        raise InvalidInput("model: the targets are not class labels, so there is no number of outputs; give an nn.Module and a loss.")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold(seed, "model"))
        try:
            return model.build(clients.shape, clients.classes)
        except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
            raise InvalidInput(f"model: {model!r} cannot be built ({error}).") from error


def metrics_for(
    objective: Objective, clients: Clients, own_loss: bool, metrics: Mapping[str, ExampleLoss] | None, device: torch.device
) -> dict[str, ExampleLoss]:
    """Try the objective and the user's metrics on a few samples; what is measured: accuracy, where there is one, and those metrics."""
    few = torch.arange(min(2, len(clients.x)))
    x, y = as_inputs(clients.x[few].to(device)), clients.y[few].to(device)
    outputs = objective.checked_outputs(x)
    classifies = clients.classes is not None and outputs.ndim == 2
    if not own_loss and not classifies:
        shape = tuple(outputs.shape[1:])
        raise InvalidInput(f"loss: cross-entropy needs class labels and one output a class, the model gives {shape}; give a loss.")
    if not own_loss and clients.classes is not None and clients.classes > outputs.shape[1]:
        raise InvalidInput(
            f"model: it has {outputs.shape[1]} outputs, but labels go up to {clients.classes - 1}: "
            f"give it at least {clients.classes} outputs, or number the labels from 0."
        )
    objective.check(x, y)
    for name, metric in (metrics or {}).items():
        if name in RESERVED or name.startswith("train_") or name.endswith("_tuned"):
            raise InvalidInput(f"metrics: '{name}' is the name of one of fedclade's own numbers; choose another.")
        shape = tuple(metric(outputs, y).shape)
        if shape != (len(y),):
            raise InvalidInput(f"metrics: '{name}' must give one value for each example, shape ({len(y)},), got {shape}.")
    return {**({"accuracy": accuracy} if classifies else {}), **(metrics or {})}
