"""What happens before the first round: the module is built, and model, loss and metrics are tried
on a few samples, so that nothing fails an hour later.
"""

from __future__ import annotations

import copy
import secrets
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fedclade.aggregation.optimizer_federation import OptimizerFederation
from fedclade.aggregation.own_batch_norm import OwnBatchNorm
from fedclade.aggregation.robust_federation import RobustFederation
from fedclade.core.augmentation import augment_inputs
from fedclade.core.federation import Federation
from fedclade.core.functional_encoder import Encoder
from fedclade.core.functional_model import Objective
from fedclade.core.inputs import (
    Inputs,
    as_inputs,
    describe_inputs,
    device_of,
    map_inputs,
    one_tensor,
    samples_in,
    tensors_of,
)
from fedclade.core.losses import (
    REGRESSION,
    ExampleLoss,
    LossName,
    accuracy,
    bce,
    cross_entropy,
    label_accuracy,
    require_per_example,
)
from fedclade.core.module_copy import require_copyable
from fedclade.core.output_metric import AnyMetric
from fedclade.core.program_serialization import NodeContext
from fedclade.core.rng import fold_in
from fedclade.data.client_metadata import ClientMetadata
from fedclade.data.federated_dataset import Clients
from fedclade.engines.base import Engine
from fedclade.engines.simulator import Simulator
from fedclade.errors import FedcladeWarning, InvalidInputError, is_int, require
from fedclade.methods.base import Method, hyperparameters
from fedclade.methods.required_context import (
    NeedsEncoder,
    NeedsInputShape,
    NeedsProbe,
    NeedsSecret,
    NeedsTrueGroups,
)
from fedclade.models import ModelSpec
from fedclade.privacy.accounting import Release, epsilon_of, find_noise_multiplier
from fedclade.privacy.budget import PrivacyBudget
from fedclade.privacy.private_federation import PrivateFederation
from fedclade.privacy.secure_sum_federation import SecureSumFederation
from fedclade.training import encoders, plot_data
from fedclade.training.config import (
    LocalConfig,
    MetricName,
    PrivacyConfig,
    ServerConfig,
    TrainingConfig,
)
from fedclade.training.metrics import is_reserved
from fedclade.training.output_metrics import (
    UserMetrics,
    by_name,
    check_torchmetric,
    from_torchmetrics,
    is_torchmetric,
)
from fedclade.training.personal_layer import PersonalLayer, layer_of
from fedclade.training.run_fingerprint import Tables, fingerprint, plain, qualified_name

if TYPE_CHECKING:
    from torchmetrics import Metric

    from fedclade.training.runner import TrainingRun


@dataclass(frozen=True, eq=False)
class RunSetup:
    """Everything that the rounds of a run need. It is made once and never changes."""

    engine: Engine
    federation: Federation  # what the method sees of the engine
    sums: Federation  # the engine, with secure sums if the run has them
    clients: Clients | None  # None: they are not in this process
    metadata: ClientMetadata  # the clients that there are at the start; more may join
    method: Method
    module: nn.Module
    objective: Objective
    served: Objective  # what clients predict with; most often `objective`
    layer: PersonalLayer | None  # what clients make of their models before they use them
    metrics: dict[str, AnyMetric]
    own_batch_norm: OwnBatchNorm
    local: LocalConfig
    training: TrainingConfig
    budget: PrivacyBudget | None  # of differential privacy
    tables: Tables  # the run as the tables of an experiment file

    def method_for(self, round_number: int) -> Method:
        """The method with the local training of this round."""
        local = self.local.training(self.objective, round_number, self.training.rounds)
        return self.method.with_local_config(local)

    def is_due(self, round_number: int, every: int) -> bool:
        """Whether this round is the last, or a multiple of `every`."""
        return round_number == self.training.rounds or (every > 0 and round_number % every == 0)

    def is_layer_due(self, round_number: int, is_final: bool) -> bool:
        """Whether the clients' personal models are measured in this round."""
        if self.layer is None:
            return False
        every = self.layer.config.every
        return is_final or (every > 0 and round_number % every == 0)

    @cached_property
    def fingerprint(self) -> str:
        """The hash by which a checkpoint of another experiment is recognized."""
        probe = self.method.probe if isinstance(self.method, NeedsProbe) else None
        others = (*self.objective.params().values(), *(() if probe is None else tensors_of(probe)))
        augment = self.objective.augment
        names = [] if augment is None else [qualified_name(augment)]
        return fingerprint(self.tables, self.clients, others, names)

    @cached_property
    def label_counts(self) -> Tensor | None:
        return plot_data.label_counts(self.clients)


