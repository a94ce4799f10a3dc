"""`fc.run` and `TrainingRun`: one run from its parts to its result. A method sees the federation;
only a run sees test data and the disk.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fedclade.core.augmentation import Augment
from fedclade.core.batching import ClassWeight
from fedclade.core.federation import Aggregator, ServerOptimizer
from fedclade.core.local_training_config import Optimizer
from fedclade.core.losses import ExampleLoss, LossName
from fedclade.data.federated_dataset import Clients
from fedclade.engines.base import Engine
from fedclade.engines.device import Precision
from fedclade.engines.profiler import Profile
from fedclade.engines.simulator import Simulator
from fedclade.errors import (
    DifferentExperimentError,
    FedcladeError,
    FedcladeWarning,
    InvalidInputError,
)
from fedclade.io.checkpoint import Checkpoint
from fedclade.io.run_dir import RunDirectory, resumable
from fedclade.io.schemas import LrSearch, RoundRecord, Summary
from fedclade.methods.base import Method
from fedclade.models import ModelSpec
from fedclade.models.transformers import adapter_description
from fedclade.training import metrics as client_metrics
from fedclade.training import plot_data
from fedclade.training.callbacks import (
    Callback,
    CallFunction,
    CheckpointFiles,
    HistoryFile,
    LogRound,
    OnRound,
)
from fedclade.training.config import (
    AUTO,
    BatchNorm,
    EngineConfig,
    LearningRate,
    LocalConfig,
    MetricName,
    PrivacyConfig,
    Schedule,
    Select,
    Serve,
    ServerConfig,
    TrainingConfig,
)
from fedclade.training.early_stopping import is_exhausted
from fedclade.training.evaluation import Evaluation, evaluate, final_models, summarize
from fedclade.training.graceful_interrupt import Interrupt
from fedclade.training.loop import Progress, select_best, start, train
from fedclade.training.lr_search import search_lr
from fedclade.training.output_metrics import UserMetrics
from fedclade.training.personal_layer import PersonalConfig, with_neighbors
from fedclade.training.prediction import TaskSpec
from fedclade.training.progress_display import user_display
from fedclade.training.result import ReportInputs, Result, load, untrained, write_outcome
from fedclade.training.round_costs import Counters
from fedclade.training.run_fingerprint import difference
from fedclade.training.setup import RunSetup, outputs_for, prepare

_log = logging.getLogger("fedclade")


def run(
    method: Method,
    clients: Clients,
    model: ModelSpec | nn.Module,
    *,
    rounds: int | None = None,
    clients_per_round: int | float | None = None,
    lr: LearningRate | None = None,
    batch_size: int | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    momentum: float | None = None,
    weight_decay: float | None = None,
    optimizer: Optimizer | None = None,
    clip_norm: float | None = None,
    schedule: Schedule | None = None,
    decay: float | None = None,
    decay_every: int | None = None,
    warmup_rounds: int | None = None,
    label_smoothing: float | None = None,
    class_weight: ClassWeight | None = None,
    batch_norm: BatchNorm | None = None,
    loss: LossName | ExampleLoss | None = None,
    metrics: UserMetrics | Sequence[MetricName] | None = None,
    augment: Augment | None = None,
    seed: int | None = None,
    eval_every: int | None = None,
    eval_clients: int | float | None = None,
    checkpoint_every: int | None = None,
    max_rejections: int | None = None,
    patience: int | None = None,
    select: Select | None = None,
    aggregator: Aggregator | None = None,
    server_optimizer: ServerOptimizer | None = None,
    server_lr: float | None = None,
    server_momentum: float | None = None,
    serve: Serve | None = None,
    local: LocalConfig | None = None,
    training: TrainingConfig | None = None,
    server: ServerConfig | None = None,
    personal: PersonalConfig | None = None,
    privacy: PrivacyConfig | None = None,
    device: str = "auto",
    chunk: int | None = None,
    precision: Precision = "tf32",
    threads: int | None = None,
    profile: bool = False,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    progress: bool = False,
    report: bool = True,
) -> Result:
    """Train `method` on `clients` and evaluate every client.

    `local` and `training` hold all settings of local training and of the run. The arguments with
    the names of their fields are short forms: they replace single fields.

    Args:
        method: The method, such as `fc.Clade()`.
        clients: The clients and their data, from `fc.data.partition` or `fc.data.from_arrays`.
        model: One of `fc.models`, or any `nn.Module`, whose weights are the initial model.
        rounds: The number of rounds T; 100 by default.
        clients_per_round: The cohort: a float is a fraction of the clients, an int their number;
            0.2 by default.
        lr: The learning rate η of the clients; "auto" to choose it by short runs on held-out
            training data; 0.1 by default.
        batch_size: The size B of a minibatch; 10 by default.
        epochs: The number E of local epochs in a round; 1 by default.
        steps: The number of local steps in a round, in place of `epochs`, the same for every
            client; 0 for whole epochs; 0 by default.
        momentum: The momentum of local SGD; 0 by default.
        weight_decay: The weight decay of the clients' optimizer; 0 by default.
        optimizer: "sgd", "adam" or "adamw"; sgd by default.
        clip_norm: The largest norm of a gradient; 0 for no limit; 0 by default.
        schedule: The learning rate over the rounds: "constant", "step", "exponential" or "cosine";
            constant by default.
        decay: The factor of the schedules "step" and "exponential"; 1 by default.
        decay_every: The number of rounds between two steps of the schedule "step"; 1 by default.
        warmup_rounds: The first rounds, in which the learning rate grows linearly; 0 by default.
        label_smoothing: The share of a label that cross-entropy spreads over all classes; 0 by
            default.
        class_weight: "balanced" gives each class of a client the same total weight; none by
            default.
        batch_norm: "average", or "own" to keep BatchNorm layers at the client (FedBN); average by
            default.
        loss: "cross_entropy", "bce", "mse", "mae" or "huber"; a function of (outputs, targets) with
            one value for each example; or a loss module of torch such as `nn.MSELoss()`;
            cross_entropy by default.
        metrics: More functions of the form of `loss`, or metric objects of torchmetrics, by name;
            or a list of names, see `TrainingConfig`; none by default.
        augment: A function that changes the inputs of a client's batch before each training step,
            such as a module of `torchvision.transforms.v2`; it draws from torch's generator, which
            starts from the seed; None for none.
        seed: The seed of all random numbers; 0 by default.
        eval_every: The number of rounds between evaluations; 0 for the end only; 10 by default.
        eval_clients: The clients that evaluations before the last one measure, a fraction or a
            number; 1.0 by default.
        checkpoint_every: The number of rounds between checkpoints; 0 for the end only; 10 by
            default.
        max_rejections: A client is blocked after this number of rejected replies; 0 for never; 3
            by default.
        patience: Stop after this number of evaluations without a better loss on validation data; 0
            for never; 0 by default.
        select: "last", or "best" to serve the models of the round with the lowest loss on
            validation data; last by default.
        aggregator: How the models of a group become one, see `Aggregator`; mean by default.
        server_optimizer: "fedavg", "fedavgm", "fedadam", "fedyogi" or "fedadagrad"; fedavg by
            default.
        server_lr: The learning rate of the server; the optimizer's default by default.
        server_momentum: The momentum of the server; the optimizer's default by default.
        serve: "last", or "mean" to serve the weighted mean of the models over the rounds; last by
            default.
        local: The settings of local training as one object.
        training: The settings of the run as one object.
        server: The settings of the server as one object.
        personal: What each client makes of its model before it uses it; nothing by default.
        privacy: What protects the clients' contributions to sums; nothing by default.
        device: "auto", "cpu" or "cuda".
        chunk: The number of clients in one step; None to choose it by device and model.
        precision: The precision of matrix products on CUDA, "tf32" or "float32"; "bf16" for models
            that compute in bfloat16, also on a CPU that has it.
        threads: The number of CPU threads; None for one per core.
        profile: Whether to time the phases of the run (`Result.profile`), which slows it slightly.
        out: The run directory; None to write nothing.
        resume: Whether to continue the run in `out`.
        on_round: A function that gets each round's row of the history; the run stops if it returns
            True.
        progress: Whether to show a bar, in a notebook or on a terminal; lines on stderr elsewhere.
        report: Whether to write report.html into `out` at the end.

    Returns:
        The summary, the history, the group of each client and the clients' models.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters()
        >>> clients = fc.data.partition(digits, scheme, clients=20, seed=0)
        >>> result = fc.run(fc.Clade(), clients, fc.models.MLP(64), rounds=5)
        >>> result.summary["rounds"]
        5
    """
    training_run = TrainingRun(
        method,
        clients,
        model,
        _settings(
            LocalConfig,
            "local",
            local,
            lr=lr,
            batch_size=batch_size,
            epochs=epochs,
            steps=steps,
            momentum=momentum,
            weight_decay=weight_decay,
            optimizer=optimizer,
            clip_norm=clip_norm,
            schedule=schedule,
            decay=decay,
            decay_every=decay_every,
            warmup_rounds=warmup_rounds,
            label_smoothing=label_smoothing,
            class_weight=class_weight,
            batch_norm=batch_norm,
            loss=loss if isinstance(loss, str) else None,
        ),
        _settings(
            TrainingConfig,
            "training",
            training,
            rounds=rounds,
            clients_per_round=clients_per_round,
            seed=seed,
            eval_every=eval_every,
            eval_clients=eval_clients,
            checkpoint_every=checkpoint_every,
            max_rejections=max_rejections,
            patience=patience,
            select=select,
            metrics=None if isinstance(metrics, Mapping) else metrics,
        ),
        EngineConfig(chunk, precision, threads),
        device,
        None if isinstance(loss, str) else loss,
        metrics if isinstance(metrics, Mapping) else None,
        profile,
        server=_settings(
            ServerConfig,
            "server",
            server,
            aggregator=aggregator,
            optimizer=server_optimizer,
            lr=server_lr,
            momentum=server_momentum,
            serve=serve,
        ),
        augment=augment,
        personal=_settings(PersonalConfig, "personal", personal),
        privacy=_settings(PrivacyConfig, "privacy", privacy),
    )
    with _shown(training_run, on_round, progress) as after_round:
        result = training_run.run(out, resume, after_round)
    if result.folder is not None and report and not result.already_finished:
        _write_report(result, result.folder / "report.html")
    return result


@contextmanager
def _shown(run: TrainingRun, on_round: OnRound | None, progress: bool) -> Iterator[OnRound | None]:
    """The function of each round, which also shows the progress of the run."""
    if not progress:
        yield on_round
        return
    with user_display(run.method.name, run.settings.rounds) as display:

        def after_round(row: RoundRecord) -> bool | None:
            display.after_round(row)
            return on_round(row) if on_round is not None else None

        yield after_round


def _write_report(result: Result, path: Path) -> None:
    """Write the page. If that fails, warn: the run itself is complete."""
    try:
        result.report(path)
    except (FedcladeError, OSError) as error:
        message = f"the report could not be written ({error})."
        warnings.warn(FedcladeWarning(message, str(path)), stacklevel=3)


C = TypeVar("C", LocalConfig, TrainingConfig, ServerConfig, PersonalConfig, PrivacyConfig)


def _settings(kind: type[C], argument: str, settings: C | None, **short_forms: Any) -> C:
    """The settings with every field replaced whose short form is given."""
    if settings is None:
        settings = kind()
    elif not isinstance(settings, kind):
        raise InvalidInputError(
            f"{argument} = {settings!r}: give an fc.{kind.__name__}(…).", argument
        )
    return replace(settings, **{name: v for name, v in short_forms.items() if v is not None})


@dataclass(frozen=True)
class TrainingRun:
    """One run. The clients are simulated, unless `federation` leads to them."""

    method: Method
    clients: Clients | None
    model: ModelSpec | nn.Module
    local: LocalConfig
    settings: TrainingConfig
    engine: EngineConfig
    device: str = "auto"
    loss: ExampleLoss | None = None
    metrics: UserMetrics | None = None
    profile: bool = False
    federation: Engine | None = None
    server: ServerConfig = field(default_factory=ServerConfig)
    augment: Augment | None = None
    personal: PersonalConfig = field(default_factory=PersonalConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    lr_search: LrSearch | None = None  # how the learning rate was chosen

    def run(
        self,
        out: str | os.PathLike[str] | None = None,
        resume: bool = False,
        on_round: OnRound | None = None,
    ) -> Result:
        """Train and evaluate. `out`: the run directory; `resume`: continue the run it holds."""
        if self.local.lr == AUTO:
            return self.with_chosen_lr(out, resume).run(out, resume, on_round)
        # First: the end of `state_folder` would remove the state of a run that is already there.
        store = RunDirectory.open(out, resume) if out is not None else None
        is_on_disk = self.federation is None and self.engine.client_state == "disk"
        with state_folder(out) if is_on_disk else nullcontext() as folder:
            return self._run(prepare(self, folder), store, resume, on_round)

    def _run(
        self,
        setup: RunSetup,
        store: RunDirectory | None,
        resume: bool,
        on_round: OnRound | None,
    ) -> Result:
        found = _latest_checkpoint(setup, store) if store is not None else None
        if store is not None and resume:
            finished = _finished(setup, store)
            if finished is not None:
                return finished
        begin = time.perf_counter()
        with Interrupt() as interrupt, resumable(store):
            progress = start(setup, store, found)
            if store is not None and self.lr_search is not None:
                store.write_lr_search(self.lr_search)
            _log.info(
                "%s on %d clients (%s), rounds %d to %d%s",
                setup.method.name,
                len(setup.metadata),
                setup.engine.device,
                progress.round + 1,
                setup.training.rounds,
                f", in {store.folder}" if store is not None else "",
            )
            counters = Counters(setup.engine, begin) if not progress.history else None
            callbacks: list[Callback] = [LogRound()]
            checkpoints: CheckpointFiles | None = None
            if store is not None:
                checkpoints = CheckpointFiles(setup, store, progress)
                callbacks += [HistoryFile(store, setup.engine.clock), checkpoints]
            if on_round is not None:
                callbacks.append(CallFunction(on_round, progress))
            callbacks.append(interrupt)
            try:
                evaluation = train(setup, progress, callbacks, counters)
            except KeyboardInterrupt:
                if checkpoints is not None:
                    checkpoints.save_after_interrupt()
                raise
            if progress.stopped is not None and store is not None and checkpoints is not None:
                # The row of the last round now has an evaluation, and the round a checkpoint.
                store.write_history(progress.history)
                checkpoints.save()
            selected_round = progress.round
            if progress.best is not None and progress.best.round != progress.round:
                selected_round = progress.best.round
                evaluation = select_best(setup, progress, progress.best)
            if evaluation is None:  # the run was stopped after its last round and before its end
                evaluation = evaluate(
                    setup,
                    progress.clients,
                    progress.state,
                    progress.round,
                    progress.history[:-1],
                    is_final=True,
                )
            return self._finish(setup, progress, evaluation, store, selected_round)

    def with_chosen_lr(
        self, out: str | os.PathLike[str] | None = None, resume: bool = False
    ) -> TrainingRun:
        """This run with the learning rate that `local.lr = "auto"` chooses.

        Args:
            out: the run directory.
            resume: whether the choice of the run in `out` is taken.
        """
        store = RunDirectory.open(out, resume) if out is not None else None
        saved = store.lr_search() if store is not None and resume else None
        search = saved or search_lr(self)
        return replace(self, local=replace(self.local, lr=search["lr"]), lr_search=search)

    def _finish(
        self,
        setup: RunSetup,
        progress: Progress,
        evaluation: Evaluation,
        store: RunDirectory | None,
        selected_round: int,
    ) -> Result:
        """Write what a finished run leaves on disk, and make its result."""
        engine, clients, history = setup.engine, progress.clients, progress.history
        state, values = evaluation.state, evaluation.values
        evaluation.push_final_models(engine)
        summary = summarize(setup, clients, evaluation, history, selected_round, progress.stopped)
        if self.lr_search is not None:
            summary["chosen_lr"] = self.lr_search["lr"]
        columns = client_metrics.columns(clients, state.cluster_ids, values)
        models = final_models(setup, evaluation)
        row = models.shared | {n: value[0] for n, value in models.models.items() if len(value)}
        module = setup.method.served_module(setup.module.cpu(), row)
        if setup.layer is not None and setup.layer.has_neighbors:
            module = with_neighbors(module, row)
        features = replace(
            plot_data.collect(state, setup.label_counts),
            test_samples=plot_data.test_samples(setup.clients, models.model_ids),
        )
        if store is not None:
            store.write_models(
                models.models,
                untrained(module, setup.served.names) | models.shared,
                models.model_ids,
                state.cluster_ids,
                clients.shape,
                clients.classes,
                outputs_for(self.local.loss if self.loss is None else None, clients),
            )
            if (adapter := adapter_description(module)) is not None:
                store.write_adapter(adapter)
            write_outcome(store, columns, features, summary, clients.names)
        profile = None
        if self.profile and isinstance(engine, Simulator):
            profile = Profile.from_profiler(
                engine.clock,
                len(history),
                engine.workers.count,
                setup.objective.execution(setup.local.batch_size, engine.device),
            )
        return Result(
            summary,
            history,
            state.cluster_ids,
            columns,
            module,  # its frozen weights may be large, so it is no copy
            models,
            TaskSpec(clients.shape, clients.classes, self.local.loss),
            folder=store.folder if store is not None else None,
            profile=profile,
            report_inputs=ReportInputs(setup.tables, features) if store is None else None,
            names=clients.names,
            encoding=clients.encoding,
        )


@contextmanager
def state_folder(out: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A context with a folder for the clients' state of a run, which is removed at its end:
    checkpoints have the state of a run that continues.

    Args:
        out: the run directory; None for a folder of the system's temporary files.
    """
    folder = Path(tempfile.mkdtemp(prefix="fedclade-")) if out is None else Path(out)
    try:
        yield folder / "client_state"
    finally:
        shutil.rmtree(folder if out is None else folder / "client_state", ignore_errors=True)


def _latest_checkpoint(setup: RunSetup, store: RunDirectory) -> Checkpoint | None:
    """The last checkpoint of this run; one of another experiment is refused."""
    found = store.latest_checkpoint()
    if found is not None and found.configuration != setup.fingerprint:
        what = difference(store.tables(), setup.tables)
        raise DifferentExperimentError(
            f"out = '{store.folder}': it holds a run of another experiment ({what}).",
            "out",
        )
    return found


def _finished(setup: RunSetup, store: RunDirectory) -> Result | None:
    """The result of a run that has ended already and is long enough, or None."""
    summary = store.summary()
    if summary is None or not _is_long_enough(setup.training, store, summary):
        return None
    return replace(load(store.folder, model=setup.module), already_finished=True)


def _is_long_enough(training: TrainingConfig, store: RunDirectory, summary: Summary) -> bool:
    """Whether nothing remains of a finished run. A run that was stopped continues only if its
    settings say so: more rounds, or another patience.
    """
    if summary["rounds"] >= training.rounds:
        return True
    stopped = summary.get("stopped")
    if stopped == "patience":
        return is_exhausted(store.history(), training.patience)
    return stopped == "on_round" and training.rounds <= store.tables()["run"]["rounds"]
