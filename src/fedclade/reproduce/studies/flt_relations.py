"""The relations between clients that FLT, FedSEM and PCA+kM+HC find, as matrices and graphs.

Jamali-Rad et al., arXiv 2103.15947, Figures 2, 3, 11 and 12. No model is evaluated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.cluster import hierarchy

from fedclade.clustering.linkage import cut_number
from fedclade.core.functional_model import Objective
from fedclade.core.method_state import State
from fedclade.core.rng import fold_in
from fedclade.data.federated_dataset import Clients
from fedclade.engines.simulator import Simulator
from fedclade.methods import FedSEM
from fedclade.methods.flt import FLTState
from fedclade.reproduce.panels import Panel, Series, StudyResult
from fedclade.training import experiment_file
from fedclade.training.client_sampling import cohort_of
from fedclade.training.experiment_file import Experiment
from fedclade.training.metrics import adjusted_rand
from fedclade.training.metrics import clusters as count_clusters
from fedclade.training.setup import inject_context, module_for

Tables = dict[str, dict[str, Any]]
Relations = NDArray[np.bool_]
_MOST_IN_GRAPH = 60  # clients that a drawing of the graph can show
_TRAINED_PANELS = (0, 5, 10, 15, 20, 50)  # rounds of a method whose groups change


def relations(tables: Tables, clients: Clients | None, device: str) -> StudyResult:
    """By round: the number of groups, their ARI, and of all pairs of clients the percentage that is
    related. The groups of FLT and PCA+kM+HC do not change, so only round 0, before training, is
    looked at; of FedSEM every `run.eval_every` rounds.

    The panels show the matrix of relations: for FLT Ã, else which clients are in one group. The
    clients are in the order of their true groups if these are known. Few clients are also drawn in
    random order and as graphs, to show the reordering.
    """
    assert clients is not None
    experiment = experiment_file.experiment(tables)
    rows: list[dict[str, Any]] = []
    panels: tuple[Panel, ...] = ()
    for number, state in _states(experiment, clients, device):
        related = relation_matrix(state)
        pairs = related[~np.eye(len(related), dtype=bool)]
        rows.append(
            {
                "round": number,
                "groups": count_clusters(state.cluster_ids),
                "ari": adjusted_rand(clients.groups, state.cluster_ids),
                "related": 100.0 * float(pairs.mean()),
            }
        )
        if isinstance(experiment.method, FedSEM):
            if number in _TRAINED_PANELS:
                panels += (_matrix(related, f"round {number}", _boundaries(clients)),)
        elif clients.groups is not None and len(related) > _MOST_IN_GRAPH:
            panels += (_matrix(related, "clients by true group", _boundaries(clients)),)
        else:
            panels += _reordered(related, clients, experiment.run.seed)
    return StudyResult(rows, panels)


def _states(experiment: Experiment, clients: Clients, device: str) -> Iterator[tuple[int, State]]:
    """The state of the method before the first round and after rounds, as in a run."""
    run, seed = experiment.run, experiment.run.seed
    fed = Simulator(clients, device=device, **experiment.engine.simulator_options())
    module = module_for(experiment.model, clients.metadata, seed, experiment.local.loss)
    objective = Objective(module.to(fed.device), experiment.local.loss_for(None))
    method = inject_context(experiment.method, clients.metadata, seed)
    method = method.with_local_config(experiment.local.training(objective, 1, run.rounds))
    fed.init_client_state(method.initial_client_state(objective.params()))
    state = method.init(fed, objective.params(), fold_in(seed, "init"))
    yield 0, state
    size = run.cohort_size(len(clients))
    for number in range(1, run.rounds + 1 if isinstance(method, FedSEM) else 1):
        key = fold_in(seed, "round", number)
        cohort = cohort_of(fold_in(key, "cohort"), len(clients), size)
        state, cohort = method.prepare_cohort(fed, state, cohort, fold_in(key, "admit"))
        state = method.round(fed, state, cohort, key)
        fed.client_state.commit(number)
        if number == run.rounds or (run.eval_every and number % run.eval_every == 0):
            yield number, state


def relation_matrix(state: State) -> Relations:
    """(M, M) which clients are related: Ã for FLT, else those of one group."""
    if isinstance(state, FLTState):
        return np.asarray(state.mixing[state.row].numpy())
    return np.asarray((state.cluster_ids[:, None] == state.cluster_ids).numpy())


def leaf_order(related: Relations) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Hierarchical clustering of Ã: Ward's tree of its rows, and the order of the clients under it.

    Args:
        related: (M, M) Ã.
    """
    tree = hierarchy.linkage(related.astype(np.float64), "ward")
    return np.asarray(tree), np.asarray(hierarchy.leaves_list(tree), np.int64)


def _matrix(related: Relations, title: str, boundaries: tuple[int, ...] = ()) -> Panel:
    matrix = tuple(map(tuple, related.astype(float).tolist()))
    return Panel(title, "matrix", "client", "client", matrix=matrix, boundaries=boundaries)


def _boundaries(clients: Clients) -> tuple[int, ...]:
    """Where a new true group begins. The clients of a group are consecutive."""
    if clients.groups is None:
        return ()
    return tuple((clients.groups.diff().nonzero().flatten() + 1).tolist())


def _reordered(related: Relations, clients: Clients, seed: int) -> tuple[Panel, ...]:
    """Ã in random order and reordered, with the graph or the tree, and as disjoint groups: as many
    as there are true groups, or two.
    """
    number = count_clusters(clients.groups) if clients.groups is not None else 2
    shuffled = np.random.default_rng(fold_in(seed, "order")).permutation(len(related))
    related = related[np.ix_(shuffled, shuffled)]
    tree, order = leaf_order(related)
    groups = cut_number(tree, number)
    by_group = groups[order]
    boundaries = tuple((np.flatnonzero(np.diff(by_group)) + 1).tolist())
    before = _matrix(related, "Ã, clients in random order")
    after = _matrix(related[np.ix_(order, order)], "Ã, reordered", boundaries)
    if len(related) <= _MOST_IN_GRAPH:
        plain, sorted_ = np.arange(len(related)), order
        return (
            before,
            after,
            _graph(related, groups, plain, "its graph, clients in random order"),
            _graph(related, groups, sorted_, "its graph, reordered"),
        )
    blocks = by_group[:, None] == by_group
    return (before, _dendrogram(tree), after, _matrix(blocks, f"C={number} groups", boundaries))


def _graph(related: Relations, groups: NDArray[np.int64], order: Any, title: str) -> Panel:
    """The graph on a circle on which the clients are in this order."""
    angle = np.empty(len(related))
    angle[order] = 2 * np.pi * np.arange(len(related)) / len(related)
    edges = tuple((int(i), int(j), 1.0) for i, j in np.argwhere(np.triu(related, 1)))
    positions = tuple(zip(np.cos(angle).tolist(), np.sin(angle).tolist(), strict=True))
    return Panel(title, "graph", edges=edges, positions=positions, groups=tuple(groups.tolist()))


def _dendrogram(tree: NDArray[np.float64]) -> Panel:
    """The tree as one broken line."""
    drawn = hierarchy.dendrogram(tree, no_plot=True)
    x, y = [], []
    for across, up in zip(drawn["icoord"], drawn["dcoord"], strict=True):
        x += [*((value - 5) / 10 for value in across), across[-1] / 10]
        y += [*up, float("nan")]
    series = Series("merges", tuple(map(float, x)), tuple(map(float, y)))
    return Panel("the tree of Ã (Ward)", "lines", "client", "height", (series,))