@dataclass(frozen=True, eq=False)
class ClientSide:
    """What every process that has clients makes of a run: model, method and metrics; see
    `RunSetup`.
    """

    method: Method
    module: nn.Module
    objective: Objective
    served: Objective
    layer: PersonalLayer | None
    metrics: dict[str, AnyMetric]

    def context(self) -> NodeContext:
        """What the programs of simulated clients need."""
        method = self.method
        encoder = method.encoder_module if isinstance(method, NeedsEncoder) else None
        return NodeContext(
            self.objective,
            None if encoder is None else Encoder(encoder),
            (method.secret or 0) if isinstance(method, NeedsSecret) else 0,
            self.served,
        )


def client_side(run: TrainingRun, metadata: ClientMetadata, device: torch.device) -> ClientSide:
    """Build the model of a run, and try it on a few samples.

    Args:
        run: the run.
        metadata: the clients' metadata.
        device: the device of the model.
    """
    method = inject_context(run.method, metadata, run.settings.seed)
    loss_name = run.local.loss if run.loss is None else None
    _require_classes(run.local, loss_name, metadata)
    if loss_name == "bce":
        _require_labels(metadata.y if run.clients is None else run.clients.y)
    module = module_for(run.model, metadata, run.settings.seed, loss_name)
    x = _on_device(metadata.x, device)
    loss = run.local.loss_for(run.loss)
    bf16 = run.engine.precision == "bf16"
    objective = Objective(module.to(device), loss, x, run.augment, bf16)
    served = method.served_objective(module, objective, x)
    layer = layer_of(run.personal, method, module, objective, metadata)
    if layer is not None:
        served = layer.served_objective(module, objective, x)
    metrics = metrics_for(objective, metadata, run.metrics, device, run.settings.metrics)
    _check_augmentation(objective, x)
    return ClientSide(method, module, objective, served, layer, metrics)


def prepare(run: TrainingRun, state_folder: Path | None = None) -> RunSetup:
    """Build the engine and the model of a run, and check that they fit together.

    Args:
        run: the run.
        state_folder: where a simulator stores the clients' state; None for memory.
    """
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
    engine = run.federation or _simulator(run, state_folder)
    _check_server(run.method, run.server)
    metadata = engine.client_metadata()
    require(len(metadata) > 0, "clients", 0, "there must be at least one")
    run.settings.cohort_size(len(metadata))
    run.settings.evaluation_size(len(metadata))
    if is_int(run.settings.clients_per_round, 1, 1) and len(metadata) > 1:
        _warn_of_one_client(len(metadata))
    _require_validation(run.settings, metadata)
    side = client_side(run, metadata, engine.device)
    method, objective = side.method, side.objective
    own_batch_norm = own_batch_norm_of(method, objective, run.local)
    sums: Federation = engine
    if run.privacy.secure_sum:
        _check_secure_sum(run, method, engine)
        sums = SecureSumFederation(engine, run.privacy.min_group)
    budget = None
    if run.privacy.epsilon is not None:
        _check_privacy(run, method, side.layer, objective, own_batch_norm)
        budget = _budget(run, engine, len(metadata))
    return RunSetup(
        engine=engine,
        federation=federation_view(
            own_batch_norm.federation(private_view(sums, method, run.privacy, budget)),
            method,
            run.server,
            objective,
        ),
        sums=sums,
        budget=budget,
        own_batch_norm=own_batch_norm,
        clients=run.clients,
        metadata=metadata,
        method=method,
        module=side.module,
        objective=objective,
        served=side.served,
        layer=side.layer,
        metrics=side.metrics,
        local=run.local,
        training=run.settings,
        tables=_tables(run, method, metadata),
    )


