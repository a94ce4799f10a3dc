"""Before training: whether clients differ, how they differ, and which method to use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from fedclade.analysis.diagnose import diagnosis_text
from fedclade.analysis.diagnose.class_statistics import ClassStatistics, class_statistics
from fedclade.analysis.diagnose.client_map import client_map
from fedclade.analysis.diagnose.group_noise import GroupNoise, measure_noise
from fedclade.analysis.diagnose.groups import (
    CLUSTERINGS,
    Grouping,
    cluster,
    cluster_and_merge,
    select_groups,
)
from fedclade.analysis.diagnose.heterogeneity_kind import (
    Evidence,
    Kind,
    confidence,
    gather_evidence,
    with_renamed,
)
from fedclade.analysis.diagnose.hypothesis_tests import Difference
from fedclade.analysis.diagnose.members import members
from fedclade.analysis.diagnose.pilot_runs import (
    PilotProgress,
    Pilots,
    Probe,
    candidates,
    run_pilots,
    with_clusters,
    without_test,
)
from fedclade.analysis.diagnose.recommendation import Advice, recommend
from fedclade.analysis.diagnose.spread import Spread, measure_spread
from fedclade.core.functional_model import Objective
from fedclade.core.inputs import as_inputs, map_inputs
from fedclade.core.losses import LOSSES, REGRESSION, ExampleLoss, LossName
from fedclade.core.notebook_html import html_table
from fedclade.core.rng import fold_in
from fedclade.data.federated_dataset import Clients
from fedclade.engines.simulator import Simulator
from fedclade.errors import InvalidInputError, require, require_int
from fedclade.methods.base import Method
from fedclade.methods.fedavg import FedAvg
from fedclade.models import MLP, ModelSpec
from fedclade.registry import as_method
from fedclade.training.config import AUTO, EngineConfig, LearningRate, LocalConfig, TrainingConfig
from fedclade.training.runner import TrainingRun
from fedclade.training.setup import metrics_for, module_for

DEFAULT_MODEL = MLP(64)
PROBE_ROUNDS = 60
LEAVES = (
    "once: its number of examples, its number of examples per class, and for each class the mean of"
    " 32 features that the initial model computes from its inputs; four times: the signature of"
    " CladeGroups (128 numbers), and if there are groups, up to four times with noise; if labels"
    " and inputs differ, three times: what Clade sends before its first round; in pilot runs:"
    " trained weights, the model that it selected, and its score on held-out examples"
)


@dataclass(frozen=True)
class Diagnosis:
    """How the clients of a federation differ. `str(diagnosis)` gives it as text; `to_json` and
    `from_json` write and read it.

    Attributes:
        kinds: the kind of heterogeneity; several for a mixture.
        sure: confidence in the kinds, from 0 to 1.
        evidence: the differences between clients, with their tests.
        group: the group of each client; None if there are no groups.
        groups_agree: the share of the clusterings that found the same number of groups.
        advice: the recommended method.
        probes: the pilot runs.
        about: data set, sizes, model and settings of the diagnosis.
        members: the clients and the most frequent classes of each group by name, if they have
            names.
        spread: the clients' tree compared with trees of individuals; None with few clients or
            samples.
        map: the place of each client on a map where similar clients are close; of many clients an
            even sample.
        noise: when the noise of differential privacy hides the groups; None without groups.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=8, seed=0)
        >>> diagnosis = fc.diagnose(clients, fc.models.MLP(8), probe_rounds=0)
        >>> type(diagnosis).from_json(diagnosis.to_json()).kinds == diagnosis.kinds
        True
    """

    kinds: tuple[Kind, ...]
    sure: float
    evidence: Evidence
    group: tuple[int, ...] | None
    groups_agree: float
    advice: Advice
    probes: tuple[Probe, ...]
    about: dict[str, Any]
    members: tuple[dict[str, Any], ...] = ()
    spread: Spread | None = None
    map: tuple[dict[str, Any], ...] = ()
    noise: GroupNoise | None = None

    @property
    def sizes(self) -> dict[str, float]:
        """How large each kind is: the share of the variance that lies between clients; for quantity
        skew the standard deviation of the sizes over their mean.
        """
        return self.evidence.sizes_of(self.kinds)

    @property
    def kind(self) -> str:
        return " and ".join(self.kinds)

    @property
    def groups(self) -> int | None:
        """The number of groups; None if there are no groups."""
        return None if self.group is None else max(self.group) + 1

    def sentences(self) -> list[str]:
        """The diagnosis as sentences, the most important first."""
        return diagnosis_text.sentences(self)

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def _repr_html_(self) -> str:
        """The diagnosis in a notebook."""
        title = f"Diagnosis: {self.kind}"
        rows = {
            "confidence": f"{100 * self.sure:.0f} %",
            "groups": "none found" if self.groups is None else self.groups,
            "recommended": self.advice.method,
        }
        return html_table(title, rows, self.sentences())

    def to_json(self) -> dict[str, Any]:
        content = {
            "kind": self.kind,
            "groups": self.groups,
            "size_of_kind": self.sizes,
            "sentences": self.sentences(),
            "leaves_a_client": LEAVES,
        }
        fields = {name: _plain(value) for name, value in asdict(self).items()}
        if not self.members:
            del fields["members"]
        return content | fields

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
            Advice(**content["advice"] | {"rivals": tuple(content["advice"].get("rivals", ()))}),
            tuple(Probe(**probe) for probe in content["probes"]),
            dict(content["about"]),
            tuple(content.get("members", ())),
            None if content.get("spread") is None else Spread(**content["spread"]),
            tuple(content.get("map", ())),
            None if content.get("noise") is None else GroupNoise(**content["noise"]),
        )


def diagnose(
    clients: Clients,
    model: ModelSpec | nn.Module | None = None,
    seed: int = 0,
    device: str = "auto",
    *,
    lr: LearningRate = 0.1,
    batch_size: int = 10,
    epochs: int = 2,
    momentum: float = 0.0,
    loss: LossName | ExampleLoss | None = None,
    probe_rounds: int = PROBE_ROUNDS,
    also: Sequence[Method | str] = (),
    threads: int | None = None,
) -> Diagnosis:
    """Find how clients differ, which groups they form, and which method fits.

    Test data and the true groups of a partition are not used.

    What leaves a client: its number of examples, its number of examples per class, and for each
    class the mean of 32 features; Clade's signature, three times; and what the methods of the pilot
    runs send. Scatter matrices are only ever summed over clients.

    Args:
        clients: the clients, from `fc.data.partition` or `fc.data.from_arrays`; at least two.
        model: the model to train, one of `fc.models` or an `nn.Module`; default: a small MLP.
        seed: random seed for initial weights, sample order and tests.
        device: "auto", "cpu" or "cuda".
        lr: learning rate of the clients in the pilot runs; "auto" to choose it first, with FedAvg.
        batch_size: batch size of the clients in the pilot runs.
        epochs: local epochs per round of the pilot runs.
        momentum: momentum of the clients' SGD in the pilot runs.
        loss: the loss, as in `fc.run`; default: cross-entropy.
        probe_rounds: the most rounds of each method's pilot run, which ends earlier if its score
            on held-out training data no longer rises; 0 for no pilot runs, and then no gain is
            estimated.
        also: further methods for the pilot runs, such as ["ditto", fc.FedRep()]. By default FedAvg,
            the personal layer, SCAFFOLD, Local and Clade, and where clients differ CladeGroups,
            IFCA and CFL. Names of methods that need a number of groups get the number that was
            found, or 5.
        threads: number of CPU threads; default: chosen automatically.

    Returns:
        The diagnosis. Print it, or read `kinds`, `group` and `advice`.

    Example:
        >>> import fedclade as fc
        >>> digits, scheme = fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2)
        >>> clients = fc.data.partition(digits, scheme, clients=8, seed=0)
        >>> fc.diagnose(clients, fc.models.MLP(8), probe_rounds=0).kind
        'label skew'
    """
    require(
        isinstance(seed, int) and seed >= 0, "seed", seed, "must be a whole number of at least 0"
    )
    run = TrainingRun(
        FedAvg(),
        clients,
        model or DEFAULT_MODEL,
        LocalConfig(
            lr,
            batch_size,
            epochs,
            momentum,
            loss=loss if isinstance(loss, str) else "cross_entropy",
        ),
        TrainingConfig(seed=seed),
        EngineConfig(threads=threads),
        device,
        None if isinstance(loss, str) else loss,
    )
    return diagnose_run(run, probe_rounds, also=also)


def diagnose_run(
    run: TrainingRun,
    probe_rounds: int,
    progress: PilotProgress | None = None,
    also: Sequence[Method | str] = (),
) -> Diagnosis:
    """`diagnose` the clients of a run. Its method, rounds and cohort size do not matter.

    Args:
        run: the run.
        probe_rounds: the most rounds of each method's pilot run; 0 for no pilot runs.
        progress: called with the progress of the pilot runs.
        also: further methods for the pilot runs, or their names.
    """
    _check(run.clients, probe_rounds)
    require(not isinstance(also, str), "also", also, 'must be a list, such as ["ditto"]')
    further = [_method(entry) for entry in also]
    assert run.clients is not None
    clients, seed = without_test(run.clients), run.settings.seed
    if run.local.lr == AUTO:
        run = replace(run, clients=clients).with_chosen_lr()
    fed = Simulator(clients, device=run.device, **run.engine.simulator_options())
    objectives = _objectives(clients, run, fed)
    rng = np.random.default_rng([seed, len(clients)])
    classes = clients.classes if clients.classes is not None and clients.y.ndim == 1 else 1
    key = fold_in(seed, "diagnosis")
    statistics = class_statistics(fed, objectives[0], classes, key, clients.names)
    evidence = gather_evidence(statistics, rng)
    spread = measure_spread(fed, objectives[0], fold_in(key, "spread"), rng)
    clusterings = cluster(fed, objectives, key)
    grouping = select_groups(clusterings, statistics, evidence, rng)
    if grouping.group is None and evidence.is_mixture:
        # Class shares may hide the groups, and may differ inside them.
        merged = cluster_and_merge(fed, objectives, key)
        grouping = select_groups(merged, statistics, evidence, rng, labels_too=False)
    if _of_individuals(evidence, spread):
        grouping = Grouping(None, 1.0)

    faint = evidence.given_labels_differ and (grouping.group is None or grouping.agree < 1)
    differ = any(
        kind not in ("iid", "quantity skew") for kind in _kinds(evidence, grouping, spread)
    )
    number = _number(grouping)
    methods = candidates(
        differ,
        number,
        faint,
        [
            method if isinstance(given, Method) else with_clusters(method, number)
            for given, method in zip(also, further, strict=True)
        ],
    )
    pilots = run_pilots(methods, clients, run, probe_rounds, progress) if probe_rounds else Pilots()
    # Faint groups that the initial model does not show may be visible with a trained model.
    if grouping.group is None and faint and pilots.groups is not None:
        grouping = select_groups([pilots.groups], statistics, evidence, rng)
    evidence = with_renamed(evidence, statistics, grouping.group, rng)
    kinds = _kinds(evidence, grouping, spread)
    return Diagnosis(
        kinds,
        (
            confidence(evidence, statistics, rng, grouping.group)
            * _individuals_are_sure(kinds, evidence, spread)
            if kinds != ("target shift",)
            else (grouping.agree * CLUSTERINGS + 1) / (CLUSTERINGS + 2)
        ),
        evidence,
        None if grouping.group is None else tuple(grouping.group.tolist()),
        grouping.agree,
        recommend(differ, _number(grouping), faint, pilots.probes),
        pilots.probes,
        _about(clients, run, probe_rounds, statistics) | {"not_measured": list(pilots.failed)},
        members(grouping.group, clients.names, statistics.counts),
        spread,
        client_map(statistics, clients.names),
        (
            None
            if grouping.group is None
            else measure_noise(fed, objectives[0], grouping.group, fold_in(key, "noise"))
        ),
    )


def _of_individuals(evidence: Evidence, spread: Spread | None) -> bool:
    """Whether each client has its own feature shift: a clustering would only cut a continuum. With
    label skew too, the tree shows the labels.
    """
    return evidence.kinds() == ("feature shift",) and spread is not None and not spread.is_grouped


def _kinds(evidence: Evidence, grouping: Grouping, spread: Spread | None) -> tuple[Kind, ...]:
    kinds = evidence.kinds()
    # Without class labels, groups whose inputs are alike can only differ in their targets.
    if evidence.classes == 1 and grouping.group is not None and "feature shift" not in kinds:
        return ("target shift",)
    in_groups = grouping.group is not None
    if spread is not None and not evidence.is_mixture:
        in_groups |= spread.is_grouped
    shift: Kind = "feature shift in groups" if in_groups else "feature shift of individuals"
    return tuple(shift if kind == "feature shift" else kind for kind in kinds)


def _individuals_are_sure(
    kinds: tuple[Kind, ...], evidence: Evidence, spread: Spread | None
) -> float:
    """A factor of the confidence: whether groups would have been seen where none were."""
    if "feature shift of individuals" not in kinds:
        return 1.0
    power = 0.0 if spread is None or evidence.is_mixture else spread.power
    return (1 + power) / 2


def _method(entry: Method | str) -> Method:
    made = as_method(entry, "also")
    require(made.groups != "known", "also", entry, "must not be a method with the true groups")
    return made


def _number(grouping: Grouping) -> int | None:
    return None if grouping.group is None else int(grouping.group.max()) + 1


def _objectives(clients: Clients, run: TrainingRun, fed: Simulator) -> list[Objective]:
    """The model with several initial weights. An nn.Module of the user has only one."""
    name = run.local.loss if run.loss is None else None
    modules = [
        module_for(run.model, clients.metadata, fold_in(run.settings.seed, "look", number), name)
        for number in range(CLUSTERINGS)
    ]
    x = as_inputs(map_inputs(lambda value: value.to(fed.device), clients.metadata.x))
    loss = run.local.loss_for(run.loss)
    objectives = [Objective(module.to(fed.device), loss, x) for module in modules]
    metrics_for(objectives[0], fed.client_metadata(), None, fed.device)
    objectives[0].head_layer()
    return objectives


def _check(clients: Clients | None, probe_rounds: int) -> None:
    if not isinstance(clients, Clients):
        raise InvalidInputError(
            "clients: must come from fc.data.partition(…) or fc.data.from_arrays(…).", "clients"
        )
    require(
        len(clients) >= 2,
        "clients",
        len(clients),
        "must be at least 2, because a diagnosis compares clients",
    )
    empty = (clients.sizes == 0).nonzero().flatten().tolist()
    if empty:
        client = clients.names.client(empty[0])
        raise InvalidInputError(
            f"client {client}: it has no training data; leave it out, clients.only([…]).", client
        )
    require_int("probe_rounds", probe_rounds, 0, note="0 for no pilot runs")


def _about(
    clients: Clients, run: TrainingRun, probe_rounds: int, statistics: ClassStatistics
) -> dict[str, Any]:
    sizes = statistics.sizes
    is_regression = LOSSES[run.local.loss] in REGRESSION
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
        "score": "accuracy" if run.loss is None and not is_regression else "loss",
    }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
