"""Are these clients different, in what way, and what should one do: the question before any
training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import nn

from fedclade.analysis.diagnose import diagnosis_text
from fedclade.analysis.diagnose.class_statistics import ClassStatistics, class_statistics
from fedclade.analysis.diagnose.groups import LOOKS, Grouping, judged, looks
from fedclade.analysis.diagnose.heterogeneity_kind import (
    Evidence,
    Kind,
    gathered,
    sureness,
    with_renamed,
)
from fedclade.analysis.diagnose.hypothesis_tests import Difference
from fedclade.analysis.diagnose.pilot_runs import Probe, candidates, run_pilots, without_test
from fedclade.analysis.diagnose.recommendation import Advice, advised
from fedclade.core.functional_model import ExampleLoss, Objective
from fedclade.core.rng import fold_in
from fedclade.data.federated_dataset import Clients, as_inputs
from fedclade.engines.simulator import Simulator
from fedclade.errors import InvalidInputError, require, require_int
from fedclade.methods.fedavg import FedAvg
from fedclade.models import MLP, ModelSpec
from fedclade.training.config import EngineConfig, LocalConfig, TrainingConfig
from fedclade.training.runner import TrainingRun
from fedclade.training.setup import metrics_for, module_for

DEFAULT_MODEL = MLP(64)
PROBE_ROUNDS = 10
LEAVES = (
    "once: its number of examples, how many it has of each class, and for each class the mean of 32"
    " numbers made of its inputs by the first model; three times: Clade's signature (128 numbers);"
    " in probe rounds: trained weights, which model it chose, and how well it does on examples that"
    " it held out"
)


@dataclass(frozen=True)
class Diagnosis:
    """What was found out about a federation. `to_json` and `from_json` keep all of it; printed, it
    is in words.

    kinds: one, or several for a mixture; sure: from 0 to 1 (`evidence.sureness`).
    group: the group of each client, or None where there are none; groups_agree: the part of the
    looks that found as many groups.
    """

    kinds: tuple[Kind, ...]
    sure: float
    evidence: Evidence
    group: tuple[int, ...] | None
    groups_agree: float
    advice: Advice
    probes: tuple[Probe, ...]
    about: dict[str, Any]

    @property
    def kind(self) -> str:
        return " and ".join(self.kinds)

    @property
    def groups(self) -> int | None:
        """How many groups there are; None: no groups."""
        return None if self.group is None else max(self.group) + 1

    def sentences(self) -> list[str]:
        """The diagnosis in words, the most important first."""
        return diagnosis_text.sentences(self)

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def to_json(self) -> dict[str, Any]:
        content = {
            "kind": self.kind,
            "groups": self.groups,
            "sentences": self.sentences(),
            "leaves_a_client": LEAVES,
        }
        return content | {name: _plain(value) for name, value in asdict(self).items()}

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> Diagnosis:
        evidence = dict(content["evidence"])
        for name in ("labels", "inputs", "given_labels"):
            evidence[name] = Difference(**evidence[name])
        return Diagnosis(
            tuple(content["kinds"]),
            content["sure"],
            Evidence(**evidence),
            None if content["group"] is None else tuple(content["group"]),
            content["groups_agree"],
            Advice(**content["advice"]),
            tuple(Probe(**probe) for probe in content["probes"]),
            dict(content["about"]),
        )


def diagnose(
    clients: Clients,
    model: ModelSpec | nn.Module | None = None,
    seed: int = 0,
    device: str = "auto",
    *,
    lr: float = 0.1,
    batch_size: int = 10,
    epochs: int = 2,
    momentum: float = 0.0,
    loss: ExampleLoss | None = None,
    probe_rounds: int = PROBE_ROUNDS,
    threads: int | None = None,
) -> Diagnosis:
    """Which kind of heterogeneity these clients have, how many groups there are and who is in
    which, and which method fits.

    It never looks at test data, nor at groups that a partition knows. model: the model to be
    trained, one of `fc.models` or an nn.Module, by default a small MLP; lr, batch_size, epochs,
    momentum: how clients train in the probe rounds; probe_rounds=0: none, and no gain is estimated.

    What leaves a client: its number of examples, its number of examples of each class, and for each
    class the mean of 32 numbers; Clade's signature three times; and what the tried methods send in
    the probe rounds. Scatter matrices are needed summed over clients only.
    """
    require(
        isinstance(seed, int) and seed >= 0, "seed", seed, "must be a whole number of at least 0"
    )
    run = TrainingRun(
        FedAvg(),
        clients,
        model or DEFAULT_MODEL,
        LocalConfig(lr, batch_size, epochs, momentum),
        TrainingConfig(seed=seed),
        EngineConfig(threads=threads),
        device,
        loss,
    )
    return diagnose_run(run, probe_rounds)


def diagnose_run(run: TrainingRun, probe_rounds: int) -> Diagnosis:
    """`diagnose` the clients of a run. Its method, rounds and cohort size do not matter."""
    _check(run.clients, probe_rounds)
    assert run.clients is not None
    clients, seed = without_test(run.clients), run.settings.seed
    fed = Simulator(clients, device=run.device, **asdict(run.engine))
    objectives = _objectives(clients, run, fed)
    rng = np.random.default_rng([seed, len(clients)])
    classes = clients.classes if clients.classes is not None and clients.y.ndim == 1 else 1
    statistics = class_statistics(fed, objectives[0], classes, fold_in(seed, "diagnosis"))
    evidence = gathered(statistics, rng)
    taken = looks(fed, objectives, fold_in(seed, "diagnosis"))
    grouping = judged(taken, statistics, evidence, rng)

    faint = evidence.given_labels_differ and (grouping.found is None or grouping.agree < 1)
    differ = any(kind not in ("iid", "quantity skew") for kind in _kinds(evidence, grouping))
    methods = candidates(differ, _number(grouping), faint)
    probes, trained = (
        run_pilots(methods, clients, run, probe_rounds) if probe_rounds else ([], None)
    )
    if (
        grouping.found is None and faint and trained is not None
    ):  # groups too faint for the first model may show at a trained one
        grouping = judged([trained], statistics, evidence, rng)
    evidence = with_renamed(evidence, statistics, grouping.found, rng)
    kinds = _kinds(evidence, grouping)
    return Diagnosis(
        kinds,
        (
            sureness(evidence, statistics, rng, grouping.found)
            if kinds != ("target shift",)
            else (grouping.agree * LOOKS + 1) / (LOOKS + 2)
        ),
        evidence,
        None if grouping.found is None else tuple(grouping.found.tolist()),
        grouping.agree,
        advised(differ, _number(grouping), faint, probes),
        tuple(probes),
        _about(clients, run, probe_rounds, statistics),
    )


def _kinds(evidence: Evidence, grouping: Grouping) -> tuple[Kind, ...]:
    kinds = evidence.kinds()
    # Without class labels all that is left to see is that gradients differ where inputs do not.
    unseen = evidence.classes == 1 and grouping.found is not None and "feature shift" not in kinds
    return ("target shift",) if unseen else kinds


def _number(grouping: Grouping) -> int | None:
    return None if grouping.found is None else int(grouping.found.max()) + 1


def _objectives(clients: Clients, run: TrainingRun, fed: Simulator) -> list[Objective]:
    """The model at several first weights; a module of the user's own has but one."""
    modules = [
        module_for(run.model, clients.metadata, fold_in(run.settings.seed, "look", number))
        for number in range(LOOKS)
    ]
    x = as_inputs(clients.metadata.x.to(fed.device))
    objectives = [Objective(module.to(fed.device), run.loss, x) for module in modules]
    metrics_for(objectives[0], fed.client_metadata(), None, fed.device)
    objectives[0].head_layer()
    return objectives


