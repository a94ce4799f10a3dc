"""The settings of the tables against what the papers state. Where a paper is silent, the notes of a
table say what was chosen; here is only what a text says.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

import fedclade as fc
from fedclade.registry import REGISTRY
from fedclade.reproduce import execute
from fedclade.reproduce.execute import Options, TableEntry, plan
from fedclade.reproduce.spec import Table, tables

NOT_SET = object()


@dataclass(frozen=True)
class Statement:
    """What a paper states about some cells of a table.

    Args:
        says: where the paper says it.
        table: the table.
        settings: the settings, by table and key of the experiment file; a function tests a value.
        methods: only rows of these methods; empty for all.
        columns: only columns whose name starts so.
        rows: only rows whose name starts so.
        own: only rows with a number of the paper.
    """

    says: str
    table: str
    settings: dict[str, Any]
    methods: tuple[str, ...] = ()
    columns: str = ""
    rows: str = ""
    own: bool = False


def is_cnn(name: object) -> bool:
    """Whether a registered model is convolutional."""
    return name in ("small_cnn", "leaf_cnn", "cfl_cnn", "gmcc_cnn", "lenet5", "resnet9")


def is_not_given(value: object) -> bool:
    return value is NOT_SET


CFL_CLIENTS = {"partition.clients": 20, "partition.clusters": 4, "local.epochs": 3}
FLT_SCENARIO_1 = {
    "partition.name": "label_clusters",
    "partition.clients": 100,
    "partition.clusters": 5,
    "partition.classes": 2,
    "run.rounds": 100,
}
FLIS_LABEL_SKEW = {"partition.name": "pathological", "partition.clients": 100}

STATEMENTS = [
    # FLT
    Statement("4.3: Scenario 1", "flt_1", FLT_SCENARIO_1),
    Statement("4.4: Scenario 2", "flt_2", {**FLT_SCENARIO_1, "partition.classes": 3}),
    Statement("4.5: FedSEM with C=5", "flt_3", {"method.clusters": 5}, methods=("fedsem",)),
    Statement("4.5: IFCA with C=3", "flt_3", {"method.clusters": 3}, methods=("ifca",)),
    Statement("4.5: 200 writers", "flt_3", {"partition.clients": 200, "local.epochs": 5}),
    Statement(
        "4.6: Enc2 only, fine-tuned for F=5 epochs by each client",
        "flt_4",
        {"method.fine_tune": "client", "method.fine_tune_epochs": 5},
        methods=("flt",),
        own=True,
    ),
    Statement(
        "4.6: ten groups of 2,400 clients",
        "flt_4",
        {"partition.clients": 2400, "partition.clusters": 10},
        columns="MLP",
    ),
    Statement("4.7: E=5", "flt_5", {"local.epochs": 5, "run.rounds": 100}),
    Statement("workshop, 3: k=2", "flt_w1", {"method.k": 2}, methods=("flt",)),
    Statement("workshop, 3: k=2", "flt_w2", {"method.k": 2}, methods=("flt",)),
    # FLIS
    Statement("3.1: 20 %", "flis_1", {**FLIS_LABEL_SKEW, "local.epochs": 10}),
    Statement(
        "3.1: two of ten classes",
        "flis_1",
        {"partition.classes_per_client": 2},
        columns="CIFAR-10 2",
    ),
    Statement(
        "3.1: three of ten classes",
        "flis_1",
        {"partition.classes_per_client": 3},
        columns="CIFAR-10 3",
    ),
    Statement(
        "3.1: the Dirichlet partition of NIID-Bench, which gives nothing more to a full client",
        "flis_2",
        {"partition.name": "dirichlet", "partition.alpha": 0.1, "partition.balanced": True},
    ),
    Statement("3.3: accuracy after local training", "flis_3", {"personal.epochs": 10}),
    # CFL
    Statement("II: d=100 and m=3k", "cfl_figure3", {"study.dimensions": 100, "study.members": 3}),
    Statement("VI-A: convolutional networks", "cfl_figure5", {"model.name": is_cnn, **CFL_CLIENTS}),
    Statement("VI-A: convolutional networks", "cfl_figure6", {"model.name": is_cnn, **CFL_CLIENTS}),
    Statement("VI-A: 100 points", "cfl_figure6", {"partition.samples": 100}, columns="MNIST"),
    Statement("VI-A: 1,500 points", "cfl_figure6", {"partition.samples": 1500}, columns="CIFAR"),
    Statement(
        "VI-A: a convolutional network, three epochs; Figure 7: 1,000 rounds",
        "cfl_figure7",
        {"model.name": is_cnn, "local.epochs": 3, "run.rounds": 1000, "partition.clients": 2},
    ),
    Statement(
        "VI-B: all images of digits 0-4 and 5-9",
        "cfl_figure7",
        {
            "partition.name": "label_clusters",
            "partition.clusters": 2,
            "partition.classes": 5,
            "partition.samples": is_not_given,
        },
        rows="congruent",
    ),
    Statement(
        "VI-C: 20 clients, four permutations, three epochs, batches of 100",
        "cfl_figure8",
        {**CFL_CLIENTS, "local.batch_size": 100, "partition.name": "label_permutation"},
    ),
]


@pytest.fixture(autouse=True)
def _all_data_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "_is_available", lambda name, root: True)


def entries(statement: Statement) -> Iterator[TableEntry]:
    """The cells that a statement is about."""
    for entry in planned(statement.table):
        row = entry.row
        if (
            (not statement.methods or row.method in statement.methods)
            and entry.column.name.startswith(statement.columns)
            and row.name.startswith(statement.rows)
            and (row.paper or not statement.own)
        ):
            yield entry


@cache
def planned(table: str) -> tuple[TableEntry, ...]:
    return tuple(plan(tables()[table], Options(seeds=1)).entries.values())


def value_of(entry: TableEntry, key: str) -> object:
    """A setting of a cell; that of the method's class if the table does not give it."""
    table, _, name = key.partition(".")
    content = entry.tables.get(table, {})
    if name not in content and table == "method":
        return getattr(REGISTRY["method"][entry.row.method](), name)
    return content.get(name, NOT_SET)


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda each: f"{each.table}: {each.says}")
def test_settings_are_those_of_the_paper(statement: Statement) -> None:
    cells = list(entries(statement))
    assert cells
    for entry in cells:
        for key, wanted in statement.settings.items():
            value = value_of(entry, key)
            place = (entry.row.name, entry.column.name, key, value)
            assert wanted(value) if callable(wanted) else value == wanted, place


