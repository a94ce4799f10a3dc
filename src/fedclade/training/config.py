"""The settings of a run that do not belong to data, model or method, each checked where it is
made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from torch import nn

from fedclade.core.batching import ClassWeight
from fedclade.core.federation import Aggregator, ServerOptimizer, ServerUpdate
from fedclade.core.functional_model import Objective
from fedclade.core.local_training_config import LocalTraining, Optimizer
from fedclade.core.losses import LOSSES, ExampleLoss, LossName
from fedclade.engines.device import Precision
from fedclade.errors import InvalidInputError, is_int, is_number, require, require_int

Schedule: TypeAlias = Literal["constant", "step", "exponential", "cosine"]
BatchNorm: TypeAlias = Literal["average", "own"]
Serve: TypeAlias = Literal["last", "mean"]
Select: TypeAlias = Literal["last", "best"]
LearningRate: TypeAlias = float | Literal["auto"]
MetricName: TypeAlias = Literal["auroc", "f1", "ece", "mae", "rmse", "r2"]

StateStorage: TypeAlias = Literal["memory", "disk"]

_MAX_COUNT = 10**9
MAX_EPSILON = 100
MIN_CLIP, MAX_CLIP = 1e-4, 1e4  # in fixed point a number has a unit of 1e-9
_MAX_SHARDS = 10**4
AUTO = "auto"


def _require_choice(field: str, value: object, choices: object) -> None:
    allowed = get_args(choices)
    require(value in allowed, field, value, f"must be one of {', '.join(allowed)}")


def _with_python_numbers(settings: object) -> None:
    """Replace numpy numbers in the fields: files and messages hold Python's."""
    for name, value in vars(settings).items():
        if isinstance(value, np.generic):
            object.__setattr__(settings, name, value.item())


