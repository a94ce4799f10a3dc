"""Pilot runs: train the candidate methods for a few rounds and evaluate them on held-out training
data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.clustering.graph import canonical_labels
from fedclade.core.inputs import select
from fedclade.core.rng import fold_in
from fedclade.data.federated_dataset import Clients, RaggedIndex
from fedclade.errors import InvalidInputError
from fedclade.methods.base import Method, hyperparameters
from fedclade.methods.cfl import CFL
from fedclade.methods.clade import Clade
from fedclade.methods.fedavg import FedAvg
from fedclade.methods.ifca import IFCA
from fedclade.methods.local import Local
from fedclade.training.config import ServerConfig, TrainingConfig
from fedclade.training.runner import TrainingRun

Array = NDArray[np.float64]
HELD_OUT = 0.2
MAX_CLIENTS = 200  # in pilot runs: more clients would improve the estimate little
DEFAULT_CLUSTERS = 5  # for IFCA, which needs a number even if no groups are found


@dataclass(frozen=True)
class Probe:
    """The result of one method's pilot run.

    Attributes:
        method: the method's name.
        settings: the method's settings that differ from the defaults.
        clusters: the number of models.
        score: the mean over clients on held-out training data: accuracy in percent, or the loss.
        gain: how much better than FedAvg.
        gain_stderr: the standard error of `gain` over clients.
        behind: how much worse than the best method.
        behind_stderr: the standard error of `behind` over clients.
    """

    method: str
    settings: dict[str, Any]
    clusters: int
    score: float
    gain: float
    gain_stderr: float
    behind: float
    behind_stderr: float


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


def held_out(clients: Clients, seed: int) -> Clients:
    """A fifth of each client's training data becomes its test part. Clients with fewer than three
    samples have no test part.
    """
    rng = np.random.default_rng([seed, len(clients)])
    train, test = [], []
    for client in range(len(clients)):
        rows = clients.train[client]
        rows = rows[torch.from_numpy(rng.permutation(len(rows)))]
        count = max(1, round(HELD_OUT * len(rows))) if len(rows) > 2 else 0
        test.append(rows[:count])
        train.append(rows[count:])
    test_part_id = torch.tensor([client if len(rows) else -1 for client, rows in enumerate(test)])
    return replace(
        clients,
        train=RaggedIndex.of(train),
        x_test=clients.x,
        y_test=clients.y,
        test=RaggedIndex.of(test),
        test_part_id=test_part_id,
        test_sample_id=torch.arange(len(clients.y)),
    )


def candidates(differ: bool, groups: int | None, faint: bool) -> list[Method]:
    """The candidate methods.

    Args:
        differ: whether labels or inputs differ between clients.
        groups: the number of groups; None if there are no groups.
        faint: whether inputs of one label differ, but not every clustering finds groups.
    """
    if not differ:
        return [FedAvg(), Local()]
    clade = Clade(recluster_every=5) if faint else Clade()
    return [FedAvg(), Local(), clade, IFCA(clusters=groups or DEFAULT_CLUSTERS), CFL()]


def run_pilots(
    methods: Sequence[Method], clients: Clients, run: TrainingRun, rounds: int
) -> tuple[list[Probe], NDArray[np.int64] | None]:
    """Train each method for a few rounds, with all clients in every round.

    At most `MAX_CLIENTS` clients are used; if there are more, a random subset.

    Args:
        methods: the methods, FedAvg first.
        clients: the clients, without test data.
        run: how clients train.
        rounds: the number of rounds.

    Returns:
        The results, empty if no client has three samples; and the final groups of Clade, None for
        a subset of the clients.
    """
    seed = run.settings.seed
    is_subset, groups = len(clients) > MAX_CLIENTS, None
    if is_subset:
        clients = clients.only(
            np.sort(np.random.default_rng(seed).permutation(len(clients))[:MAX_CLIENTS]).tolist()
        )
    pilot_clients = held_out(clients, fold_in(seed, "held out"))
    evaluated = (pilot_clients.test_part_id >= 0).numpy()
    if not evaluated.any():
        return [], None
    settings = TrainingConfig(rounds, 1.0, seed, eval_every=0)
    pilot = replace(
        run, clients=pilot_clients, settings=settings, server=ServerConfig(), metrics=None
    )
    clusters, scores = [], []
    for method in methods:
        result = replace(pilot, method=method).run()
        # The sign makes larger scores better.
        measure, sign = ("accuracy", 1) if "accuracy" in result.clients else ("loss", -1)
        loss, values = (
            np.array(result.clients[name], np.float64)[evaluated] for name in ("loss", measure)
        )
        # The engine rejects weights that are not finite, and counts them as failures.
        if result.summary["failures"] or not np.isfinite(loss).all():
            raise InvalidInputError(
                f"local.lr = {run.local.lr}: {method.name} diverged in its pilot run. Use a smaller"
                " value, or probe_rounds = 0.",
                "local.lr",
            )
        scores.append(sign * values)
        clusters.append(result.summary["clusters"])
        if isinstance(method, Clade) and not is_subset:
            groups = canonical_labels(result.clusters.numpy())
    best = max(scores, key=lambda score: float(score.mean()))
    probes = [
        Probe(
            method.name,
            _settings(method),
            count,
            abs(float(score.mean())),
            *_mean(score - scores[0]),
            *_mean(best - score),
        )
        for method, count, score in zip(methods, clusters, scores, strict=True)
    ]
    return probes, groups


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