@pytest.mark.parametrize("name", [name for name in tables() if name.startswith("flt")])
def test_flt_sets_no_samples_apart(name: str) -> None:
    # 4.3: 600 samples per client on MNIST, 500 on CIFAR-10: all of the training data.
    for entry in planned(name):
        assert not entry.needs_probe
        assert entry.tables.get("partition", {}).get("probe", 0) == 0


@pytest.mark.parametrize("name", ["flis_1", "flis_2", "flis_3"])
def test_flis_has_the_servers_2500_samples(name: str) -> None:
    # 3.1: the server has 2,500 samples. All methods of a table have the same clients.
    for entry in planned(name):
        assert entry.needs_probe
        assert entry.tables["partition"].get("probe", 2500) == 2500


def test_figure_3_of_cfl_counts_gaps_above_0() -> None:
    # Eq. 30: P[g > 0]
    table = tables()["cfl_figure3"]
    counted = [column for column in table.columns if "g > 0" in column.name]
    assert counted
    assert all(table.metric_of(column).startswith("separated") for column in counted)


def test_table_3_of_flis_counts_rounds_and_megabits_after_local_training() -> None:
    table = tables()["flis_3"]
    judged = {column for row in table.rows for column in row.paper}
    for name in judged:
        metric = table.metric_of(table.column(name))
        assert metric.startswith(("rounds_to_tuned ", "megabits_to_tuned ")), (name, metric)


@pytest.mark.parametrize("name", ["flt_2", "flt_5"])
def test_scenario_2_says_how_classes_are_shared(name: str) -> None:
    assert "2:1:1" in " ".join(tables()[name].notes)


@pytest.mark.parametrize(
    ("name", "methods"),
    [("flt_w1", {"fedavg", "ifca", "fedsem", "flt"}), ("flt_w2", {"fedavg", "fedsem", "flt"})],
)
def test_the_workshop_tables_have_their_rows_only(name: str, methods: set[str]) -> None:
    assert {row.method for row in tables()[name].rows if row.paper} == methods


@pytest.mark.parametrize(
    "table", [table for table in tables().values() if table.name.startswith("flt")]
)
def test_the_authors_of_flt(table: Table) -> None:
    assert "Szabó" in table.paper
    assert "Singh" not in table.paper


def test_umap_may_have_three_dimensions() -> None:
    # 3.2: u is typically 2 or 3.
    assert fc.FLT(manifold_dim=3).manifold_dim == 3
