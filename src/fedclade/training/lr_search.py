"""`local.lr = "auto"`: the learning rate with which short runs do best on held-out training data.

Each value of a grid trains the run's own method for a few rounds on four fifths of each client's
training data, from the same initial weights and with the same randomness. The value with the best
mean over clients on the other fifth is chosen: the highest accuracy, or the lowest loss where
there is none. Test data are never read.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedclade.core.rng import fold_in
from fedclade.data.federated_dataset import Clients
from fedclade.data.held_out import held_out
from fedclade.errors import InvalidInputError, require
from fedclade.io.schemas import LrCandidate, LrSearch
from fedclade.training.config import AUTO, LocalConfig

if TYPE_CHECKING:
    from fedclade.training.runner import TrainingRun

ROUNDS = 10
MAX_CLIENTS = 200  # more would improve the choice little
SGD = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
SGD_WITH_MOMENTUM = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)  # momentum lengthens the steps
ADAM = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03)
_log = logging.getLogger("fedclade")


def grid(local: LocalConfig) -> tuple[float, ...]:
    """The learning rates that are tried."""
    if local.optimizer != "sgd":
        return ADAM
    return SGD_WITH_MOMENTUM if local.momentum >= 0.5 else SGD


def search_lr(run: TrainingRun) -> LrSearch:
    """Choose the learning rate of a run.

    Args:
        run: the run, with `local.lr = "auto"`.

    Returns:
        The chosen value, and the score of each value.
    """
    if run.federation is not None or not isinstance(run.clients, Clients):
        raise InvalidInputError(
            f"local.lr = '{AUTO}': only a run in the simulator can choose it. Give a number.",
            "local.lr",
        )
    require(
        run.privacy.epsilon is None,
        "local.lr",
        AUTO,
        "the choice reads training data without noise, which privacy.epsilon does not count; give"
        " a number",
    )
    short = _short_run(run, run.clients)
    values = grid(run.local)
    _log.info("local.lr: trying %s for %d rounds each", values, short.settings.rounds)
    candidates = [_candidate(short, lr) for lr in values]
    usable = [candidate for candidate in candidates if candidate["loss"] is not None]
    if not usable:
        raise InvalidInputError(
            f"local.lr = '{AUTO}': training diverged, or no client has held-out samples, with each"
            f" of {', '.join(map(str, values))}. Give a number.",
            "local.lr",
        )
    best = max(usable, key=_score)
    _log.info("local.lr = %g, chosen on held-out training data", best["lr"])
    return LrSearch(lr=best["lr"], rounds=short.settings.rounds, candidates=candidates)


def _short_run(run: TrainingRun, clients: Clients) -> TrainingRun:
    """The run on four fifths of the training data, without all that changes over its rounds."""
    seed = run.settings.seed
    share = run.settings.cohort_size(len(clients)) / len(clients)
    if len(clients) > MAX_CLIENTS:
        drawn = np.random.default_rng(seed).permutation(len(clients))[:MAX_CLIENTS]
        clients = clients.only(np.sort(drawn).tolist())
    clients = replace(clients, validation=None, validation_origin={}, later=None)
    return replace(
        run,
        clients=held_out(clients, fold_in(seed, "learning rate")),
        local=replace(run.local, schedule="constant", decay=1.0, decay_every=1, warmup_rounds=0),
        settings=replace(
            run.settings,
            rounds=min(ROUNDS, run.settings.rounds),
            clients_per_round=share,
            eval_every=0,
            patience=0,
            select="last",
            metrics=(),
        ),
        metrics=None,
        profile=False,
    )


def _candidate(short: TrainingRun, lr: float) -> LrCandidate:
    result = replace(short, local=replace(short.local, lr=lr)).run()
    # The engine rejects weights that are not finite, and counts them as failures.
    loss = None if result.summary["failures"] else result.summary["loss"]
    is_finite = loss is not None and math.isfinite(loss)
    return LrCandidate(
        lr=lr,
        accuracy=result.summary["accuracy"] if is_finite else None,
        loss=loss if is_finite else None,
    )


def _score(candidate: LrCandidate) -> tuple[float, float]:
    """The accuracy; of equal ones, or without accuracy, the loss counts."""
    assert candidate["loss"] is not None
    return (candidate["accuracy"] or 0.0, -candidate["loss"])
