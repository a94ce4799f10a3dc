"""The run: rounds, evaluation of all clients, checkpoints. A method sees the federation; only this
sees test data and disk.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fedclade.aggregation.robust_federation import federation_view
from fedclade.core.federation import Aggregator, ModelAssignment
from fedclade.core.functional_model import ExampleLoss, Objective, cross_entropy
from fedclade.core.program import AnyProgram, chain_training, sgd
from fedclade.core.pytree import Tree, tree_index
from fedclade.core.rng import fold_in
from fedclade.data.federated_dataset import Clients
from fedclade.engines.base import Engine, EvalRequest
from fedclade.engines.oom import is_out_of_memory
from fedclade.engines.simulator import Precision, Simulator
from fedclade.errors import InvalidInputError, require
from fedclade.io import checkpoint
from fedclade.io.checkpoint import Checkpoint
from fedclade.io.run_dir import RunDirectory, resumable
from fedclade.methods.base import UNKNOWN, Method, State, hyperparameters
from fedclade.models import ModelSpec
from fedclade.training import client_features, metrics
from fedclade.training.client_sampling import blocked_clients, cohort_of, exclude_blocked
from fedclade.training.fingerprint import difference, fingerprint
from fedclade.training.graceful_interrupt import Interrupt
from fedclade.training.profile import profile_of
from fedclade.training.result import Result, load, untrained
from fedclade.training.round_stats import Counters
from fedclade.training.settings import EngineConfig, LocalConfig, ServerConfig, TrainingConfig
from fedclade.training.setup import inject_context, metrics_for, module_for

OnRound = Callable[[dict[str, Any]], None]


def run(
    method: Method,
    clients: Clients,
    model: ModelSpec | nn.Module,
    rounds: int = 100,
    clients_per_round: int | float = 0.2,
    lr: float = 0.1,
    batch_size: int = 10,
    epochs: int = 1,
    momentum: float = 0.0,
    loss: ExampleLoss | None = None,
    seed: int = 0,
    eval_every: int = 10,
    device: str = "auto",
    chunk: int | None = None,
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    on_round: OnRound | None = None,
    *,
    weight_decay: float = 0.0,
    lr_decay: float = 1.0,
    metrics: Mapping[str, ExampleLoss] | None = None,
    fine_tune_epochs: int = 0,
    max_rejections: int = 3,
    aggregator: Aggregator = "mean",
    checkpoint_every: int = 10,
    precision: Precision = "tf32",
    threads: int | None = None,
    profile: bool = False,
) -> Result:
    """Train `method` on `clients` and evaluate every client.

    model: one of `fc.models`, or any nn.Module (its weights are the first model); loss and metrics:
    functions of (outputs, targets) with one value for each example; clients_per_round: a float is a
    share, an int a number; eval_every=0: at the end only; average: of models, one of `Aggregator`;
    max_rejections: a client refused so often is not asked again, 0: it always is; out: a folder for
    the run, with resume=True to go on where it stopped; on_round: called with each round's row of
    the history; workers: threads on the CPU; profile: time the phases of the run, which slows it
    down a little (`Result.profile`).
    """
    local = LocalConfig(lr, batch_size, epochs, momentum, weight_decay, lr_decay)
    settings = TrainingConfig(
        rounds,
        clients_per_round,
        seed,
        eval_every,
        checkpoint_every,
        fine_tune_epochs,
        max_rejections,
    )
    engine = EngineConfig(chunk, precision, threads)
    server = ServerConfig(aggregator)
    return TrainingRun(
        method,
        clients,
        model,
        local,
        settings,
        engine,
        device,
        loss,
        metrics,
        profile,
        server=server,
    ).run(out, resume, on_round)


@dataclass
class TrainingRun:
    """One run, from its parts to its result. The clients are simulated, unless `federation` leads
    to them.
    """

    method: Method
    clients: Clients | None
    model: ModelSpec | nn.Module
    local: LocalConfig
    settings: TrainingConfig
    engine: EngineConfig
    device: str = "auto"
    loss: ExampleLoss | None = None
    metrics: Mapping[str, ExampleLoss] | None = None
    profile: bool = False
    federation: Engine | None = None
    server: ServerConfig = field(default_factory=ServerConfig)
    _hash: str | None = field(default=None, init=False, repr=False)

    def run(
        self,
        out: str | os.PathLike[str] | None = None,
        resume: bool = False,
        on_round: OnRound | None = None,
    ) -> Result:
        if not isinstance(self.method, Method):
            raise InvalidInputError(
                f"method = {self.method!r}: give a method such as fc.FedAvg(), not its name or"
                " class."
            )
        self._fed: Engine = self.federation or self._simulator()
        self._view = federation_view(self.method, self._fed, self.server.aggregator)
        self._population = self._fed.client_metadata()
        require(len(self._population) > 0, "clients", 0, "there must be at least one")
        self.settings.cohort_size(len(self._population))
        self.method = inject_context(self.method, self._population, self.settings.seed)
        module = module_for(self.model, self._population, self.settings.seed)
        self._objective = Objective(module.to(self._fed.device), self.loss or cross_entropy)
        self._metrics = metrics_for(
            self._objective, self._population, self.loss is not None, self.metrics, self._fed.device
        )

        store = RunDirectory.open(out, resume) if out is not None else None
        found = self._latest(store) if store is not None else None
        if store is not None and resume:
            done = self._finished(store, module)
            if done is not None:
                return done
        begin = time.perf_counter()
        with Interrupt() as interrupt, resumable(store):
            state, history = self._start(store, found)
            # What the first line of the history must also account for: the one-off phase of methods
            # that have one.
            began = Counters(self._fed, begin) if not history else None
            state, looked = self._rounds(state, history, store, on_round, began, interrupt)
            if looked is None:  # the run was stopped after its last round and before its end
                looked = self._evaluate(
                    state, history[-1]["round"], history[:-1]
                )  # as it would have been
            return self._finish(store, module, history, *looked)

    def _rounds(
        self,
        state: State,
        history: list[dict[str, Any]],
        store: RunDirectory | None,
        on_round: OnRound | None,
        counters: Counters | None,
        interrupt: Interrupt,
    ) -> tuple[State, tuple[_Served, dict[str, Tensor]] | None]:
        """The state after the last round, and its evaluation, None if there was no round left.
        `history` gets its rows.
        """
        looked: tuple[_Served, dict[str, Tensor]] | None = None
        try:
            for number in range(
                history[-1]["round"] + 1 if history else 1, self.settings.rounds + 1
            ):
                counters = counters or Counters(self._fed)
                with self._fed.clock.phase("round"):
                    state, asked = self._round(state, number, history)
                row = {
                    "round": number,
                    "clients": asked,
                    "clusters": metrics.clusters(state.cluster_ids),
                    **counters.row(self._fed),
                }
                if self._is_due(number, self.settings.eval_every):
                    with self._fed.clock.whole("evaluation"):
                        looked = self._evaluate(state, number, history)
                    values = looked[1]
                    row["failures"] += counters.failures(self._fed)
                    row |= metrics.summary_of(
                        values, self._population.test_samples
                    ) | metrics.by_cluster(values, state.cluster_ids)
                row["seconds"], counters = counters.seconds(), None
                history.append(row)
                if store is not None:
                    with self._fed.clock.whole("saving"):
                        store.append_round(row)
                        if self._is_due(number, self.settings.checkpoint_every):
                            store.save_checkpoint(self._checkpoint(state, history))
                            client_features.write(
                                store.folder, client_features.collect(state, self._labels)
                            )
                if on_round is not None:
                    on_round(row)
                if interrupt.asked:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            # The round in hand may be half done: what counts is the last whole one, if state and
            # client memory are both of it.
            if (
                store is not None
                and history
                and self._fed.client_state.version == history[-1]["round"]
            ):
                store.save_checkpoint(self._checkpoint(state, history))
            raise
        return state, looked

    def _simulator(self) -> Simulator:
        if not isinstance(self.clients, Clients):
            raise InvalidInputError(
                "clients: make them with fc.data.partition(…) or fc.data.from_arrays(…)."
            )
        return Simulator(
            self.clients, device=self.device, profile=self.profile, **asdict(self.engine)
        )

    @cached_property
    def _labels(self) -> Tensor | None:
        return client_features.label_counts(self.clients)

    @property
    def _everyone(self) -> Tensor:
        return torch.arange(len(self._population))

    def _start(
        self, store: RunDirectory | None, found: Checkpoint | None
    ) -> tuple[State, list[dict[str, Any]]]:
        """State and history to go on from: those of the last checkpoint, or the method's first."""
        params = self._objective.params()
        self._fed.init_client_state(self._bound(1).initial_client_state(params))
        if store is not None:
            store.begin(self.tables(), found.history if found else [])
        if found is not None:
            device = self._fed.device
            try:
                state = checkpoint.restore(self.method.state, found.state)
                state = replace(
                    state, models={name: value.to(device) for name, value in state.models.items()}
                )
                self._fed.client_state.restore(found.memory, found.round)
            except (KeyError, RuntimeError) as error:
                if is_out_of_memory(error):
                    raise
                what = (
                    f"the checkpoint of round {found.round} does not hold what {self.method.name}"
                    f" needs ({error})"
                )
                raise InvalidInputError(f"{what}: start the run anew in another folder.") from error
            return state.with_num_clients(len(self._population)), found.history
        state = self._bound(1).init(self._view, params, fold_in(self.settings.seed, "init"))
        self._fed.client_state.commit(0)
        return state, []

    def _latest(self, store: RunDirectory) -> Checkpoint | None:
        """The last checkpoint of this very run."""
        found = store.latest_checkpoint()
        if found is not None and found.configuration != self._fingerprint():
            what = difference(store.tables(), self.tables())
            raise InvalidInputError(
                f"out = '{store.folder}': it holds a run of another experiment ({what})."
            )
        return found

    def _finished(self, store: RunDirectory, module: nn.Module) -> Result | None:
        """The result of a run that has ended already and is long enough, or None."""
        summary = store.summary()
        if summary is None or summary["rounds"] < self.settings.rounds:
            return None
        return replace(load(store.folder, model=module), already_finished=True)

    def _bound(self, round_number: int) -> Method:
        return self.method.with_local_config(self.local.training(self._objective, round_number))

    def _round(self, state: State, number: int, history: list[dict[str, Any]]) -> tuple[State, int]:
        """The state after this round, and how many clients were asked."""
        self._fed.refresh_membership()
        self._population = self._fed.client_metadata()
        clients = len(self._population)
        if clients > len(
            state.cluster_ids
        ):  # to grow by nobody may still copy all that a method knows of its clients
            state = state.with_num_clients(clients)
        key = fold_in(self.settings.seed, "round", number)
        drawn = cohort_of(fold_in(key, "cohort"), clients, self.settings.cohort_size(clients))
        drawn = exclude_blocked(drawn, clients, history, self.settings.max_rejections)
        method = self._bound(number)
        state, cohort = method.prepare_cohort(self._view, state, drawn, fold_in(key, "admit"))
        state = method.round(self._view, state, cohort, key)
        self._fed.client_state.commit(number)
        return state, len(drawn)

    def _evaluate(
        self, state: State, number: int, history: list[dict[str, Any]]
    ) -> tuple[_Served, dict[str, Tensor]]:
        """What clients use, and per-client values, NaN where there is none."""
        served = self._served(state, number, history)
        key = fold_in(self.settings.seed, "evaluate", number)
        values: dict[str, Tensor] = {}
        personal = self._bound(number).personalization_program()

        test = EvalRequest(self._objective, self._metrics, "test", personal)
        looks = {"": test, "train_": replace(test, split="train")}
        if self.settings.fine_tune_epochs:
            more = sgd(replace(self._bound(number).local, epochs=self.settings.fine_tune_epochs))
            tune = chain_training(personal, more) if personal is not None else more
            looks["_tuned"] = replace(test, finetune=tune)
        for which, got in zip(
            looks,
            self._fed.evaluate(served.rows, served.ids, list(looks.values()), key),
            strict=True,
        ):
            for name, value in got.items():
                full = torch.full((len(self._population),), math.nan, dtype=torch.float64)
                full[served.ids] = 100 * value if name == "accuracy" else value
                values[_named(name, which)] = full
                if (
                    name == "loss" and self.loss is None and self._population.y.ndim > 1
                ):  # sequences: as language models are measured
                    values[_named("perplexity", which)] = full.exp()
        return served, values

    def _served(self, state: State, number: int, history: list[dict[str, Any]]) -> _Served:
        """Clients that have no cluster yet are admitted for this look only."""
        unknown = self._everyone[state.cluster_ids == UNKNOWN]
        unknown = exclude_blocked(
            unknown, len(self._population), history, self.settings.max_rejections
        )
        if len(unknown):
            state = self._bound(number).add_clients(
                self._view, state, unknown, fold_in(self.settings.seed, "serve", number)
            )
            self._fed.client_state.rollback()
        ids = self._everyone[state.cluster_ids != UNKNOWN]
        return _Served(state, self._bound(number).assign_models(state, ids), ids)

    def _finish(
        self,
        store: RunDirectory | None,
        module: nn.Module,
        history: list[dict[str, Any]],
        served: _Served,
        values: dict[str, Tensor],
    ) -> Result:
        state, rows, ids = served
        personal = self._bound(history[-1]["round"]).personalization_program()
        self._fed.push_final_models(rows, ids, personal)
        summary = self._summary(values, state, history)
        columns = metrics.columns(self._population, state.cluster_ids, values)
        assignment = torch.full((len(self._population),), -1, dtype=torch.int64)
        if store is not None:
            models, assignment[ids] = self._models(rows, ids, personal)
            fixed = untrained(module, self._objective.names)
            store.write_models(
                models,
                fixed,
                assignment,
                state.cluster_ids,
                self._population.shape,
                self._population.classes,
            )
            self._describe(store, summary, columns, state)

        place = {int(client): at for at, client in enumerate(ids)}

        def row_of(client: int) -> Tree | None:
            if client not in place:
                return None
            one = rows[torch.tensor([place[client]])]
            return tree_index(
                self._fed.models_of(one, torch.tensor([client]), personal), torch.tensor(0)
            )

        folder = store.folder if store is not None else None
        timed = self._fed if self.profile and isinstance(self._fed, Simulator) else None
        profile = (
            profile_of(timed.clock, len(history), timed.workers.count)
            if timed is not None
            else None
        )

        def describe(folder: Path) -> None:
            store = RunDirectory.open(folder, resume=False)
            store.begin(self.tables(), history)
            self._describe(store, summary, columns, state)

        return Result(
            summary,
            history,
            state.cluster_ids,
            columns,
            module,
            row_of,
            folder,
            profile=profile,
            describe=describe,
        )

    def _describe(
        self,
        store: RunDirectory,
        summary: dict[str, Any],
        columns: dict[str, list[Any]],
        state: State,
    ) -> None:
        store.write_clients(columns)
        client_features.write(store.folder, client_features.collect(state, self._labels))
        store.write_summary(summary)

    def _models(
        self, rows: ModelAssignment, ids: Tensor, personal: AnyProgram | None
    ) -> tuple[Tree, Tensor]:
        """Distinct models and the row of each client; -1 where its model, or part of it, is with
        the client alone.
        """
        if not rows.local_params and personal is None:
            return rows.models, rows.model_ids.cpu()
        if not self._fed.holds_clients:
            return rows.models, torch.full_like(ids, -1)
        return self._fed.models_of(rows, ids, personal), torch.arange(len(ids))

    def _summary(
        self, values: dict[str, Tensor], state: State, history: list[dict[str, Any]]
    ) -> dict[str, Any]:
        return {
            "method": self.method.name,
            "dataset": self._population.dataset,
            "partition": self._population.partition,
            "model": self._model_name(),
            "engine": self._fed.name,
            "device": str(self._fed.device),
            "seed": self.settings.seed,
            "rounds": history[-1]["round"],
            "clients": len(self._population),
            "clusters": metrics.clusters(state.cluster_ids),
            "accuracy": None,
            "accuracy_stderr": None,
            "accuracy_variance": None,
            "accuracy_worst10": None,
            **metrics.summary_of(values, self._population.test_samples),
            "ari": metrics.adjusted_rand(self._population.groups, state.cluster_ids),
            "bytes_up": sum(row["bytes_up"] for row in history),
            "bytes_down": sum(row["bytes_down"] for row in history),
            "seconds": round(sum(row["seconds"] for row in history), 3),
            "failures": sum(len(row["failures"]) for row in history),
            "blocked_clients": len(blocked_clients(history, self.settings.max_rejections)),
            "clients_without_test": int((self._population.test_sizes == 0).sum()),
            "clients_without_model": int((state.cluster_ids == UNKNOWN).sum()),
        }

    def _checkpoint(self, state: State, history: list[dict[str, Any]]) -> Checkpoint:
        return Checkpoint(
            history[-1]["round"],
            checkpoint.flatten(state),
            self._fed.client_state.tensors(),
            history,
            self._fingerprint(),
        )

    def _fingerprint(self) -> str:
        if self._hash is None:
            probe = getattr(self.method, "probe", None)
            others = (*self._objective.params().values(), *([] if probe is None else [probe]))
            self._hash = fingerprint(self.tables(), self.clients, others)
        return self._hash

    def tables(self) -> dict[str, dict[str, Any]]:
        """The run as the tables of an experiment file."""
        chosen = {
            setting.name: getattr(self.method, setting.name)
            for setting in hyperparameters(self.method)
        }
        model: dict[str, Any] = _fields_of(self.model) if is_dataclass(self.model) else {}
        return {
            "data": {"name": self._population.dataset},
            "partition": {"name": self._population.partition, **self._population.origin},
            "model": {"name": self._model_name(), **model},
            "local": asdict(self.local),
            "method": {"name": self.method.name, **chosen},
            "run": asdict(self.settings),
            "server": asdict(self.server),
            "engine": asdict(self.engine),
        }

    def _model_name(self) -> str:
        return type(self.model).__name__ if isinstance(self.model, nn.Module) else self.model.name

    def _is_due(self, number: int, every: int) -> bool:
        return number == self.settings.rounds or (every > 0 and number % every == 0)


class _Served(NamedTuple):
    """The models that clients use now, who has one, and the state in which those that had no
    cluster have been given one.
    """

    state: State
    rows: ModelAssignment
    ids: Tensor


def _named(value: str, look: str) -> str:
    """A value's name in histories and summaries."""
    return f"{value}{look}" if look.startswith("_") else f"{look}{value}"


def _fields_of(spec: Any) -> dict[str, Any]:
    return {f.name: getattr(spec, f.name) for f in fields(spec)}