def _check_augmentation(objective: Objective, x: Inputs) -> None:
    """Try the augmentation on a few inputs, and the model on the result."""
    if objective.augment is None:
        return
    if isinstance(objective.augment, type) or not callable(objective.augment):
        raise InvalidInputError(
            f"augment = {objective.augment!r}: give a function of the inputs of a batch.", "augment"
        )
    key = torch.zeros((), dtype=torch.int64, device=device_of(x))
    objective.checked_outputs(augment_inputs(x, key, objective.augment))


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


def _check_server(method: Method, server: ServerConfig) -> None:
    """Raise `InvalidInputError` if the method cannot use these settings."""
    require(
        server.aggregator == "mean" or not method.custom_aggregation,
        "server.aggregator",
        server.aggregator,
        f"method {method.name} has only {method.custom_aggregation}; leave it at 'mean'",
    )
    for field, value, default in (
        ("server.optimizer", server.optimizer, "fedavg"),
        ("server.serve", server.serve, "last"),
    ):
        require(
            value in (None, default) or not method.no_server_optimizer,
            field,
            value,
            f"method {method.name} {method.no_server_optimizer}; leave it at '{default}'",
        )


def federation_view(
    federation: Federation, method: Method, server: ServerConfig, objective: Objective
) -> Federation:
    """The federation that a method works with."""
    update = server.update(method.server_optimizer, method.serves_mean, objective.statistics)
    if server.aggregator != "mean":
        federation = RobustFederation(federation, server.aggregator)
    return federation if update.is_mean else OptimizerFederation(federation, update)


def _check_secure_sum(run: TrainingRun, method: Method, engine: Engine) -> None:
    """Raise `InvalidInputError` if the sums of the run cannot be secure."""
    reason = method.why_no_secure_sum()
    require(
        not reason, "privacy.secure_sum", run.privacy.secure_sum, f"method {method.name} {reason}"
    )
    require(
        run.server.aggregator == "mean",
        "server.aggregator",
        run.server.aggregator,
        "with privacy.secure_sum it must be 'mean': a robust mean needs the model of each client",
    )
    require(
        engine.has_secure_sums,
        "privacy.secure_sum",
        run.privacy.secure_sum,
        f"not in a simulation of {engine.name}; use the engine 'simulator', or a deployment",
    )


def private_view(
    federation: Federation, method: Method, privacy: PrivacyConfig, budget: PrivacyBudget | None
) -> Federation:
    """The federation whose sums of models have noise, if the run has a budget."""
    if budget is None:
        return federation
    return PrivateFederation(federation, budget, method.without_noise, privacy.max_examples)


