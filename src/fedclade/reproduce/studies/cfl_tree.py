"""A run of CFL from inside: the updates of each round, the separation gap of each cluster, and the
tree of splits.

Sattler et al., arXiv 1910.01991, Figures 4 and 8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from fedclade.aggregation.federation_view import FederationView
from fedclade.clustering.cfl import ParameterTree, separation_gap
from fedclade.clustering.cosine import cosine
from fedclade.core.federation import ClientResults, ModelAssignment, SegmentSum
from fedclade.core.method_state import State
from fedclade.core.program import AnyProgram
from fedclade.core.pytree import Tree, flatten, tree_index
from fedclade.data.federated_dataset import Clients
from fedclade.errors import InvalidInputError
from fedclade.io.schemas import RoundRecord
from fedclade.methods.cfl import CFL
from fedclade.reproduce.panels import Panel, Series, StudyResult
from fedclade.training import experiment_file, metrics
from fedclade.training.loop import Progress, start, train
from fedclade.training.runner import TrainingRun
from fedclade.training.setup import prepare

Tables = dict[str, dict[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class ClientUpdates:
    """What the clients of a round made.

    Args:
        ids: (K,) the clients.
        node: (K,) the row of the model from which each client trained: CFL's node.
        start: (K, P) these models as vectors.
        updates: (K, P) Δθ_i.
    """

    ids: Tensor
    node: Tensor
    start: Tensor
    updates: Tensor


@dataclass(frozen=True)
class RecordingFederation(FederationView):
    """A federation that keeps the last updates that clients sent, for a study. Sums over clients
    are not recorded.

    Args:
        kept: the last updates; empty before the first.
    """

    kept: list[ClientUpdates] = field(default_factory=list)

    @property
    def last(self) -> ClientUpdates | None:
        return self.kept[-1] if self.kept else None

    def map(
        self,
        program: AnyProgram,
        ids: Tensor,
        *,
        broadcast: Tree | None = None,
        per_client: ModelAssignment | None = None,
        key: int,
        reduce: SegmentSum | None = None,
    ) -> ClientResults:
        results = super().map(
            program, ids, broadcast=broadcast, per_client=per_client, key=key, reduce=reduce
        )
        if reduce is None and per_client is not None and len(results.ids):
            node = per_client.model_ids[torch.isin(ids, results.ids)]
            models = {name: per_client.models[name] for name in results.outputs}
            before = flatten(tree_index(models, node.to(next(iter(models.values())).device)))
            after = flatten(results.outputs)
            self.kept[:] = [ClientUpdates(results.ids, node, before, after - before)]
        return results


Measure = Callable[[ClientUpdates, RoundRecord, State], T]


@dataclass(frozen=True)
class Recorder(Generic[T]):
    """Called after each round: measures the updates of the round and the state after it.

    Args:
        federation: where the updates come from.
        progress: the progress of the run.
        measure: a function of the updates, of the round's row of the history and of the state.
        measured: its results by round.
    """

    federation: RecordingFederation
    progress: Progress
    measure: Measure[T]
    measured: list[T] = field(default_factory=list)

    def after_round(self, row: RoundRecord) -> None:
        assert self.federation.last is not None
        self.measured.append(self.measure(self.federation.last, row, self.progress.state))


def record(run: TrainingRun, measure: Measure[T]) -> tuple[Progress, list[T]]:
    """Execute a run whose method asks for the clients' models, such as CFL.

    Args:
        run: the run.
        measure: what is measured after each round, see `Recorder`.

    Returns:
        The progress at the end, and what was measured in each round.
    """
    setup = prepare(run)
    federation = RecordingFederation(setup.federation)
    setup = replace(setup, federation=federation)
    recorder = Recorder(federation, start(setup, None, None), measure)
    train(setup, recorder.progress, [recorder], None)
    return recorder.progress, recorder.measured


def cluster_name(groups: Tensor) -> str:
    """A cluster by the true groups of its members, such as "groups 1, 3: 10 clients"."""
    known = sorted({int(group) + 1 for group in groups})
    plural = "s" if len(known) > 1 else ""
    clients = "1 client" if len(groups) == 1 else f"{len(groups)} clients"
    return f"group{plural} {', '.join(map(str, known))}: {clients}"


Numbers = dict[str, float]


def by_cluster(
    made: ClientUpdates, row: RoundRecord, state: State, groups: Tensor
) -> list[Numbers]:
    """The separation gap of each cluster that made updates, and the accuracy of each cluster that
    there is after the round (empty in rounds without an evaluation).
    """
    gaps = {}
    for node in sorted(set(made.node.tolist())):
        here = made.node == node
        members = groups[made.ids[here]]
        if len(members) >= 2:  # one client cannot be split
            similarity = cosine(made.updates[here.to(made.updates.device)]).cpu().numpy()
            gaps[cluster_name(members)] = separation_gap(similarity, members.numpy())
    accuracy = {
        cluster_name(groups[state.cluster_ids == cluster]): mean
        for cluster, _, mean in row.get("by_cluster", [])
        if row["by_cluster_of"] == "accuracy"
    }
    return [gaps, accuracy]


def tree(tables: Tables, clients: Clients | None, device: str) -> StudyResult:
    """By round: the number of clusters, how many of them have a gap g(α) above 0, and the largest
    gap; at the end also the gap of all clients before the first split, the rounds of the first and
    of the last split, and the adjusted Rand index in percent.
    """
    assert clients is not None
    experiment = experiment_file.experiment(tables)
    if not isinstance(experiment.method, CFL) or clients.groups is None:
        raise InvalidInputError(
            f"method.name = '{experiment.method.name}', partition.name = '{clients.partition}':"
            " this study needs cfl and a partition with true groups, such as label_swap.",
            "method.name" if clients.groups is not None else "partition.name",
        )
    groups = clients.groups
    progress, measured = record(
        experiment.to_run(clients, device),
        lambda made, row, state: by_cluster(made, row, state, groups),
    )
    all_gaps, accuracies = ([numbers[kind] for numbers in measured] for kind in (0, 1))
    number = len(measured)
    rows: list[dict[str, Any]] = []
    splits = []
    for row, gaps in zip(progress.history, all_gaps, strict=True):
        if row["clusters"] > (rows[-1]["clusters"] if rows else 1):
            splits.append(row["round"])
        rows.append(
            {
                "round": row["round"],
                "clusters": row["clusters"],
                "accuracy": row.get("accuracy"),
                "gaps above 0": sum(gap > 0 for gap in gaps.values()),
                "largest gap": max(gaps.values(), default=None),
            }
        )
    state = progress.state
    assert isinstance(state, ParameterTree)
    rows[-1] |= {
        "gap before the split": rows[(splits[0] if splits else number) - 1]["largest gap"],
        "first split": splits[0] if splits else None,
        "last split": splits[-1] if splits else None,
        "ari": 100 * (metrics.adjusted_rand(groups, state.cluster_ids) or 0.0),
    }
    return StudyResult(
        rows,
        (
            Panel(
                "accuracy of each cluster",
                "lines",
                "round",
                "accuracy, %",
                _lines(accuracies),
            ),
            Panel(
                "separation gap of each cluster",
                "lines",
                "round",
                "g(α)",
                (*_lines(all_gaps), Series("g = 0", (1.0, float(number)), (0.0, 0.0))),
            ),
            tree_panel(state, groups),
        ),
    )


def _lines(by_round: list[dict[str, float]]) -> tuple[Series, ...]:
    """A line for each cluster over the rounds in which it has a number."""
    points: dict[str, list[tuple[float, float]]] = {}
    for number, values in enumerate(by_round, start=1):
        for name, value in values.items():
            points.setdefault(name, []).append((float(number), value))
    return tuple(
        Series(name, tuple(x for x, _ in line), tuple(y for _, y in line))
        for name, line in points.items()
    )


def tree_panel(state: ParameterTree, groups: Tensor) -> Panel:
    """The parameter tree of a state: each node with the true groups of its clients. A leaf of one
    group has the color of the group.

    Args:
        state: CFL's state.
        groups: (clients,) the true groups.
    """
    members = [groups[state.members(node)] for node in range(len(state.parent))]
    leaves = state.is_leaf().tolist()
    return Panel(
        "parameter tree",
        "tree",
        parents=tuple(state.parent.tolist()),
        labels=tuple(cluster_name(found).replace(": ", "\n") for found in members),
        groups=tuple(
            int(found[0]) if leaf and len(set(found.tolist())) == 1 else -1
            for found, leaf in zip(members, leaves, strict=True)
        ),
    )
