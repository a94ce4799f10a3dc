"""The run: rounds, evaluation of all clients, checkpoints. A method sees the federation; only this sees test data and disk."""

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

from fedclade.aggregation.robust_federation import seen_by
from fedclade.core.federation import Aggregator, Rows
from fedclade.core.functional_model import ExampleLoss, Objective, cross_entropy
from fedclade.core.program import AnyProgram, one_after_the_other, sgd
from fedclade.core.pytree import Tree, take
from fedclade.core.rng import fold
from fedclade.data.federated_dataset import Clients
from fedclade.engines.base import Engine, Look
from fedclade.engines.oom import is_out_of_memory
from fedclade.engines.simulator import Precision, Simulator
from fedclade.errors import InvalidInput, check
from fedclade.io import checkpoint
from fedclade.io.checkpoint import Checkpoint
from fedclade.io.run_dir import RunStore, resumable
from fedclade.methods.base import UNKNOWN, Method, State, hyperparameters
from fedclade.models import ModelSpec
from fedclade.training import client_features, metrics
from fedclade.training.client_sampling import cohort_of, set_aside, without_refused
from fedclade.training.fingerprint import difference, fingerprint
from fedclade.training.graceful_interrupt import Interrupt
from fedclade.training.profile import profile_of
from fedclade.training.result import Result, load, untrained
from fedclade.training.round_stats import Counters
from fedclade.training.settings import EngineSettings, LocalSettings, RunSettings
from fedclade.training.setup import equip, metrics_for, module_for

OnRound = Callable[[dict[str, Any]], None]


def run(
    method: Method,
    clients: Clients,
    model: ModelSpec | nn.Module,
    rounds: int = 100,
    clients_per_round: int | float = 0.2,
    lr: float = 0.01,
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
    set_aside_after: int = 3,
    average: Aggregator = "mean",
    checkpoint_every: int = 10,
    precision: Precision = "tf32",
    workers: int | None = None,
    profile: bool = False,
) -> Result:
    """Train `method` on `clients` and evaluate every client.

    model: one of `fc.models`, or any nn.Module (its weights are the first model); loss and metrics: functions of (outputs, targets)
    with one value for each example; clients_per_round: a float is a share, an int a number; eval_every=0: at the end only; average: of
    models, one of `Aggregator`; set_aside_after: a client refused so often is not asked again, 0: it always is; out: a
    folder for the run, with resume=True to go on where it stopped; on_round: called with each round's row of the history; workers:
    threads on the CPU; profile: time the phases of the run, which slows it down a little (`Result.profile`).
    """
    local = LocalSettings(lr, batch_size, epochs, momentum, weight_decay, lr_decay)
    settings = RunSettings(rounds, clients_per_round, seed, eval_every, checkpoint_every, fine_tune_epochs, set_aside_after, average)
    engine = EngineSettings(chunk, precision, workers)
    return Run(method, clients, model, local, settings, engine, device, loss, metrics, profile).execute(out, resume, on_round)