def _check_privacy(
    run: TrainingRun,
    method: Method,
    layer: PersonalLayer | None,
    objective: Objective,
    own: OwnBatchNorm,
) -> None:
    """Raise `InvalidInputError` if something of the run would leave clients without noise."""
    epsilon = run.privacy.epsilon
    reason = method.why_no_client_privacy()
    require(not reason, "privacy.epsilon", epsilon, f"method {method.name} {reason}")
    require(
        run.server.aggregator == "mean",
        "server.aggregator",
        run.server.aggregator,
        "with privacy.epsilon it must be 'mean': a robust mean needs the model of each client",
    )
    for field, value, default in (
        ("run.select", run.settings.select, "last"),
        ("run.patience", run.settings.patience, 0),
    ):
        require(
            value == default,
            field,
            value,
            f"with privacy.epsilon it must be {default!r}: losses on validation data have no noise",
        )
    require(
        layer is None or layer.guarded is None,
        "personal.layer",
        run.personal.layer or method.personal_layer,
        "with privacy.epsilon it must be 'none' or 'finetune': clients choose the strength of the"
        " others by sums of scores, which have no noise",
    )
    statistics = [name for name in objective.statistics if name not in own.names]
    require(
        not statistics,
        "local.batch_norm",
        run.local.batch_norm,
        "with privacy.epsilon it must be 'own': running statistics with noise are useless. Or use a"
        " model with GroupNorm",
    )
    if run.privacy.secure_sum:
        _check_both(run, method)
    require(
        run.privacy.max_examples is None or method.name != "scaffold",
        "privacy.max_examples",
        run.privacy.max_examples,
        "method scaffold counts all clients alike; leave it out",
    )


def _check_both(run: TrainingRun, method: Method) -> None:
    """Raise `InvalidInputError` if the accounting of the noise does not hold with secure sums."""
    cohort = run.settings.clients_per_round
    require(
        isinstance(cohort, float) and cohort == 1.0,
        "run.clients_per_round",
        cohort,
        "with privacy.epsilon and privacy.secure_sum it must be 1.0: each node sees who is in a"
        " sum, and one client more or less decides whether a small group is summed. A sample of"
        " the clients would need less noise only if nobody could tell who is in it",
    )
    require(
        method.name != "ifca",
        "privacy.secure_sum",
        True,
        "with privacy.epsilon it must be false for method ifca: one client that chooses a group"
        " decides whether the others in it are summed, which its clip does not bound. Use fedem",
    )


def _budget(run: TrainingRun, engine: Engine, clients: int) -> PrivacyBudget:
    """The budget of a run: the least noise that keeps all rounds within ε, unless it is given."""
    privacy, rounds = run.privacy, run.settings.rounds
    assert privacy.epsilon is not None
    require(
        privacy.delta < 1 / clients,
        "privacy.delta",
        privacy.delta,
        f"must be below 1 / {clients}, the number of clients: a larger one allows to show a client"
        " as it is",
    )
    rate = PrivacyBudget.rate_of(run.settings.cohort_size(clients), clients)
    noise = privacy.noise_multiplier or find_noise_multiplier(
        privacy.epsilon, privacy.delta, rate, rounds
    )
    first = epsilon_of([(Release(rate, noise), 1)], privacy.delta)
    require(
        first <= privacy.epsilon,
        "privacy.noise_multiplier",
        privacy.noise_multiplier,
        f"one round costs ε = {first:.3g}, more than privacy.epsilon = {privacy.epsilon:g}",
    )
    secret = fold_in(run.settings.seed, "privacy") if engine.holds_clients else 0
    return PrivacyBudget(
        privacy.epsilon,
        privacy.delta,
        noise,
        None if privacy.clip == "adaptive" else float(privacy.clip),
        secret or secrets.randbits(256),
        is_simulated=engine.holds_clients,
        planned=None if privacy.noise_multiplier else (Release(rate, noise), rounds),
    )


def own_batch_norm_of(method: Method, objective: Objective, local: LocalConfig) -> OwnBatchNorm:
    """The BatchNorm layers that clients keep, besides those that they keep in this method anyway.

    Args:
        method: the method.
        objective: the model.
        local: the settings of local training.
    """
    if local.batch_norm == "average" and not method.own_batch_norm:
        return OwnBatchNorm(objective)
    field, value, instead = (
        ("method.name", method.name, "use fedavg")
        if method.own_batch_norm
        else ("local.batch_norm", local.batch_norm, "leave it at 'average'")
    )
    require(
        bool(objective.batch_norm),
        field,
        value,
        f"the model has no BatchNorm layer; {instead}",
    )
    reason = method.why_no_own_batch_norm()
    require(
        not reason,
        "local.batch_norm",
        local.batch_norm,
        f"method {method.name} {reason}; leave it at 'average'",
    )
    kept = method.with_local_config(local.training(objective)).local_params()
    return OwnBatchNorm(objective, tuple(n for n in objective.batch_norm if n not in kept))


