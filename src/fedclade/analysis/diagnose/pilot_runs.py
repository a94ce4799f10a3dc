"""Pilot runs: train the candidate methods until their scores on held-out training data no longer
rise, and compare them there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.clustering.graph import canonical_labels
from fedclade.core.inputs import select
from fedclade.core.rng import fold_in
from fedclade.data.federated_dataset import Clients, RaggedIndex
from fedclade.data.held_out import held_out
from fedclade.errors import InvalidInputError
from fedclade.io.schemas import RoundRecord
from fedclade.methods.base import LayerName, Method, hyperparameters
from fedclade.methods.cfl import CFL
from fedclade.methods.clade import Clade
from fedclade.methods.clade_groups import CladeGroups
from fedclade.methods.fedavg import FedAvg
from fedclade.methods.ifca import IFCA
from fedclade.methods.local import Local
from fedclade.methods.scaffold import SCAFFOLD
from fedclade.training.callbacks import OnRound
from fedclade.training.config import ServerConfig, TrainingConfig
from fedclade.training.runner import TrainingRun

PilotProgress: TypeAlias = Callable[[str, float, int], None]
"""A function of what is done now, of the number of finished pilot runs and of their number."""
Array = NDArray[np.float64]
MAX_CLIENTS = 200  # in pilot runs: more clients would improve the estimate little
DEFAULT_CLUSTERS = 5  # for IFCA, which needs a number even if no groups are found
COHORT, COHORT_SHARE = 10, 0.25  # the least number and the least share of clients in a round
# A pilot run ends early if ten rounds change its score by less than this: in points of accuracy, or
# relative to the loss. Clade compares its candidates until round 20.
FEWEST_ROUNDS, LOOK_EVERY, RISES, FALLS = 30, 10, 0.5, 0.01
MOST_SEED = 10**9
CONTENDERS, ERRORS = 3, 2.0  # how many are trained again, within this number of standard errors


@dataclass(frozen=True)
class Candidate:
    """A method to compare, and its personal layer; None for the method's own."""

    method: Method
    layer: LayerName | None = None


@dataclass(frozen=True)
class Probe:
    """The result of one method's pilot runs.

    Attributes:
        method: the method's name.
        settings: the method's settings that differ from the defaults.
        clusters: the number of models.
        score: the mean over clients on held-out training data: accuracy in percent, or the loss.
        gain: how much better than FedAvg.
        gain_stderr: the standard error of `gain` over clients.
        behind: how much worse than the best method.
        behind_stderr: the standard error of `behind` over clients.
        layer: the personal layer of the run; None for the method's own.
        rounds: the number of rounds of the first run.
        seeds: the number of runs, each with another held-out fifth.
    """

    method: str
    settings: dict[str, Any]
    clusters: int
    score: float
    gain: float
    gain_stderr: float
    behind: float
    behind_stderr: float
    layer: LayerName | None = None
    rounds: int = 0
    seeds: int = 1


@dataclass(frozen=True)
class Pilots:
    """What the pilot runs found.

    Attributes:
        probes: the result of each candidate, FedAvg first; empty if no client has three samples.
        groups: the groups of `CladeGroups` at its end; None for a subset of the clients.
        failed: why a candidate has no result.
    """

    probes: tuple[Probe, ...] = ()
    groups: NDArray[np.int64] | None = None
    failed: tuple[str, ...] = ()


def without_test(clients: Clients) -> Clients:
    """The same clients without test data and true groups: a diagnosis uses nothing else."""
    no_test_part = torch.full((len(clients),), -1)
    return replace(
        clients,
        x_test=select(clients.x, slice(0)),
        y_test=clients.y[:0],
        test=RaggedIndex.of([]),
        test_part_id=no_test_part,
        test_sample_id=torch.empty(0, dtype=torch.int64),
        groups=None,
        probe=None,
        validation=None,
        validation_origin={},
        later=None,
    )


