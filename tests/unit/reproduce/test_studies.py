"""Studies: their mathematics by hand, and tables of studies."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

import fedclade as fc
from fedclade.clustering.cfl import separation_gap
from fedclade.clustering.cosine import cosine
from fedclade.clustering.mode_connectivity import SCORED_AT
from fedclade.core.functional_model import Objective
from fedclade.core.inputs import as_inputs
from fedclade.core.pytree import flatten, stack
from fedclade.data.federated_dataset import Clients
from fedclade.reproduce import execute
from fedclade.reproduce.compare_to_paper import Outcome
from fedclade.reproduce.execute import Options, TableEntry, plan
from fedclade.reproduce.markdown import page
from fedclade.reproduce.spec import STUDY_DATA, SYNTHETIC, Table, tables
from fedclade.reproduce.studies import fedgmcc_paths
from fedclade.reproduce.studies.cfl_toys import Plane, Toy
from fedclade.reproduce.studies.cfl_updates import (
    Directions,
    gradient,
    keeps_whole,
    noisy_directions,
    rounds,
    separation,
    two_clients,
)
from fedclade.reproduce.studies.fedgmcc_paths import curves
from fedclade.reproduce.studies.hospitals import Hospitals
from fedclade.training import experiment_file
from fedclade.training.setup import module_for

Tables = dict[str, dict[str, Any]]
SETTINGS = {
    "cfl_directions": Directions,
    "cfl_plane": Plane,
    "cfl_toy": Toy,
    "hospitals": Hospitals,
}
STUDIES = [name for name, table in tables().items() if table.study]


def experiment(**changes: dict[str, Any]) -> Tables:
    tables: Tables = {
        "data": {"name": "digits"},
        "partition": {"name": "label_permutation", "clients": 6, "clusters": 2, "samples": 60},
        "model": {"name": "mlp", "hidden": 16},
        "local": {"lr": 0.1, "batch_size": 20, "epochs": 3},
        "method": {"name": "fedavg"},
        "run": {"rounds": 2, "seed": 0},
    }
    for name, values in changes.items():
        tables[name] = values if "name" in values else tables[name] | values
    return tables


def dealt(tables: Tables) -> Clients:
    return experiment_file.experiment(tables).clients()


def test_gradients_use_all_samples_of_a_client() -> None:
    data = fc.data.load("digits")
    clients = fc.data.from_arrays(
        [(data.x_train[:7], data.y_train[:7]), (data.x_train[7:310], data.y_train[7:310])]
    )
    module = module_for(fc.models.MLP(8), clients.metadata, seed=0)
    objective = Objective(module)
    each = fc.core.ModelAssignment(stack([objective.params()]), torch.zeros(2, dtype=torch.int64))
    got = flatten(
        fc.Simulator(clients, device="cpu")
        .map(gradient(objective), torch.arange(2), per_client=each, key=0)
        .outputs
    )
    for client in range(2):
        rows = clients.train[client]
        module.zero_grad()
        fc.cross_entropy(module(as_inputs(clients.x[rows])), clients.y[rows]).sum().backward()
        by_hand = torch.cat(
            [value.grad.flatten() for value in module.parameters() if value.grad is not None]
        )
        torch.testing.assert_close(got[client], by_hand, rtol=1e-4, atol=1e-5)


def test_the_rounds_are_those_of_fedavg() -> None:
    settings = experiment_file.experiment(
        experiment(local={"schedule": "exponential", "decay": 0.5, "momentum": 0.5})
    )
    clients, local = settings.clients(), settings.local
    moved = [
        round.updates.mean(0) for round in rounds(settings, clients, "cpu", gradients=False)
    ]  # clients are of one size
    start = torch.cat(
        [
            value.flatten()
            for value in module_for(settings.model, clients.metadata, seed=0).parameters()
        ]
    )
    run = fc.run(
        fc.FedAvg(),
        clients,
        settings.model,
        rounds=2,
        clients_per_round=1.0,
        local=local,
        device="cpu",
    )
    end = torch.cat([value.flatten() for value in run.model_of(0).parameters()])
    torch.testing.assert_close(start + sum(moved), end, rtol=1e-4, atol=1e-5)


def test_a_split_group_is_detected() -> None:
    close = np.array([[1.0, 0.9, 0.1], [0.9, 1.0, 0.1], [0.1, 0.1, 1.0]])
    assert keeps_whole(close, np.array([0, 0, 1]))
    assert not keeps_whole(close, np.array([0, 1, 1]))


def test_separation_of_permuted_labels() -> None:
    tables = experiment(partition={"samples": 100}, run={"rounds": 5})
    history = separation(tables, dealt(tables), "cpu").history
    assert [row["round"] for row in history] == [1, 2, 3, 4, 5]
    assert history[-1]["gap updates"] > 0.1
    assert (history[-1]["separated updates"], history[-1]["right updates"]) == (100.0, 100.0)
    for row in history:
        assert row["separated gradients"] == 100.0 * (row["gap gradients"] > 0)
        assert (
            row["separated gradients"] <= row["right gradients"]
        )  # above 0 every bipartition is correct


def test_separation_needs_groups() -> None:
    tables = experiment(partition={"name": "dirichlet", "clients": 4})
    with pytest.raises(fc.InvalidInputError, match=r"'dirichlet'.*label_swap") as caught:
        separation(tables, dealt(tables), "cpu")
    assert caught.value.field == "partition.name"


def test_two_clients_by_hand() -> None:
    tables = experiment(partition={"clients": 2}, run={"rounds": 4})
    clients = dealt(tables)
    history = two_clients(tables, clients, "cpu").history
    first = next(iter(rounds(experiment_file.experiment(tables), clients, "cpu"))).updates.double()
    a, b = first
    assert history[0]["cosine"] == pytest.approx(float(a @ b / (a.norm() * b.norm())))
    assert history[0]["mean"] / history[0]["longest"] == pytest.approx(
        float(((a + b) / 2).norm() / max(a.norm(), b.norm()))
    )
    assert max(row["longest"] for row in history[:3]) == pytest.approx(100.0)
    three = experiment(partition={"clients": 3})
    with pytest.raises(fc.InvalidInputError, match="= 3: ") as caught:
        two_clients(three, dealt(three), "cpu")
    assert caught.value.field == "partition.clients"


def test_directions_add_up_to_zero_and_their_noise_has_the_given_length() -> None:
    setting = Directions(groups=3, members=2, dimensions=7)
    quiet, groups = setting.draw(0.0, np.random.default_rng(1))
    noisy, _ = setting.draw(0.4, np.random.default_rng(1))
    assert groups.tolist() == [0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(quiet.sum(0), 0, atol=1e-12)
    np.testing.assert_allclose(
        np.linalg.norm(noisy - quiet, axis=1), 0.4 * np.linalg.norm(quiet, axis=1)
    )


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 6),
    st.integers(1, 4),
    st.integers(2, 40),
    st.floats(0, 0.99),
    st.integers(0, 2**32),
)
def test_below_the_bound_the_bipartition_is_always_correct(
    groups: int, members: int, dimensions: int, share: float, seed: int
) -> None:
    setting = Directions(groups, members=members, dimensions=dimensions)
    gradients, truth = setting.draw(share * setting.bound(), np.random.default_rng(seed))
    similarity = cosine(torch.from_numpy(gradients)).numpy()
    assert separation_gap(similarity, truth) > 0
    assert keeps_whole(similarity, truth)


def test_the_share_of_correct_draws() -> None:
    def measured(*noises: float, **setting: Any) -> Mapping[str, Any]:
        study = {"draws": 20, "noises": list(noises), **setting}
        return noisy_directions({"study": study, "run": {"seed": 3}}, None, "cpu").history[-1]

    assert measured(0.1, groups=2)["bound"] == pytest.approx(math.sqrt(0.5))
    row = measured(0.3, 2.0, 10.0, groups=5)
    assert (row["separated 0.3"], row["right 0.3"]) == (100.0, 100.0)
    assert row["separated 2.0"] < row["right 2.0"]  # a gap above 0 is enough, not needed
    assert row["right 10.0"] < 50.0
    assert measured(2.0, groups=5)["right 2.0"] == row["right 2.0"]  # the draws are the same
    for field, setting in (("groups", {"groups": 1}), ("noises", {"noises": [-1.0]})):
        with pytest.raises(fc.InvalidInputError) as caught:
            measured(0.1, **setting)
        assert caught.value.field == f"study.{field}"
    with pytest.raises(fc.InvalidInputError, match=r"^study\.noize: "):
        measured(0.1, noize=1.0)


def test_the_loss_of_a_linear_model_along_a_straight_path() -> None:
    """Outputs are linear in u, and the ends differ by d: the loss at u is ½ (u² + (1 − u)²) d², a
    quarter of d² at the midpoint.
    """
    tables = experiment(
        model={"name": "logistic"}, method={"name": "fedgmcc", "mc_samples": 16, "curve_steps": 20}
    )
    [row] = curves(tables, dealt(tables), "cpu").history
    mean = sum((u**2 + (1 - u) ** 2) / 2 for u in SCORED_AT) / len(SCORED_AT)
    assert row["straight middle"] / row["straight"] == pytest.approx(0.25 / mean, rel=1e-4)
    # For a linear model the straight path is the best.
    assert row["bent"] >= row["straight"] * (1 - 1e-4)


def test_a_path_is_drawn_over_u_with_its_spread_over_pairs() -> None:
    tables = experiment(method={"name": "fedgmcc", "mc_samples": 16, "curve_steps": 5})
    result = curves(tables, dealt(tables), "cpu")
    [row], [panel] = result.history, result.panels
    straight, bent = panel.series
    assert (straight.name, bent.name, panel.x_label) == ("straight", "bent", "u")
    assert straight.x[0] == 0
    assert straight.x[10] == 0.5
    assert straight.x[20] == 1
    assert straight.y[10] == pytest.approx(row["straight middle"])
    assert bent.y[10] == pytest.approx(row["bent middle"])
    # The bend has no effect at the ends.
    assert (bent.y[0], bent.y[20]) == pytest.approx((straight.y[0], straight.y[20]))
    assert straight.low is not None
    assert straight.high is not None
    assert all(
        low < mean < high
        for low, mean, high in zip(straight.low, straight.y, straight.high, strict=True)
    )


def test_pairs_are_of_different_groups_if_groups_are_known() -> None:
    clients = dealt(experiment())
    assert clients.groups is not None
    pairs = fedgmcc_paths._pairs(clients)
    assert clients.groups[pairs].tolist() == [[0, 1]] * 3
    assert len(pairs.unique()) == 6
    plain = dealt(experiment(partition={"name": "dirichlet", "clients": 5}))
    assert fedgmcc_paths._pairs(plain).tolist() == [[0, 1], [2, 3]]


def test_a_path_without_training_steps_is_straight() -> None:
    tables = experiment(method={"name": "fedgmcc", "mc_samples": 16, "curve_steps": 0})
    [row] = curves(tables, dealt(tables), "cpu").history
    assert (row["bent"], row["bent middle"]) == (row["straight"], row["straight middle"])
    with pytest.raises(fc.InvalidInputError, match=r"'fedavg'.*fedgmcc") as caught:
        curves(experiment(), dealt(experiment()), "cpu")
    assert caught.value.field == "method.name"


Done = Callable[..., tuple[Outcome, list[TableEntry]]]

TABLE: dict[str, Any] = {
    "name": "small",
    "title": "A small study",
    "paper": "nobody",
    "study": "cfl_two_clients",
    "metric": "longest",
    "seeds": 2,
    "experiment": experiment(partition={"clients": 2}),
    "quick": {"set": ["run.rounds=1"]},
    "columns": [
        {"name": "longest", "data": ["digits"]},
        {"name": "cosine", "like": "longest", "metric": "cosine"},
    ],
    "rows": [
        {"name": "permuted, round 1", "at": 1},
        {"name": "permuted, round 2", "at": 2, "paper": {"longest": 100.0}},
        {"name": "permuted, round 9", "at": 9, "paper": {"longest": 100.0}},
        {"name": "permuted, at the end", "set": ["partition.clusters=2"]},
        {"name": "one kind", "set": ["partition.clusters=1"]},
    ],
}


@pytest.fixture
def small() -> Table:
    return TypeAdapter(Table).validate_python(TABLE)


def test_rows_with_other_rounds_share_a_study_that_is_executed_once(
    small: Table, tmp_path: Path, done: Done
) -> None:
    result, started = done(small, tmp_path)
    assert [(entry.row.name, entry.seed) for entry in started] == [
        (name, seed) for seed in (0, 1) for name in ("permuted, round 1", "one kind")
    ]
    assert len(list(tmp_path.iterdir())) == 4
    cells = {(cell.row, cell.column): cell for cell in result.cells}
    last = cells["permuted, round 2", "longest"]
    assert last.values == cells["permuted, at the end", "longest"].values
    assert last.values != cells["permuted, round 1", "longest"].values
    assert len(set(cells["permuted, round 2", "cosine"].values)) == 2
    missing = cells["permuted, round 9", "longest"]
    assert (missing.mean, missing.mark) == (None, "not reached")
    again, started = done(small, tmp_path)
    assert started == []
    assert (again.cells, again.seconds) == (result.cells, result.seconds)
    assert "| permuted, round 2 | 100.00 |" in page(result)


def test_a_quick_version_of_a_study(small: Table, tmp_path: Path, done: Done) -> None:
    result, started = done(small, tmp_path, quick=True)
    assert len(started) == 2
    assert {cell.row for cell in result.cells if cell.mean is None} == {
        "permuted, round 2",
        "permuted, round 9",
    }


def test_a_study_with_synthetic_data(tmp_path: Path, done: Done) -> None:
    table = {
        **TABLE,
        "study": "cfl_directions",
        "metric": "right 0.01",
        "experiment": {"study": {"draws": 5}},
        "quick": {},
        "seeds": 1,
    }
    table |= {
        "columns": [{"name": "quiet", "data": [SYNTHETIC], "set": ["study.noises=[0.01]"]}],
        "rows": [{"name": "four"}],
    }
    result, _ = done(TypeAdapter(Table).validate_python(table), tmp_path)
    assert [cell.mean for cell in result.cells] == [100.0]


def test_mistakes_in_a_table_of_a_study_are_rejected(small: Table) -> None:
    with pytest.raises(ValidationError, match=r"'cfl_separations'.*'cfl_separation'"):
        TypeAdapter(Table).validate_python({**TABLE, "study": "cfl_separations"})
    with pytest.raises(ValidationError, match="row 'one'"):
        TypeAdapter(Table).validate_python({**TABLE, "rows": [{"name": "one", "method": "fedavg"}]})
    with pytest.raises(ValidationError, match="row 'permuted, round 1'"):
        TypeAdapter(Table).validate_python({**TABLE, "study": ""})
    with pytest.raises(fc.InvalidInputError, match=r"^--methods cfl: ") as caught:
        plan(small, Options(methods=("cfl",)))
    assert caught.value.field == "--methods"


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", STUDIES)
def test_the_studies_of_the_papers_are_well_formed(
    name: str, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute, "_is_available", lambda name, root: True)
    table = tables()[name]
    planned = plan(table, Options(quick=quick))
    for entry in planned.entries.values():
        if entry.data in STUDY_DATA:
            experiment_file.build(SETTINGS[table.study], entry.tables["study"], "study")
        else:
            assert (
                quick or entry.row.at is None or entry.row.at <= entry.experiment(None).run.rounds
            )
    known = {row.name for row in table.rows}, {column.name for column in table.columns}
    for row in table.rows:
        assert known[1] >= {*row.skip, *row.paper}
    for claim in table.claims:
        # A claim about one row compares columns.
        assert known[bool(claim.row)] >= set(claim.rising)
        assert known[0] >= ({claim.row} if claim.row else set())
        assert known[1] >= set(claim.columns)
        assert all(
            not set(claim.columns) & set(row.skip) for row in table.rows if row.name in claim.rising
        )


def test_there_are_studies() -> None:
    assert {"cfl_figure3", "cfl_figure5", "cfl_figure6", "cfl_figure7", "fedgmcc_figure2"} <= set(
        STUDIES
    )