def _simulator(run: TrainingRun, state_folder: Path | None) -> Simulator:
    if not isinstance(run.clients, Clients):
        raise InvalidInputError(
            "clients: make them with fc.data.partition(…) or fc.data.from_arrays(…).",
            "clients",
        )
    require(
        run.engine.shards in (None, 1),
        "engine.shards",
        run.engine.shards,
        "only --engine ray has several shards; leave it out",
    )
    return Simulator(
        run.clients,
        device=run.device,
        profile=run.profile,
        state_folder=state_folder,
        **run.engine.simulator_options(),
    )


def _tables(run: TrainingRun, method: Method, metadata: ClientMetadata) -> Tables:
    hyperparams = {each.name: getattr(method, each.name) for each in hyperparameters(method)}
    model: dict[str, Any] = (
        {each.name: getattr(run.model, each.name) for each in fields(run.model)}
        if is_dataclass(run.model)
        else {}
    )
    name = type(run.model).__name__ if isinstance(run.model, nn.Module) else run.model.name
    source: Tables = {
        "data": {"name": metadata.dataset, **metadata.validation_origin},
        "partition": {"name": metadata.partition, **metadata.origin},
    }
    if metadata.data_origin:
        source = {"data": {**metadata.data_origin, **metadata.validation_origin}}
    tables: Tables = source | {
        "model": {"name": name, **model},
        "local": asdict(run.local),
        "method": {"name": method.name, **hyperparams},
        "run": asdict(run.settings),
        "personal": asdict(run.personal),
        "server": asdict(run.server),
        "engine": asdict(run.engine),
    }
    if run.privacy != PrivacyConfig():
        tables["privacy"] = asdict(run.privacy)
    return cast(Tables, plain(tables))


def inject_context(method: Method, clients: ClientMetadata, seed: int) -> Method:
    """The method with what it needs of the federation besides the clients' replies; see
    `methods.required_context`. A value that the user gave stays.
    """
    context: dict[str, Any] = {}
    if isinstance(method, NeedsEncoder):
        shape = tuple(one_tensor(clients.x, f"method {method.name}", "method.name").shape[1:])
        if method.encoder_module is None:
            context["encoder_module"] = encoders.resolve(method.encoder_source, shape, seed)
    if isinstance(method, NeedsProbe):
        probe = clients.probe if method.probe is None else method.probe
        context["probe"] = None if probe is None else _probe(probe, clients.x)
    if isinstance(method, NeedsTrueGroups) and method.truth is None:
        context["truth"] = clients.groups
    if (
        isinstance(method, NeedsInputShape)
        and isinstance(clients.x, Tensor)
        and clients.x.dtype in (torch.uint8, torch.float32, torch.float64)
    ):
        context["input_shape"] = clients.shape
    return replace(method, **context) if context else method


def _on_device(x: Inputs, device: torch.device) -> Inputs:
    """Inputs as a model reads them."""
    return as_inputs(map_inputs(lambda value: value.to(device), x))


def _probe(probe: Any, like: Inputs) -> Inputs:
    """Probe inputs, as a client would read them; `like` are inputs of the clients."""
    try:
        x = as_inputs(
            map_inputs(torch.as_tensor, probe)
            if isinstance(probe, dict | tuple)
            else torch.as_tensor(probe)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"probe: not an array of inputs ({error}).", "probe") from error
    if describe_inputs(x) != describe_inputs(like) or samples_in(x) == 0:
        raise InvalidInputError(
            f"probe: {samples_in(x)} inputs of shape {describe_inputs(x)}. It must have at least"
            f" one, of shape {describe_inputs(like)} as the clients' inputs.",
            "probe",
        )
    return x


