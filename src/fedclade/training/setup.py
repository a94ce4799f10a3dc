"""What happens before the first round: the module is built, and model, loss and metrics are tried
on a few samples, so that nothing fails an hour later.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fedclade.aggregation.robust_federation import RobustFederation
from fedclade.core.federation import Aggregator, Federation
from fedclade.core.functional_model import (
    ExampleLoss,
    Objective,
    accuracy,
    cross_entropy,
    require_per_example,
)
from fedclade.core.output_metric import AnyMetric
from fedclade.core.rng import fold_in
from fedclade.data.client_metadata import ClientMetadata
from fedclade.data.federated_dataset import Clients, as_inputs
from fedclade.engines.base import Engine
from fedclade.engines.simulator import Simulator
from fedclade.errors import FedcladeWarning, InvalidInputError, is_int, require
from fedclade.methods.base import Method, hyperparameters
from fedclade.methods.required_context import (
    NeedsEncoder,
    NeedsInputShape,
    NeedsProbe,
    NeedsTrueGroups,
)
from fedclade.models import ModelSpec
from fedclade.training import encoders, plot_data
from fedclade.training.config import LocalConfig, MetricName, TrainingConfig
from fedclade.training.metrics import is_reserved
from fedclade.training.output_metrics import (
    UserMetrics,
    by_name,
    check_torchmetric,
    from_torchmetrics,
    is_torchmetric,
)
from fedclade.training.run_fingerprint import Tables, fingerprint, plain

if TYPE_CHECKING:
    from torchmetrics import Metric

    from fedclade.training.runner import TrainingRun


@dataclass(frozen=True, eq=False)
class RunSetup:
    """Everything that the rounds of a run need. It is made once and never changes."""

    engine: Engine
    federation: Federation  # what the method sees of the engine
    clients: Clients | None  # None: they are not in this process
    metadata: ClientMetadata  # the clients that there are at the start; more may join
    method: Method
    module: nn.Module
    objective: Objective
    metrics: dict[str, AnyMetric]
    local: LocalConfig
    training: TrainingConfig
    tables: Tables  # the run as the tables of an experiment file

    def method_for(self, round_number: int) -> Method:
        """The method with the local training of this round."""
        local = self.local.training(self.objective, round_number, self.training.rounds)
        return self.method.with_local_config(local)

    def is_due(self, round_number: int, every: int) -> bool:
        """Whether this round is the last, or a multiple of `every`."""
        return round_number == self.training.rounds or (every > 0 and round_number % every == 0)

    @cached_property
    def fingerprint(self) -> str:
        """The hash by which a checkpoint of another experiment is recognized."""
        probe = self.method.probe if isinstance(self.method, NeedsProbe) else None
        others = (*self.objective.params().values(), *([] if probe is None else [probe]))
        return fingerprint(self.tables, self.clients, others)

    @cached_property
    def label_counts(self) -> Tensor | None:
        return plot_data.label_counts(self.clients)


def prepare(run: TrainingRun) -> RunSetup:
    """Build the engine and the model of a run, and check that they fit together."""
    if not isinstance(run.method, Method):
        raise InvalidInputError(
            f"method = {run.method!r}: give a method such as fc.FedAvg(), not its name or class.",
            "method",
        )
    require(
        run.local.optimizer == "sgd" or not run.method.needs_sgd,
        "local.optimizer",
        run.local.optimizer,
        f"must be 'sgd': method {run.method.name} {run.method.needs_sgd}",
    )
    engine = run.federation or _simulator(run)
    federation = federation_view(run.method, engine, run.server.aggregator)
    metadata = engine.client_metadata()
    require(len(metadata) > 0, "clients", 0, "there must be at least one")
    run.settings.cohort_size(len(metadata))
    if is_int(run.settings.clients_per_round, 1, 1) and len(metadata) > 1:
        _warn_of_one_client(len(metadata))
    method = inject_context(run.method, metadata, run.settings.seed)
    module = module_for(run.model, metadata, run.settings.seed)
    x = as_inputs(metadata.x.to(engine.device))
    objective = Objective(module.to(engine.device), run.loss, x)
    _require_validation(run.settings, metadata)
    metrics = metrics_for(objective, metadata, run.metrics, engine.device, run.settings.metrics)
    return RunSetup(
        engine=engine,
        federation=federation,
        clients=run.clients,
        metadata=metadata,
        method=method,
        module=module,
        objective=objective,
        metrics=metrics,
        local=run.local,
        training=run.settings,
        tables=_tables(run, method, metadata),
    )


def _require_validation(training: TrainingConfig, metadata: ClientMetadata) -> None:
    for field, value, default in (
        ("run.patience", training.patience, 0),
        ("run.select", training.select, "last"),
    ):
        require(
            value == default or metadata.has_validation,
            field,
            value,
            "no client has validation data; set data.validation = 0.1, or use"
            " clients.with_validation(0.1)",
        )


def _warn_of_one_client(clients: int) -> None:
    """A user who writes 1 may mean all clients."""
    field = "run.clients_per_round"
    message = f"{field} = 1: one client of {clients} takes part in a round. For all write 1.0."
    warnings.warn(FedcladeWarning(message, field), stacklevel=5)


def federation_view(method: Method, federation: Federation, aggregator: Aggregator) -> Federation:
    """The federation that a method works with."""
    allowed = f"method {method.name} has only {method.custom_aggregation}; leave it at 'mean'"
    require(
        aggregator == "mean" or not method.custom_aggregation,
        "server.aggregator",
        aggregator,
        allowed,
    )
    return federation if aggregator == "mean" else RobustFederation(federation, aggregator)


def _simulator(run: TrainingRun) -> Simulator:
    if not isinstance(run.clients, Clients):
        raise InvalidInputError(
            "clients: make them with fc.data.partition(…) or fc.data.from_arrays(…).",
            "clients",
        )
    return Simulator(run.clients, device=run.device, profile=run.profile, **asdict(run.engine))


def _tables(run: TrainingRun, method: Method, metadata: ClientMetadata) -> Tables:
    hyperparams = {each.name: getattr(method, each.name) for each in hyperparameters(method)}
    model: dict[str, Any] = (
        {each.name: getattr(run.model, each.name) for each in fields(run.model)}
        if is_dataclass(run.model)
        else {}
    )
    name = type(run.model).__name__ if isinstance(run.model, nn.Module) else run.model.name
    tables: Tables = {
        "data": {"name": metadata.dataset, **metadata.validation_origin},
        "partition": {"name": metadata.partition, **metadata.origin},
        "model": {"name": name, **model},
        "local": asdict(run.local),
        "method": {"name": method.name, **hyperparams},
        "run": asdict(run.settings),
        "server": asdict(run.server),
        "engine": asdict(run.engine),
    }
    return cast(Tables, plain(tables))


def inject_context(method: Method, clients: ClientMetadata, seed: int) -> Method:
    """The method with what it needs of the federation besides the clients' replies; see
    `methods.required_context`. A value that the user gave stays.
    """
    context: dict[str, Any] = {}
    if isinstance(method, NeedsEncoder) and method.encoder_module is None:
        context["encoder_module"] = encoders.resolve(method.encoder_source, clients.shape, seed)
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
        raise InvalidInputError(f"probe: not an array of inputs ({error}).", "probe") from error
    if tuple(x.shape[1:]) != shape or len(x) == 0:
        raise InvalidInputError(
            f"probe: its shape is {tuple(x.shape)}, it must be (samples,"
            f" {', '.join(map(str, shape))}), as the clients' inputs.",
            "probe",
        )
    return x


def module_for(model: ModelSpec | nn.Module, clients: ClientMetadata, seed: int) -> nn.Module:
    """The user's module, or the spec's with weights that depend on the seed alone."""
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if isinstance(model, type) or not hasattr(model, "build"):
        raise InvalidInputError(
            f"model = {model!r}: give one of fc.models, such as fc.models.MLP(200), or an"
            " nn.Module.",
            "model",
        )
    if clients.classes is None:
        raise InvalidInputError(
            "model: the targets are not class labels, so there is no number of outputs; give an"
            " nn.Module and a loss.",
            "model",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(fold_in(seed, "model"))
        try:
            return model.build(clients.shape, clients.classes)
        except (RuntimeError, OverflowError, TypeError, MemoryError) as error:
            raise InvalidInputError(
                f"model: {model!r} cannot be built ({error}).", "model"
            ) from error


def metrics_for(
    objective: Objective,
    clients: ClientMetadata,
    metrics: UserMetrics | None,
    device: torch.device,
    names: Sequence[MetricName] = (),
) -> dict[str, AnyMetric]:
    """Try the objective and the user's metrics on a few samples, and give what is measured:
    accuracy, for class labels, those metrics, and the metrics over all outputs with these names.
    """
    measured_metrics = measured(objective, clients, metrics, device, names)
    objective.check(as_inputs(clients.x.to(device)), clients.y.to(device))
    return measured_metrics


def measured(
    objective: Objective,
    clients: ClientMetadata,
    metrics: UserMetrics | None,
    device: torch.device,
    names: Sequence[MetricName] = (),
) -> dict[str, AnyMetric]:
    """`metrics_for` without a gradient step, which takes seconds the first time: every message to
    a node starts a process.
    """
    x, y = as_inputs(clients.x.to(device)), clients.y.to(device)
    outputs = objective.checked_outputs(x)
    classifies = clients.classes is not None and outputs.shape[:-1] == y.shape
    default_loss = objective.example_loss is cross_entropy
    if default_loss and not classifies:
        shape, labels = (
            tuple(outputs.shape[1:]),
            "one label a sample" if y.ndim == 1 else f"{y.shape[1]} labels a sample",
        )
        what = labels if clients.classes is not None else "none"
        raise InvalidInputError(
            f"loss: cross-entropy needs class labels ({what} here) and an output for each class,"
            f" the model gives {shape}; give a loss.",
            "loss",
        )
    if default_loss and clients.classes is not None and clients.classes > outputs.shape[-1]:
        raise InvalidInputError(
            f"model: it has {outputs.shape[-1]} outputs, but labels go up to {clients.classes - 1}:"
            f" give it at least {clients.classes} outputs, or number the labels from 0.",
            "model",
        )
    user: dict[str, AnyMetric] = {}
    for name, metric in (metrics or {}).items():
        field = f"metrics.{name}"
        if is_reserved(name) or name in names:
            raise InvalidInputError(
                f"metrics: '{name}' is the name of one of fedclade's own numbers; choose another.",
                field,
            )
        if is_torchmetric(metric):
            check_torchmetric(field, cast("Metric", metric), outputs, y)
            user[name] = from_torchmetrics(cast("Metric", metric))
        else:
            require_per_example(field, cast(ExampleLoss, metric), outputs, y)
            user[name] = cast(ExampleLoss, metric)
    own: dict[str, AnyMetric] = {"accuracy": accuracy} if classifies else {}
    return own | user | by_name(names, objective, clients.classes, outputs, y)