@dataclass
class Run:
    """One run, from its parts to its result. The clients are simulated, unless `federation` leads to them."""

    method: Method
    clients: Clients | None
    model: ModelSpec | nn.Module
    local: LocalSettings
    settings: RunSettings
    engine: EngineSettings
    device: str = "auto"
    loss: ExampleLoss | None = None
    metrics: Mapping[str, ExampleLoss] | None = None
    profile: bool = False
    federation: Engine | None = None
    _hash: str | None = field(default=None, init=False, repr=False)

    def execute(self, out: str | os.PathLike[str] | None = None, resume: bool = False, on_round: OnRound | None = None) -> Result:
        if not isinstance(self.method, Method):
            raise InvalidInput(f"method = {self.method!r}: give a method such as fc.FedAvg(), not its name or class.")
        self._fed: Engine = self.federation or self._simulator()
        self._view = seen_by(self.method, self._fed, self.settings.average)
        self._population = self._fed.population()
        check(len(self._population) > 0, "clients", 0, "there must be at least one")
        self.settings.cohort_size(len(self._population))
        self.method = equip(self.method, self._population, self.settings.seed)
        module = module_for(self.model, self._population, self.settings.seed)
        self._objective = Objective(module.to(self._fed.device), self.loss or cross_entropy)
        self._metrics = metrics_for(self._objective, self._population, self.loss is not None, self.metrics, self._fed.device)

        store = RunStore.open(out, resume) if out is not None else None
        found = self._latest(store) if store is not None else None
        if store is not None and resume:
            done = self._finished(store, module)
            if done is not None:
                return done
        begin = time.perf_counter()
        with Interrupt() as interrupt, resumable(store):
            state, history = self._start(store, found)
            # What the first line of the history must also account for: the one-off phase of methods that have one.
            began = Counters(self._fed, begin) if not history else None
            state, looked = self._rounds(state, history, store, on_round, began, interrupt)
            if looked is None:  # the run was stopped after its last round and before its end
                looked = self._evaluate(state, history[-1]["round"], history[:-1])  # as it would have been
            return self._finish(store, module, history, *looked)

    def _rounds(
        self,
        state: State,
        history: list[dict[str, Any]],
        store: RunStore | None,
        on_round: OnRound | None,
        counters: Counters | None,
        interrupt: Interrupt,
    ) -> tuple[State, tuple[_Served, dict[str, Tensor]] | None]:
        """The state after the last round, and its evaluation, None if there was no round left. `history` gets its rows."""
        looked: tuple[_Served, dict[str, Tensor]] | None = None
        try:
            for number in range(history[-1]["round"] + 1 if history else 1, self.settings.rounds + 1):
                counters = counters or Counters(self._fed)
                with self._fed.clock.phase("round"):
                    state, asked = self._round(state, number, history)
                row = {"round": number, "clients": asked, "clusters": metrics.clusters(state.cluster), **counters.row(self._fed)}
                if self._is_due(number, self.settings.eval_every):
                    with self._fed.clock.whole("evaluation"):
                        looked = self._evaluate(state, number, history)
                    values = looked[1]
                    row["failures"] += counters.failures(self._fed)
                    row |= metrics.summary_of(values, self._population.test_samples) | metrics.by_cluster(values, state.cluster)
                row["seconds"], counters = counters.seconds(), None
                history.append(row)
                if store is not None:
                    with self._fed.clock.whole("saving"):
                        store.append_round(row)
                        if self._is_due(number, self.settings.checkpoint_every):
                            store.save_checkpoint(self._checkpoint(state, history))
                            client_features.write(store.folder, client_features.seen(state, self._labels))
                if on_round is not None:
                    on_round(row)
                if interrupt.asked:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            # The round in hand may be half done: what counts is the last whole one, if state and client memory are both of it.
            if store is not None and history and self._fed.memory.version == history[-1]["round"]:
                store.save_checkpoint(self._checkpoint(state, history))
            raise
        return state, looked

    def _simulator(self) -> Simulator:
        if not isinstance(self.clients, Clients):
            raise InvalidInput("clients: make them with fc.data.partition(…) or fc.data.from_arrays(…).")
        return Simulator(self.clients, device=self.device, profile=self.profile, **asdict(self.engine))

    @cached_property
    def _labels(self) -> Tensor | None:
        return client_features.label_counts(self.clients)

    @property
    def _everyone(self) -> Tensor:
        return torch.arange(len(self._population))

    def _start(self, store: RunStore | None, found: Checkpoint | None) -> tuple[State, list[dict[str, Any]]]:
        """State and history to go on from: those of the last checkpoint, or the method's first."""
        params = self._objective.params()
        self._fed.remember(self._bound(1).memory0(params))
        if store is not None:
            store.begin(self.tables(), found.history if found else [])
        if found is not None:
            device = self._fed.device
            try:
                state = checkpoint.restore(self.method.state, found.state)
                state = replace(state, models={name: value.to(device) for name, value in state.models.items()})
                self._fed.memory.restore(found.memory, found.round)
            except (KeyError, RuntimeError) as error:
                if is_out_of_memory(error):
                    raise
                what = f"the checkpoint of round {found.round} does not hold what {self.method.name} needs ({error})"
                raise InvalidInput(f"{what}: start the run anew in another folder.") from error
            return state.grown_to(len(self._population)), found.history
        state = self._bound(1).init(self._view, params, fold(self.settings.seed, "init"))
        self._fed.memory.commit(0)
        return state, []

    def _latest(self, store: RunStore) -> Checkpoint | None:
        """The last checkpoint of this very run."""
        found = store.latest_checkpoint()
        if found is not None and found.configuration != self._fingerprint():
            what = difference(store.tables(), self.tables())
            raise InvalidInput(f"out = '{store.folder}': it holds a run of another experiment ({what}).")
        return found

    def _finished(self, store: RunStore, module: nn.Module) -> Result | None:
        """The result of a run that has ended already and is long enough, or None."""
        summary = store.summary()
        if summary is None or summary["rounds"] < self.settings.rounds:
            return None
        return replace(load(store.folder, model=module), already_finished=True)

    def _bound(self, round_number: int) -> Method:
        return self.method.bind(self.local.training(self._objective, round_number))

    def _round(self, state: State, number: int, history: list[dict[str, Any]]) -> tuple[State, int]:
        """The state after this round, and how many clients were asked."""
        self._fed.gather()
        self._population = self._fed.population()
        clients = len(self._population)
        if clients > len(state.cluster):  # to grow by nobody may still copy all that a method knows of its clients
            state = state.grown_to(clients)
        key = fold(self.settings.seed, "round", number)
        drawn = cohort_of(fold(key, "cohort"), clients, self.settings.cohort_size(clients))
        drawn = without_refused(drawn, clients, history, self.settings.set_aside_after)
        method = self._bound(number)
        state, cohort = method.ready(self._view, state, drawn, fold(key, "admit"))
        state = method.round(self._view, state, cohort, key)
        self._fed.memory.commit(number)
        return state, len(drawn)

    def _evaluate(self, state: State, number: int, history: list[dict[str, Any]]) -> tuple[_Served, dict[str, Tensor]]:
        """What clients use, and per-client values, NaN where there is none."""
        served = self._served(state, number, history)
        key = fold(self.settings.seed, "evaluate", number)
        values: dict[str, Tensor] = {}
        personal = self._bound(number).personal()

        test = Look(self._objective, self._metrics, "test", personal)
        looks = {"": test, "train_": replace(test, part="train")}
        if self.settings.fine_tune_epochs:
            more = sgd(replace(self._bound(number).local, epochs=self.settings.fine_tune_epochs))
            tune = one_after_the_other(personal, more) if personal is not None else more
            looks["_tuned"] = replace(test, tune=tune)
        for which, got in zip(looks, self._fed.evaluate(served.rows, served.ids, list(looks.values()), key), strict=True):
            for name, value in got.items():
                full = torch.full((len(self._population),), math.nan, dtype=torch.float64)
                full[served.ids] = 100 * value if name == "accuracy" else value
                values[_named(name, which)] = full
                if name == "loss" and self.loss is None and self._population.y.ndim > 1:  # sequences: as language models are measured
                    values[_named("perplexity", which)] = full.exp()
        return served, values

    def _served(self, state: State, number: int, history: list[dict[str, Any]]) -> _Served:
        """Clients that have no cluster yet are admitted for this look only."""
        unknown = self._everyone[state.cluster == UNKNOWN]
        unknown = without_refused(unknown, len(self._population), history, self.settings.set_aside_after)
        if len(unknown):
            state = self._bound(number).admit(self._view, state, unknown, fold(self.settings.seed, "serve", number))
            self._fed.memory.rollback()
        ids = self._everyone[state.cluster != UNKNOWN]
        return _Served(state, self._bound(number).serve(state, ids), ids)

    def _finish(
        self, store: RunStore | None, module: nn.Module, history: list[dict[str, Any]], served: _Served, values: dict[str, Tensor]
    ) -> Result:
        state, rows, ids = served
        personal = self._bound(history[-1]["round"]).personal()
        self._fed.deliver(rows, ids, personal)
        summary = self._summary(values, state, history)
        columns = metrics.columns(self._population, state.cluster, values)
        assignment = torch.full((len(self._population),), -1, dtype=torch.int64)
        if store is not None:
            models, assignment[ids] = self._models(rows, ids, personal)
            fixed = untrained(module, self._objective.names)
            store.write_models(models, fixed, assignment, state.cluster, self._population.shape, self._population.classes)
            self._describe(store, summary, columns, state)

        place = {int(client): at for at, client in enumerate(ids)}

        def row_of(client: int) -> Tree | None:
            if client not in place:
                return None
            one = rows[torch.tensor([place[client]])]
            return take(self._fed.models_of(one, torch.tensor([client]), personal), torch.tensor(0))

        folder = store.folder if store is not None else None
        timed = self._fed if self.profile and isinstance(self._fed, Simulator) else None
        profile = profile_of(timed.clock, len(history), timed.workers.count) if timed is not None else None

        def describe(folder: Path) -> None:
            store = RunStore.open(folder, resume=False)
            store.begin(self.tables(), history)
            self._describe(store, summary, columns, state)

        return Result(summary, history, state.cluster, columns, module, row_of, folder, profile=profile, describe=describe)

    def _describe(self, store: RunStore, summary: dict[str, Any], columns: dict[str, list[Any]], state: State) -> None:
        store.write_clients(columns)
        client_features.write(store.folder, client_features.seen(state, self._labels))
        store.write_summary(summary)

    def _models(self, rows: Rows, ids: Tensor, personal: AnyProgram | None) -> tuple[Tree, Tensor]:
        """Distinct models and the row of each client; -1 where its model, or part of it, is with the client alone."""
        if not rows.own and personal is None:
            return rows.models, rows.index.cpu()
        if not self._fed.holds_clients:
            return rows.models, torch.full_like(ids, -1)
        return self._fed.models_of(rows, ids, personal), torch.arange(len(ids))

    def _summary(self, values: dict[str, Tensor], state: State, history: list[dict[str, Any]]) -> dict[str, Any]:
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
            "clusters": metrics.clusters(state.cluster),
            "accuracy": None,
            "accuracy_stderr": None,
            "accuracy_variance": None,
            "accuracy_worst10": None,
            **metrics.summary_of(values, self._population.test_samples),
            "ari": metrics.adjusted_rand(self._population.groups, state.cluster),
            "bytes_up": sum(row["bytes_up"] for row in history),
            "bytes_down": sum(row["bytes_down"] for row in history),
            "seconds": round(sum(row["seconds"] for row in history), 3),
            "failures": sum(len(row["failures"]) for row in history),
            "set_aside": len(set_aside(history, self.settings.set_aside_after)),
            "clients_without_test": int((self._population.test_sizes == 0).sum()),
            "clients_without_model": int((state.cluster == UNKNOWN).sum()),
        }

    def _checkpoint(self, state: State, history: list[dict[str, Any]]) -> Checkpoint:
        return Checkpoint(history[-1]["round"], checkpoint.flatten(state), self._fed.memory.tensors(), history, self._fingerprint())

    def _fingerprint(self) -> str:
        if self._hash is None:
            probe = getattr(self.method, "probe", None)
            others = (*self._objective.params().values(), *([] if probe is None else [probe]))
            self._hash = fingerprint(self.tables(), self.clients, others)
        return self._hash

    def tables(self) -> dict[str, dict[str, Any]]:
        """The run as the tables of an experiment file."""
        chosen = {setting.name: getattr(self.method, setting.name) for setting in hyperparameters(self.method)}
        model: dict[str, Any] = _fields_of(self.model) if is_dataclass(self.model) else {}
        return {
            "data": {"name": self._population.dataset},
            "partition": {"name": self._population.partition, **self._population.origin},
            "model": {"name": self._model_name(), **model},
            "local": asdict(self.local),
            "method": {"name": self.method.name, **chosen},
            "run": asdict(self.settings),
            "engine": asdict(self.engine),
        }

    def _model_name(self) -> str:
        return type(self.model).__name__ if isinstance(self.model, nn.Module) else self.model.name

    def _is_due(self, number: int, every: int) -> bool:
        return number == self.settings.rounds or (every > 0 and number % every == 0)


class _Served(NamedTuple):
    """The models that clients use now, who has one, and the state in which those that had no cluster have been given one."""

    state: State
    rows: Rows
    ids: Tensor


def _named(value: str, look: str) -> str:
    """A value's name in histories and summaries."""
    return f"{value}{look}" if look.startswith("_") else f"{look}{value}"


def _fields_of(spec: Any) -> dict[str, Any]:
    return {f.name: getattr(spec, f.name) for f in fields(spec)}