def _check(clients: Clients | None, probe_rounds: int) -> None:
    if not isinstance(clients, Clients):
        raise InvalidInputError(
            "clients: make them with fc.data.partition(…) or fc.data.from_arrays(…)."
        )
    require(
        len(clients) >= 2,
        "clients",
        len(clients),
        "a diagnosis compares clients, so there must be at least 2",
    )
    empty = (clients.sizes == 0).nonzero().flatten().tolist()
    if empty:
        raise InvalidInputError(
            f"client {empty[0]}: it has no training data; leave it out, clients.only([…])."
        )
    require_int("probe_rounds", probe_rounds, 0, note="0 for no probe rounds")


def _about(
    clients: Clients, run: TrainingRun, probe_rounds: int, statistics: ClassStatistics
) -> dict[str, Any]:
    sizes = statistics.sizes
    return {
        "dataset": clients.dataset,
        "partition": clients.partition,
        "clients": len(clients),
        "examples": int(sizes.sum()),
        "smallest": int(sizes.min()),
        "median": float(np.median(sizes)),
        "largest": int(sizes.max()),
        "classes": None if statistics.counts.shape[1] == 1 else statistics.counts.shape[1],
        "model": (type(run.model).__name__ if isinstance(run.model, nn.Module) else run.model.name),
        "seed": run.settings.seed,
        "probe_rounds": probe_rounds,
        "score": "loss" if run.loss is not None else "accuracy",
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
