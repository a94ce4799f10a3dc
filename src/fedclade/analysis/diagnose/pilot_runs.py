"""Probe rounds: the methods that come into question, trained for a few rounds and judged on a
held-out part of the training data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedclade.clustering.graph import canonical_labels
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
MOST_CLIENTS = 200  # in probe rounds: more would tell little more
GUESSED_CLUSTERS = 5  # IFCA wants a number also where no groups are found


@dataclass(frozen=True)
class Probe:
    """One method after the probe rounds. score: the mean over clients on held-out training data,
    accuracy in percent or else the loss; gain: how much better than FedAvg; behind: how much worse
    than the best of all; each with its standard error over clients.
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
    """The same clients with neither test data nor known groups: all that a diagnosis ever sees."""
    nobody = torch.full((len(clients),), -1)
    return replace(
        clients,
        x_test=clients.x[:0],
        y_test=clients.y[:0],
        test=RaggedIndex.of([]),
        test_part_id=nobody,
        test_sample_id=torch.empty(0, dtype=torch.int64),
        groups=None,
        probe=None,
    )


def held_out(clients: Clients, seed: int) -> Clients:
    """A fifth of each client's training data becomes its test part; who has fewer than three
    samples is not judged.
    """
    rng = np.random.default_rng([seed, len(clients)])
    train, test = [], []
    for client in range(len(clients)):
        rows = clients.train[client]
        rows = rows[torch.from_numpy(rng.permutation(len(rows)))]
        held = max(1, round(HELD_OUT * len(rows))) if len(rows) > 2 else 0
        test.append(rows[:held])
        train.append(rows[held:])
    own = torch.tensor([client if len(rows) else -1 for client, rows in enumerate(test)])
    return replace(
        clients,
        train=RaggedIndex.of(train),
        x_test=clients.x,
        y_test=clients.y,
        test=RaggedIndex.of(test),
        test_part_id=own,
        test_sample_id=torch.arange(len(clients.x)),
    )


def candidates(differ: bool, groups: int | None, faint: bool) -> list[Method]:
    """The methods that come into question. faint: inputs of one label differ, and yet not every
    look at a first model finds groups.
    """
    if not differ:
        return [FedAvg(), Local()]
    clade = Clade(recluster_every=5) if faint else Clade()
    return [FedAvg(), Local(), clade, IFCA(clusters=groups or GUESSED_CLUSTERS), CFL()]


def run_pilots(
    methods: Sequence[Method], clients: Clients, run: TrainingRun, rounds: int
) -> tuple[list[Probe], NDArray[np.int64] | None]:
    """Each method after the probe rounds, FedAvg first, with all clients in every round; and the
    groups with which Clade ended. `run`: how clients train.

    Of many clients some are drawn, and then nothing is said about groups. The list is empty where
    no client has three samples.
    """
    seed = run.settings.seed
    some, groups = len(clients) > MOST_CLIENTS, None
    if some:
        clients = clients.only(
            np.sort(np.random.default_rng(seed).permutation(len(clients))[:MOST_CLIENTS]).tolist()
        )
    judged = held_out(clients, fold_in(seed, "held out"))
    who = (judged.test_part_id >= 0).numpy()
    if not who.any():
        return [], None
    settings = TrainingConfig(rounds, 1.0, seed, eval_every=0)
    pilot = replace(run, clients=judged, settings=settings, server=ServerConfig(), metrics=None)
    clusters, scores = [], []
    for method in methods:
        result = replace(pilot, method=method).run()
        measure, sign = (
            ("accuracy", 1) if "accuracy" in result.clients else ("loss", -1)
        )  # so that more is better
        loss, values = (
            np.array(result.clients[name], np.float64)[who] for name in ("loss", measure)
        )
        if (
            result.summary["failures"] or not np.isfinite(loss).all()
        ):  # weights that are not finite are refused
            lr = run.local.lr
            raise InvalidInputError(
                f"local.lr = {lr}: {method.name} diverged in the probe rounds; take a smaller one,"
                " or probe_rounds = 0."
            )
        scores.append(sign * values)
        clusters.append(result.summary["clusters"])
        if isinstance(method, Clade) and not some:
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
    """What differs from the method's defaults."""
    return {
        each.name: getattr(method, each.name)
        for each in hyperparameters(method)
        if getattr(method, each.name) != each.default
    }