@dataclass(frozen=True)
class LocalConfig:
    """How a client trains.

    Args:
        lr: The learning rate η of local SGD; "auto" chooses it before the first round, by short
            runs on held-out training data (`training.lr_search`).
        batch_size: The size B of a minibatch.
        epochs: The number E of local epochs in a round.
        steps: The number of local steps in a round, in place of `epochs`, the same for every
            client; 0 for whole epochs.
        momentum: The momentum of local SGD.
        weight_decay: The weight decay of local SGD.
        optimizer: "sgd", "adam" or "adamw", as torch.optim defines them. Each call of a client
            starts with a new state.
        clip_norm: The largest norm of a gradient; 0 for no limit.
        schedule: The learning rate over the rounds: "constant"; "exponential", times `decay` after
            every round; "step", times `decay` after every `decay_every` rounds; "cosine", along
            half a cosine to 0 after the last round, so that `run.rounds` cannot change in a resumed
            run.
        decay: The factor of the schedules "exponential" and "step".
        decay_every: The number of rounds between two steps of the schedule "step".
        warmup_rounds: In these W first rounds the learning rate is lr · round / (W + 1). The
            schedule starts after them.
        loss: "cross_entropy", "bce", "mse", "mae" or "huber".
        label_smoothing: The share of a label that cross-entropy spreads over all classes.
        class_weight: "balanced" weights the classes of a client so that each has the same total
            weight, by the client's own counts.
        batch_norm: "average" averages BatchNorm layers like other layers; "own" keeps them at the
            client (FedBN).

    Example:
        >>> import fedclade as fc
        >>> local = fc.LocalConfig(lr=0.05, epochs=2, momentum=0.9)
        >>> local.lr_in_round(1, rounds=10)
        0.05
    """

    lr: LearningRate = 0.1
    batch_size: int = 10
    epochs: int = 1
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer: Optimizer = "sgd"
    clip_norm: float = 0.0
    schedule: Schedule = "constant"
    decay: float = 1.0
    decay_every: int = 1
    warmup_rounds: int = 0
    loss: LossName = "cross_entropy"
    label_smoothing: float = 0.0
    class_weight: ClassWeight = "none"
    batch_norm: BatchNorm = "average"
    steps: int = 0

    def __post_init__(self) -> None:
        _with_python_numbers(self)
        require(
            self.lr == AUTO or (is_number(self.lr) and float(self.lr) > 0),
            "local.lr",
            self.lr,
            f"must be a number above 0, or '{AUTO}'",
        )
        require_int("local.batch_size", self.batch_size, 1, _MAX_COUNT)
        require_int("local.epochs", self.epochs, 1, _MAX_COUNT)
        require_int("local.steps", self.steps, 0, _MAX_COUNT, "0 for whole epochs")
        require(
            self.epochs == 1 or not self.steps,
            "local.epochs",
            self.epochs,
            f"leave it at 1 with local.steps = {self.steps}, which takes its place",
        )
        require(
            is_number(self.momentum) and 0 <= self.momentum < 1,
            "local.momentum",
            self.momentum,
            "must be at least 0 and below 1",
        )
        require(
            is_number(self.weight_decay) and self.weight_decay >= 0,
            "local.weight_decay",
            self.weight_decay,
            "must be at least 0",
        )
        _require_choice("local.optimizer", self.optimizer, Optimizer)
        require(
            not self.momentum or self.optimizer == "sgd",
            "local.momentum",
            self.momentum,
            f"only SGD has momentum; leave it at 0 with local.optimizer = '{self.optimizer}'",
        )
        require(
            is_number(self.clip_norm) and self.clip_norm >= 0,
            "local.clip_norm",
            self.clip_norm,
            "must be at least 0",
        )
        _require_choice("local.schedule", self.schedule, Schedule)
        require(
            is_number(self.decay) and 0 < self.decay <= 1,
            "local.decay",
            self.decay,
            "must be above 0 and at most 1",
        )
        require(
            self.decay == 1 or self.schedule in ("exponential", "step"),
            "local.decay",
            self.decay,
            "only the schedules 'exponential' and 'step' have it; set local.schedule",
        )
        require_int("local.decay_every", self.decay_every, 1, _MAX_COUNT)
        require(
            self.decay_every == 1 or self.schedule == "step",
            "local.decay_every",
            self.decay_every,
            "only the schedule 'step' has it; set local.schedule",
        )
        require_int("local.warmup_rounds", self.warmup_rounds, 0, _MAX_COUNT, "0 for none")
        _require_choice("local.loss", self.loss, LossName)
        require(
            is_number(self.label_smoothing) and 0 <= self.label_smoothing < 1,
            "local.label_smoothing",
            self.label_smoothing,
            "must be at least 0 and below 1",
        )
        self._require_smoothing_of(self.loss)
        _require_choice("local.class_weight", self.class_weight, ClassWeight)
        _require_choice("local.batch_norm", self.batch_norm, BatchNorm)

    def lr_in_round(self, round_number: int, rounds: int) -> float:
        """The learning rate of this round.

        Args:
            round_number: the round; the first is 1.
            rounds: the number of rounds of the run.
        """
        lr = self.chosen_lr
        if round_number <= self.warmup_rounds:
            return lr * round_number / (self.warmup_rounds + 1)
        done, rounds = round_number - self.warmup_rounds - 1, rounds - self.warmup_rounds
        match self.schedule:
            case "constant":
                return lr
            case "exponential":
                return lr * self.decay**done
            case "step":
                return lr * self.decay ** (done // self.decay_every)
            case "cosine":
                return lr * (1 + math.cos(math.pi * done / rounds)) / 2

    @property
    def chosen_lr(self) -> float:
        """The learning rate before its schedule."""
        if self.lr == AUTO:
            raise InvalidInputError(
                f"local.lr = '{AUTO}': only a run in the simulator can choose it. Give a number.",
                "local.lr",
            )
        return float(self.lr)

    def training(
        self, objective: Objective, round_number: int = 1, rounds: int = 1
    ) -> LocalTraining:
        """How a client trains on this objective in this round.

        Args:
            objective: the model and its loss.
            round_number: the round; the first is 1.
            rounds: the number of rounds of the run.
        """
        return LocalTraining(
            objective,
            self.lr_in_round(round_number, rounds),
            self.batch_size,
            self.epochs,
            self.momentum,
            self.weight_decay,
            self.optimizer,
            self.clip_norm,
            self.class_weight,
            self.steps,
        )

    def loss_for(self, loss: ExampleLoss | None) -> ExampleLoss | None:
        """The loss of a run, as `Objective` takes it: `loss`, or the loss of this name if it is
        None.
        """
        if loss is not None:
            self._require_smoothing_of("a loss in Python")
            return loss
        if self.label_smoothing:
            return nn.CrossEntropyLoss(label_smoothing=self.label_smoothing)
        return LOSSES[self.loss]

    def _require_smoothing_of(self, loss: str) -> None:
        require(
            not self.label_smoothing or loss == "cross_entropy",
            "local.label_smoothing",
            self.label_smoothing,
            f"only the loss 'cross_entropy' has it; leave it at 0 with {loss}",
        )


@dataclass(frozen=True)
class TrainingConfig:
    """How long a run is, how many clients take part in a round, and what is saved.

    Args:
        rounds: The number of rounds T.
        clients_per_round: The cohort: a float is a fraction of the clients, an int their number.
        seed: The seed of all random numbers.
        eval_every: The number of rounds between evaluations; 0 for the end only.
        eval_clients: The clients that evaluations before the last one measure: a float is a
            fraction, an int their number. They are the same in every round. The last evaluation
            measures all clients.
        checkpoint_every: The number of rounds between checkpoints; 0 for the end only.
        max_rejections: A client is blocked after this number of rejected replies; 0 for never.
        patience: Stop after this number of evaluations without a better loss on validation data;
            0 for never.
        select: "last" serves the models of the last round; "best" those of the round with the
            lowest loss on validation data.
        metrics: More metrics, over all outputs of a client: "auroc", "f1", "ece", "mae", "rmse",
            "r2".

    Example:
        >>> import fedclade as fc
        >>> fc.TrainingConfig(rounds=50, clients_per_round=0.2).cohort_size(40)
        8
    """

    rounds: int = 100
    clients_per_round: int | float = 0.2
    seed: int = 0
    eval_every: int = 10
    checkpoint_every: int = 10
    max_rejections: int = 3
    patience: int = 0
    select: Select = "last"
    metrics: tuple[MetricName, ...] = ()
    eval_clients: int | float = 1.0

    def __post_init__(self) -> None:
        _with_python_numbers(self)
        require_int("run.rounds", self.rounds, 1, _MAX_COUNT)
        for field, size in (
            ("run.clients_per_round", self.clients_per_round),
            ("run.eval_clients", self.eval_clients),
        ):
            is_share = isinstance(size, float | np.floating) and 0 < size <= 1
            require(
                is_share or is_int(size, 1, _MAX_COUNT),
                field,
                size,
                "must be a share above 0.0 and at most 1.0, or a whole number of clients of at"
                " least 1",
            )
        require_int("run.seed", self.seed, 0, _MAX_COUNT)
        require_int("run.eval_every", self.eval_every, 0, _MAX_COUNT, "0 for the end only")
        require_int(
            "run.checkpoint_every", self.checkpoint_every, 0, _MAX_COUNT, "0 for the end only"
        )
        require_int("run.max_rejections", self.max_rejections, 0, _MAX_COUNT, "0 for never")
        require_int("run.patience", self.patience, 0, _MAX_COUNT, "0 for never")
        _require_choice("run.select", self.select, Select)
        for field, value, default in (
            ("run.patience", self.patience, 0),
            ("run.select", self.select, "last"),
        ):
            require(
                value == default or self.eval_every > 0,
                field,
                value,
                "it compares evaluations; set run.eval_every above 0",
            )
        require(
            isinstance(self.metrics, list | tuple),
            "run.metrics",
            self.metrics,
            "must be a list of names",
        )
        object.__setattr__(self, "metrics", tuple(self.metrics))
        for name in self.metrics:
            _require_choice("run.metrics", name, MetricName)
        require(
            len(set(self.metrics)) == len(self.metrics),
            "run.metrics",
            self.metrics,
            "a name is there twice",
        )

    def cohort_size(self, clients: int) -> int:
        """The number of clients in a round's cohort."""
        return _number_of("run.clients_per_round", self.clients_per_round, clients)

    def evaluation_size(self, clients: int) -> int:
        """The number of clients that an evaluation before the last one measures."""
        return _number_of("run.eval_clients", self.eval_clients, clients)

    @property
    def samples_evaluation(self) -> bool:
        """Whether evaluations before the last one measure a sample of the clients."""
        return self.eval_clients != 1.0 or isinstance(self.eval_clients, int)


def _number_of(field: str, size: int | float, clients: int) -> int:
    """A number of clients that is given as such, or as a share of all."""
    if isinstance(size, float | np.floating):
        return max(1, round(size * clients))
    allowed = f"there are {clients} clients; use at most that number, or a fraction such as 0.2"
    require(size <= clients, field, size, allowed)
    return int(size)


@dataclass(frozen=True)
class ServerConfig:
    """What the server does with the clients' models.

    Args:
        aggregator: The mean weighted by examples ("mean"), or one that is robust to a few bad
            models ("median", "trimmed_mean", "clipped_mean").
        optimizer: How the mean becomes the new model of a group: "fedavg" takes it; "fedavgm",
            "nesterov", "fedadam", "fedyogi" and "fedadagrad" take its difference from the old
            model as a gradient. None for the method's own: "nesterov" for Clade, else "fedavg".
        lr: The learning rate of the server; None for the default of the optimizer.
        momentum: The momentum of "fedavgm" and "nesterov", and β1 of the adaptive ones; None for
            the default.
        serve: "last" serves the models of the last round; "mean" their weighted mean over the
            rounds. None for the method's own: "mean" for Clade, else "last".

    Example:
        >>> import fedclade as fc
        >>> server = fc.ServerConfig(optimizer="fedadam", lr=0.01)
    """

    aggregator: Aggregator = "mean"
    optimizer: ServerOptimizer | None = None
    lr: float | None = None
    momentum: float | None = None
    serve: Serve | None = None

    def __post_init__(self) -> None:
        _with_python_numbers(self)
        _require_choice("server.aggregator", self.aggregator, Aggregator)
        if self.optimizer is not None:
            _require_choice("server.optimizer", self.optimizer, ServerOptimizer)
        require(
            self.lr is None or (is_number(self.lr) and self.lr > 0),
            "server.lr",
            self.lr,
            "must be a number above 0",
        )
        require(
            self.momentum is None or (is_number(self.momentum) and 0 <= self.momentum < 1),
            "server.momentum",
            self.momentum,
            "must be at least 0 and below 1",
        )
        for field, value in (("server.lr", self.lr), ("server.momentum", self.momentum)):
            require(
                value is None or self.optimizer not in (None, "fedavg"),
                field,
                value,
                "only the other optimizers of the server have it; set server.optimizer",
            )
        if self.serve is not None:
            _require_choice("server.serve", self.serve, Serve)

    def update(
        self, optimizer: ServerOptimizer, serve_mean: bool, statistics: tuple[str, ...]
    ) -> ServerUpdate:
        """How the new models are made from the means.

        Args:
            optimizer: the optimizer of the method, used if none is set.
            serve_mean: whether the method serves means over the rounds, used if nothing is set.
            statistics: the names of the model's running statistics.
        """
        return ServerUpdate(
            self.optimizer or optimizer,
            self.lr,
            self.momentum,
            serve_mean if self.serve is None else self.serve == "mean",
            statistics,
        )


@dataclass(frozen=True)
class PrivacyConfig:
    """What protects the clients' contributions to sums, see docs/privacy.md.

    Args:
        epsilon: ε of the differential privacy of a whole client in training; None for none.
        delta: δ of the same; below 1 / the number of clients.
        clip: The largest norm of what a client contributes in a round, or "adaptive".
        noise_multiplier: The noise in units of the clip; None for the least that keeps all rounds
            within ε. With a value the run ends before ε is exceeded.
        max_examples: A client counts with its number of examples up to this number; None to count
            all clients alike.
        secure_sum: Whether the server sees only sums over clients where it needs no more.
        min_group: The least number of clients in a secure sum.

    Example:
        >>> import fedclade as fc
        >>> privacy = fc.PrivacyConfig(epsilon=8.0, clip=1.0)
    """

    epsilon: float | None = None
    delta: float = 1e-5
    clip: float | Literal["adaptive"] = "adaptive"
    noise_multiplier: float | None = None
    max_examples: int | None = None
    secure_sum: bool = False
    min_group: int = 3

    def __post_init__(self) -> None:
        _with_python_numbers(self)
        require(
            self.epsilon is None or (is_number(self.epsilon) and 0 < self.epsilon <= MAX_EPSILON),
            "privacy.epsilon",
            self.epsilon,
            f"must be a number above 0 and at most {MAX_EPSILON}; leave it out for no noise",
        )
        require(
            is_number(self.delta) and 0 < self.delta < 1,
            "privacy.delta",
            self.delta,
            "must be between 0 and 1",
        )
        require(
            self.clip == "adaptive" or (is_number(self.clip) and MIN_CLIP <= self.clip <= MAX_CLIP),
            "privacy.clip",
            self.clip,
            f"must be a number from {MIN_CLIP:g} to {MAX_CLIP:g}, or 'adaptive'",
        )
        require(
            self.noise_multiplier is None
            or (is_number(self.noise_multiplier) and 0.01 <= self.noise_multiplier <= 1e5),
            "privacy.noise_multiplier",
            self.noise_multiplier,
            "must be a number from 0.01 to 100000; leave it out to compute it",
        )
        if self.max_examples is not None:
            require_int("privacy.max_examples", self.max_examples, 1, _MAX_COUNT)
        require(
            isinstance(self.secure_sum, bool),
            "privacy.secure_sum",
            self.secure_sum,
            "must be true or false",
        )
        require_int("privacy.min_group", self.min_group, 2, _MAX_COUNT)


@dataclass(frozen=True)
class EngineConfig:
    """How the simulator runs.

    Args:
        chunk: The number of clients in one step; None to choose it by device and model.
        precision: The precision of matrix products on CUDA, "tf32" or "float32"; "bf16" for models
            that compute in bfloat16, also on a CPU that has it.
        threads: The number of CPU threads; None for one per core. With shards, of each.
        shards: With `--engine ray`, the number of simulators that share the clients; None for one
            per core or GPU of this machine.
        client_state: Where the state is that clients keep between rounds: "memory" or "disk"; None
            for memory in one simulator and disk in several.
    """

    chunk: int | None = None
    precision: Precision = "tf32"
    threads: int | None = None
    shards: int | None = None
    client_state: StateStorage | None = None

    def __post_init__(self) -> None:
        _with_python_numbers(self)
        if self.shards is not None:
            require_int("engine.shards", self.shards, 1, _MAX_SHARDS)
        if self.client_state is not None:
            _require_choice("engine.client_state", self.client_state, StateStorage)

    def simulator_options(self) -> dict[str, Any]:
        """The options of each `Simulator`."""
        return {"chunk": self.chunk, "precision": self.precision, "threads": self.threads}