def candidates(
    differ: bool, groups: int | None, faint: bool, also: Sequence[Method] = ()
) -> list[Candidate]:
    """The candidates, FedAvg first.

    Args:
        differ: whether labels or inputs differ between clients.
        groups: the number of groups; None if there are no groups.
        faint: whether inputs of one label differ, but not every clustering finds groups.
        also: further methods. One of the same name replaces a method that is a candidate anyway.
    """
    methods: list[Method] = [SCAFFOLD(), Local(), Clade()]
    if differ:
        methods[2:2] = [CladeGroups(recluster_every=5 if faint else 0)]
        methods += [IFCA(clusters=groups or DEFAULT_CLUSTERS), CFL()]
    further = {method.name: method for method in also if method.name != FedAvg.name}
    chosen = [further.pop(method.name, method) for method in methods]
    return [
        Candidate(FedAvg()),
        Candidate(FedAvg(), "auto"),
        *(Candidate(method) for method in (*chosen, *further.values())),
    ]


def with_clusters(method: Method, groups: int | None) -> Method:
    """The method with this number of groups, or `DEFAULT_CLUSTERS`, if it needs a number."""
    if method.groups == "given" and any(f.name == "clusters" for f in hyperparameters(method)):
        changed: dict[str, Any] = {"clusters": groups or DEFAULT_CLUSTERS}
        return replace(method, **changed)
    return method


def run_pilots(
    choices: Sequence[Candidate],
    clients: Clients,
    run: TrainingRun,
    rounds: int,
    progress: PilotProgress | None = None,
) -> Pilots:
    """Train each candidate, then those that may be the best once more with another seed.

    At most `MAX_CLIENTS` clients are used; if there are more, a random subset.

    Args:
        choices: the candidates, FedAvg first.
        clients: the clients, without test data.
        run: how clients train.
        rounds: the most rounds of a run.
        progress: called after each round.
    """
    seed = run.settings.seed
    progress = progress or (lambda label, done, total: None)
    is_subset = len(clients) > MAX_CLIENTS
    if is_subset:
        clients = clients.only(
            np.sort(np.random.default_rng(seed).permutation(len(clients))[:MAX_CLIENTS]).tolist()
        )
    first = _Pilot(run, clients, rounds, seed)
    if not first.evaluated.any():
        return Pilots()
    results: list[_Scores] = []
    failed, groups = list[str](), None
    for number, choice in enumerate(choices):
        on_round = _each_round(progress, choice, number, len(choices), rounds)
        try:
            result = first.scores(choice, on_round)
        except InvalidInputError as error:
            # Not every method fits every model and optimizer; FedAvg does.
            if choice is choices[0]:
                raise
            failed.append(f"{choice.method.name} ({error.field})")
            continue
        results.append(result)
        if isinstance(choice.method, CladeGroups) and choice.method.name == CladeGroups.name:
            groups = None if is_subset else result.groups
    # A choice among many profits from chance. Another held-out part and seed do not repeat it.
    contenders = _contenders(results)
    if len(contenders) > 1:
        second = _Pilot(run, clients, rounds, fold_in(seed, "second pilot run") % MOST_SEED)
        total = len(choices) + len(contenders)
        for done, number in enumerate(contenders, start=len(choices)):
            choice = results[number].choice
            on_round = _each_round(progress, choice, done, total, rounds)
            results[number] = results[number].and_again(second.scores(choice, on_round))
    return Pilots(tuple(_probes(results, contenders)), groups, tuple(failed))


def _each_round(
    progress: PilotProgress, choice: Candidate, done: int, total: int, rounds: int
) -> OnRound:
    """A function that reports the rounds of one of several pilot runs."""
    name = choice.method.name if choice.layer is None else f"{choice.method.name} {choice.layer}"

    def on_round(row: RoundRecord) -> None:
        progress(f"pilot run {done + 1} of {total}, {name}", done + row["round"] / rounds, total)

    return on_round


