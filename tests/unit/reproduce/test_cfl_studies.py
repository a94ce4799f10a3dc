"""CFL's toys and the record of a run: by hand, and against a run without a record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedclade as fc
from fedclade.clustering.cfl import separation_gap
from fedclade.clustering.cosine import cosine
from fedclade.methods.cfl import CFLState
from fedclade.reproduce.panels import Panel
from fedclade.reproduce.studies.cfl_toys import Plane, Toy, border, plane, toy
from fedclade.reproduce.studies.cfl_tree import cluster_name, record, tree, tree_panel
from fedclade.training import experiment_file

Tables = dict[str, dict[str, Any]]


def experiment(**changes: dict[str, Any]) -> Tables:
    tables: Tables = {
        "data": {"name": "digits"},
        "partition": {"name": "label_permutation", "clients": 8, "clusters": 2, "samples": 100},
        "model": {"name": "mlp", "hidden": 32},
        "local": {"lr": 0.5, "batch_size": 20, "epochs": 3},
        "method": {"name": "cfl"},
        "run": {"rounds": 16, "seed": 0, "clients_per_round": 1.0, "eval_every": 4},
    }
    return tables | changes


# --- a recorded run


def test_a_recorded_run_is_the_run_itself() -> None:
    setting = experiment_file.experiment(experiment())
    clients = setting.clients()
    progress, made = record(setting.to_run(clients, "cpu"), lambda made, row, state: made)
    plain = setting.to_run(clients, "cpu").run()
    assert progress.state.cluster_ids.tolist() == plain.clusters.tolist()
    assert [row["clusters"] for row in progress.history] == [r["clusters"] for r in plain.history]
    # Before a split the next model is the mean, weighted by examples, of the trained ones.
    assert made[0].node.tolist() == [0] * 8
    share = clients.sizes / clients.sizes.sum()
    moved = made[0].start[0] + share @ made[0].updates
    torch.testing.assert_close(made[1].start[0], moved, rtol=1e-4, atol=1e-6)


def test_the_gaps_of_a_run() -> None:
    tables = experiment()
    clients = experiment_file.experiment(tables).clients()
    result = tree(tables, clients, "cpu")
    last = result.history[-1]
    assert (last["clusters"], last["gaps above 0"], last["ari"]) == (2, 0, 100.0)
    assert last["gap before the split"] > 0 > last["largest gap"]
    first = last["first split"]
    assert [row["clusters"] for row in result.history] == [1] * (first - 1) + [2] * (17 - first)
    accuracy, gaps, drawn = result.panels
    assert [series.name for series in gaps.series] == [
        "groups 1, 2: 8 clients",
        "group 1: 4 clients",
        "group 2: 4 clients",
        "g = 0",
    ]
    assert len(gaps.series[0].x) == first  # the split needs the updates of its own round
    assert {number for series in accuracy.series for number in series.x} == {4.0, 8.0, 12.0, 16.0}
    assert drawn.parents == (-1, 0, 0)


def test_the_first_gap_is_that_of_the_updates() -> None:
    tables = experiment(run={"rounds": 1, "seed": 0, "clients_per_round": 1.0, "eval_every": 0})
    setting = experiment_file.experiment(tables)
    clients = setting.clients()
    assert clients.groups is not None
    _, [made] = record(setting.to_run(clients, "cpu"), lambda made, row, state: made)
    gap = separation_gap(cosine(made.updates).numpy(), clients.groups[made.ids].numpy())
    [row] = tree(tables, clients, "cpu").history
    assert row["largest gap"] == row["gap before the split"] == pytest.approx(gap)
    assert (row["first split"], row["last split"]) == (None, None)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"method": {"name": "fedavg"}}, "method.name"),
        ({"partition": {"name": "dirichlet", "clients": 4}}, "partition.name"),
    ],
)
def test_the_tree_needs_cfl_and_groups(changes: Tables, field: str) -> None:
    tables = experiment(**changes)
    with pytest.raises(fc.InvalidInputError) as caught:
        tree(tables, experiment_file.experiment(tables).clients(), "cpu")
    assert caught.value.field == field


def test_the_names_of_clusters() -> None:
    assert cluster_name(torch.tensor([2])) == "group 3: 1 client"
    assert cluster_name(torch.tensor([3, 0, 3])) == "groups 1, 4: 3 clients"


def test_a_tree_by_hand() -> None:
    state = CFLState.initial({"w": torch.zeros(1, 2)}, clients=4, size=2)
    updates = torch.tensor([[1.0, 0], [1, 0], [-1, 0], [-1, 0]])
    state = state.split(0, torch.arange(4), torch.tensor([False, False, True, True]), updates)
    panel = tree_panel(state, torch.tensor([0, 0, 1, 0]))
    assert panel.parents == (-1, 0, 0)
    assert panel.labels == (
        "groups 1, 2\n4 clients",
        "group 1\n2 clients",
        "groups 1, 2\n2 clients",
    )
    assert panel.groups == (-1, 0, -1)  # the second leaf is not of one group


# --- toys


@pytest.mark.parametrize("kind", ["xor", "conditionals"])
def test_one_model_fits_no_toy_and_two_do(kind: str) -> None:
    found = {}
    for method in ("fedavg", "cfl", "oracle"):
        study = {"kind": kind, "method": method, "members": 3, "rounds": 40}
        result = toy({"study": study, "run": {"seed": 1}}, None, "cpu")
        found[method] = result.history[-1]
        borders = [s for s in result.panels[0].series if s.name.startswith("border")]
        assert len(borders) == found[method]["models"]
    assert found["fedavg"]["models"] == 1
    assert found["fedavg"]["accuracy"] < 85
    assert found["cfl"]["models"] == found["oracle"]["models"] == 2
    assert min(found["cfl"]["accuracy"], found["oracle"]["accuracy"]) > 98


def test_the_labels_of_the_toys() -> None:
    rng = np.random.default_rng(0)
    for group in (0, 1):
        x, y = Toy("xor", points=200).draw(group, rng)
        assert ((x[:, 0] > 0).mean() > 0.95) == (group == 1)  # the right or the left half
        assert (y == ((x[:, 0] > 0) ^ (x[:, 1] > 0))).mean() > 0.95
        x, y = Toy("conditionals", points=200).draw(group, rng)
        assert (y == (x[:, group] > 0)).all()


def test_the_border_of_a_linear_classifier() -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 2.0]]))
        model.bias.copy_(torch.tensor([0.0, -1.0]))
    for x, y in border(model):  # x + 2 y = 1
        assert x + 2 * y == pytest.approx(1.0)
    assert len(border(model)) == 2
    with torch.no_grad():
        model.bias.copy_(torch.tensor([0.0, 100.0]))
    assert border(model) == []


def path(panel: Panel) -> tuple[float, float]:
    """Where the path of FedAvg ends."""
    server = panel.series[0]
    return server.x[-1], server.y[-1]


def test_paths_in_two_parameters() -> None:
    incongruent = plane({"study": {"congruent": False}, "run": {"seed": 0}}, None, "cpu")
    last = incongruent.history[-1]
    assert last["mean"] < 0.01
    assert last["longest"] > 10
    assert last["cosine"] == pytest.approx(-1.0, abs=1e-4)
    # The stationary point is between the two minima.
    (x, y), minima = path(incongruent.panels[0]), np.array(Plane(False).minima)
    assert (minima.min(0) < (x, y)).all()
    assert (minima.max(0) > (x, y)).all()
    congruent = plane({"study": {"congruent": True}, "run": {"seed": 0}}, None, "cpu")
    assert congruent.history[-1]["longest"] < 0.01
    assert path(congruent.panels[0]) == pytest.approx((1.0, 1.0), abs=1e-3)


@pytest.mark.parametrize("study", [{"rounds": 0}, {"points": 0}])
def test_a_toy_needs_rounds_and_points(study: dict[str, int]) -> None:
    for function in (toy, plane):
        with pytest.raises(fc.InvalidInputError) as caught:
            function({"study": study, "run": {"seed": 0}}, None, "cpu")
        assert caught.value.field == f"study.{next(iter(study))}"