def _require_classes(
    local: LocalConfig, loss_name: LossName | None, clients: ClientMetadata
) -> None:
    """Weights of classes need one class per sample."""
    require(
        local.class_weight == "none"
        or (
            clients.classes is not None
            and clients.y.ndim == 1
            and loss_name not in ("mse", "mae", "huber")
        ),
        "local.class_weight",
        local.class_weight,
        "the targets must be one class for each sample; leave it at 'none'",
    )


def _require_labels(y: Tensor) -> None:
    """The loss bce has no minimum for other targets."""
    low, high = float(y.min()), float(y.max())
    if low < 0 or high > 1:
        raise InvalidInputError(
            f"local.loss = 'bce': needs targets of 0 and 1, and they go from {low:g} to {high:g}."
            " Use 'cross_entropy' for classes, 'mse' for numbers.",
            "local.loss",
        )


def outputs_for(loss_name: LossName | None, clients: ClientMetadata) -> int | None:
    """The number of outputs of a model: one for each class, label or number of a target; None if
    the targets do not give it.

    Args:
        loss_name: the name of the loss; None for a function of the user.
        clients: the clients.
    """
    if loss_name in (None, "cross_entropy"):
        return clients.classes
    if clients.y.ndim > 2:
        return None
    return clients.y.shape[1] if clients.y.ndim == 2 else 1


def module_for(
    model: ModelSpec | nn.Module,
    clients: ClientMetadata,
    seed: int,
    loss_name: LossName | None = "cross_entropy",
) -> nn.Module:
    """The user's module, or the spec's with weights that depend on the seed alone.

    Args:
        model: the user's module, or a spec.
        clients: the clients.
        seed: the seed of the weights.
        loss_name: the name of the loss; None for a function of the user.
    """
    if isinstance(model, nn.Module):
        require_copyable(model)
        return copy.deepcopy(model)
    if isinstance(model, type) or not hasattr(model, "build"):
        raise InvalidInputError(
            f"model = {model!r}: give one of fc.models, such as fc.models.MLP(200), or an"
            " nn.Module.",
            "model",
        )
    outputs = outputs_for(loss_name, clients)
    if outputs is None:
        raise InvalidInputError(
            "model: the targets are not class labels, so there is no number of outputs; give an"
            " nn.Module and a loss, or a loss by name (local.loss).",
            "model",
        )
    shape = tuple(one_tensor(clients.x, f"the model {model.name}", "model").shape[1:])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(fold_in(seed, "model"))
        try:
            return model.build(shape, outputs)
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
    accuracy, for class labels and for labels of 0 and 1 with the loss bce, those metrics, and the
    metrics over all outputs with these names.
    """
    measured_metrics = measured(objective, clients, metrics, device, names)
    objective.check(_on_device(clients.x, device), clients.y.to(device))
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
    x, y = _on_device(clients.x, device), clients.y.to(device)
    outputs = objective.checked_outputs(x)
    classifies = (
        clients.classes is not None
        and outputs.shape[:-1] == y.shape
        and objective.example_loss not in REGRESSION
    )
    default_loss = objective.example_loss is cross_entropy
    if default_loss and not classifies:
        shape, labels = (
            tuple(outputs.shape[1:]),
            "one label a sample" if y.ndim == 1 else f"{y.shape[1]} labels a sample",
        )
        what = labels if clients.classes is not None else "none"
        raise InvalidInputError(
            f"loss: cross-entropy needs class labels ({what} here) and an output for each class,"
            f" the model gives {shape}; give another loss (local.loss, such as 'mse').",
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
    if objective.example_loss is bce:
        require_per_example("loss", bce, outputs, y)
        own = {"accuracy": label_accuracy}
    return own | user | by_name(names, objective, clients.classes, outputs, y)