@dataclass(frozen=True)
class _Scores:
    """(runs, clients) the scores of a candidate, larger is better."""

    choice: Candidate
    values: Array
    clusters: int
    rounds: int
    groups: NDArray[np.int64]

    def and_again(self, other: _Scores) -> _Scores:
        return replace(self, values=np.concatenate([self.values, other.values]))

    def less(self, other: _Scores) -> Array:
        """(clients,) the mean difference of the runs that both have."""
        both = min(len(self.values), len(other.values))
        return np.asarray((self.values[:both] - other.values[:both]).mean(0))


class _Pilot:
    """Runs with the same held-out samples and the same seed."""

    def __init__(self, run: TrainingRun, clients: Clients, rounds: int, seed: int) -> None:
        held = held_out(clients, fold_in(seed, "held out"))
        cohort = min(len(clients), max(COHORT, round(COHORT_SHARE * len(clients))))
        settings = TrainingConfig(rounds, cohort, seed, eval_every=LOOK_EVERY)
        self.evaluated = (held.test_part_id >= 0).numpy()
        self.run = replace(
            run, clients=held, settings=settings, server=ServerConfig(), metrics=None
        )

    def scores(self, choice: Candidate, on_round: OnRound) -> _Scores:
        personal = replace(self.run.personal, layer=choice.layer, every=0)
        run = replace(self.run, method=choice.method, personal=personal)
        is_flat = until_flat()

        def after_round(row: RoundRecord) -> bool | None:
            on_round(row)
            return is_flat(row)

        result = run.run(on_round=after_round)
        # The sign makes larger scores better.
        measure, sign = ("accuracy", 1) if "accuracy" in result.clients else ("loss", -1)
        loss, values = (
            np.array(result.clients[name], np.float64)[self.evaluated] for name in ("loss", measure)
        )
        # The engine rejects weights that are not finite, and counts them as failures.
        if result.summary["failures"] or not np.isfinite(loss).all():
            raise InvalidInputError(
                f"local.lr = {run.local.lr}: {choice.method.name} diverged in its pilot run. Use a"
                " smaller value, or probe_rounds = 0.",
                "local.lr",
            )
        return _Scores(
            choice,
            sign * values[None],
            result.summary["clusters"],
            len(result.history),
            canonical_labels(result.clusters.numpy()),
        )


def until_flat() -> OnRound:
    """A function that stops a run when its score no longer rises."""
    last: float | None = None

    def is_flat(row: RoundRecord) -> bool:
        nonlocal last
        if row["round"] % LOOK_EVERY:
            return False
        accuracy, loss = row.get("accuracy"), row.get("loss")
        score = accuracy if accuracy is not None else loss
        if score is None:
            return False
        before, last = last, score
        if before is None or row["round"] < FEWEST_ROUNDS:
            return False
        return score - before < RISES if accuracy is not None else before - score < FALLS * before

    return is_flat


def _contenders(results: Sequence[_Scores]) -> list[int]:
    """The best candidates, those that are not clearly worse, and FedAvg."""
    order = sorted(range(len(results)), key=lambda number: -float(results[number].values.mean()))
    best = results[order[0]]
    close = [order[0]]
    for number in order[1:CONTENDERS]:
        mean, error = _mean(best.less(results[number]))
        if mean <= ERRORS * error:
            close.append(number)
    return sorted({0, *close})


def _probes(results: Sequence[_Scores], contenders: Sequence[int]) -> list[Probe]:
    best = max((results[number] for number in contenders), key=lambda one: float(one.values.mean()))
    return [
        Probe(
            one.choice.method.name,
            _settings(one.choice.method),
            one.clusters,
            abs(float(one.values.mean())),
            *_mean(one.less(results[0])),
            *_mean(best.less(one)),
            one.choice.layer,
            one.rounds,
            len(one.values),
        )
        for one in results
    ]


def _mean(values: Array) -> tuple[float, float]:
    spread = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return float(values.mean()), spread / float(np.sqrt(len(values)))


def _settings(method: Method) -> dict[str, Any]:
    """The settings that differ from the method's defaults."""
    return {
        field.name: getattr(method, field.name)
        for field in hyperparameters(method)
        if getattr(method, field.name) != field.default
    }
