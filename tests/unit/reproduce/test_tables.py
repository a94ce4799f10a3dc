"""All tables: their names exist, their settings are valid experiments, and their metrics exist."""

import re

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from fedclade.data import DATASETS
from fedclade.data.dataset_catalog import CATALOGUE
from fedclade.methods import FLT, LGFedAvg
from fedclade.reproduce.encoder_data import COMBINED
from fedclade.reproduce.execute import Options, Plan, plan
from fedclade.reproduce.spec import STUDY_DATA, Column, Row, Table, tables
from fedclade.training import experiment_file

SHAPES = {  # of the inputs, and the number of classes
    **dict.fromkeys(("mnist", "fashion_mnist"), ((1, 28, 28), 10)),
    **dict.fromkeys(("emnist_balanced", "emnist47"), ((1, 28, 28), 47)),
    **dict.fromkeys(("emnist_byclass", "emnist62", "femnist"), ((1, 28, 28), 62)),
    **dict.fromkeys(("cifar10", "svhn"), ((3, 32, 32), 10)),
    "cifar100": ((3, 32, 32), 100),
    "ag_news": ((30,), 2_000),
    "shakespeare": ((80,), 77),
    "genomic": ((30, 64), 2),
    "digits": ((1, 8, 8), 10),
}
STAND_INS = ("emnist47", "emnist62")  # .npz files that are no published set
SUMMARY = (
    "accuracy",
    "accuracy_variance",
    "accuracy_worst10",
    "accuracy_tuned",
    "sample_accuracy",
    "sample_accuracy_tuned",
    "accuracy_stderr",
    "train_accuracy",
    "train_accuracy_variance",
    "perplexity",
    "loss",
    "clusters",
    "ari",
    "bytes",
)

every_table = pytest.mark.parametrize("table", tables().values(), ids=lambda table: table.name)
every_run = pytest.mark.parametrize(
    "table", [table for table in tables().values() if not table.study], ids=lambda table: table.name
)


@pytest.fixture(autouse=True)
def _all_data_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedclade.reproduce.execute._is_available", lambda name, root: True)


def planned(table: Table, quick: bool = False) -> Plan:
    return plan(table, Options(seeds=1, quick=quick))


def cells(table: Table) -> list[tuple[Row, Column]]:
    return [
        (row, column)
        for row in table.rows
        for column in table.columns
        if column.name not in row.skip
    ]


def test_there_are_tables_of_all_four_papers() -> None:
    papers = {name.partition("_")[0] for name, table in tables().items() if not table.benchmark}
    assert papers == {"flt", "flis", "cfl", "fedgmcc"}


def test_an_unknown_key_is_rejected() -> None:
    with pytest.raises(ValidationError, match="papers"):
        TypeAdapter(Table).validate_python(
            {
                "title": "t",
                "paper": "p",
                "experiment": {},
                "columns": [],
                "rows": [{"name": "a", "method": "fedavg", "papers": {}}],
            }
        )


@every_table
def test_names_of_columns_and_rows_are_unique(table: Table) -> None:
    for things in (table.columns, table.rows):
        names = [thing.name for thing in things]
        assert len(set(names)) == len(names)


@every_table
def test_names_refer_to_columns_and_rows(table: Table) -> None:
    columns, rows = (
        {column.name: column for column in table.columns},
        {row.name: row for row in table.rows},
    )
    for column in table.columns:
        if column.like is None:
            assert column.data, column.name
        else:
            # Data and settings come from the other column: these here would be ignored.
            assert columns[column.like].like is None
            assert (column.data, column.set, column.quick) == ((), (), ()), column.name
    settable = {name for name, column in columns.items() if column.like is None}
    for row in table.rows:
        assert {*row.paper, *row.skip, *(row.why if isinstance(row.why, dict) else ())} <= set(
            columns
        ), row.name
        assert {*row.sets, *row.encoder} <= settable, row.name
        assert not set(row.paper) & set(row.skip), row.name
        assert set(row.skip) < set(columns), f"{row.name} is skipped everywhere"
    for claim in table.claims:
        assert len(claim.rising) > 1
        if claim.row:
            assert claim.row in rows
            assert set(claim.rising) <= set(columns)
            continue
        assert set(claim.rising) <= set(rows)
        assert set(claim.columns) <= set(columns)
        for name in claim.columns:
            assert not [row for row in claim.rising if name in rows[row].skip], (
                f"{name}: this claim can never be read"
            )


@every_table
def test_data_sets_are_known(table: Table) -> None:
    named = {name for column in table.columns for name in column.data} | {
        name for row in table.rows for name in row.encoder.values()
    }
    assert named <= {*CATALOGUE, *DATASETS, *STAND_INS, *COMBINED, *STUDY_DATA}


@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
@every_run
def test_every_cell_is_an_experiment(table: Table, quick: bool) -> None:
    entries = planned(table, quick).entries
    assert {(row, column) for row, column, _ in entries} == {
        (row.name, table.settings_of(column).name) for row, column in cells(table)
    }
    for entry in entries.values():
        experiment = entry.experiment(None)
        assert experiment.data.name == entry.data
        assert experiment.method.name == entry.row.method
        if entry.column.name in entry.row.encoder:
            assert isinstance(experiment.method, FLT)
        if quick:
            assert experiment.run.rounds <= 2
            assert experiment.partition.clients <= 50


@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
@every_run
def test_models_fit_the_data(table: Table, quick: bool) -> None:
    built: dict[object, torch.nn.Module] = {}
    for entry in planned(table, quick).entries.values():
        experiment = entry.experiment(None)
        for data in entry.column.data:
            key = (experiment.model, data)
            if key not in built:
                with torch.device("meta"):
                    built[key] = experiment.model.build(*SHAPES[data])
            if (
                isinstance(experiment.method, LGFedAvg)
                and experiment.method.local_layers is not None
            ):
                assert (
                    set(experiment.method.local_layers) < dict(built[key].named_children()).keys()
                )


@every_run
def test_runs_have_the_metrics_of_the_table(table: Table) -> None:
    runs = {
        (row, column): entry.experiment(None)
        for (row, column, _), entry in planned(table).entries.items()
    }
    for row, column in cells(table):
        experiment, metric = (
            runs[row.name, table.settings_of(column).name],
            table.metric_of(column),
        )
        run, is_tuned = experiment.run, experiment.personal.layer == "finetune"
        name, _, argument = metric.partition(" ")
        if name in ("rounds_to", "megabits_to", "rounds_to_tuned", "megabits_to_tuned"):
            assert 0 < float(argument) <= 100
            assert run.eval_every == 1, (
                "or a round that was not looked at might have been the first"
            )
            assert not name.endswith("_tuned") or is_tuned
        elif name == "best_accuracy":
            # A row may say itself that it measures fewer rounds.
            assert run.eval_every == 1 or f"run.eval_every={run.eval_every}" in row.set
            assert run.rounds % run.eval_every == 0
        elif name == "accuracy_of_last":
            assert run.eval_every == 1, "or a round is missing"
            assert 0 < int(argument) <= run.rounds
        elif name == "accuracy_at":
            at = int(argument)
            assert at <= run.rounds
            assert at == run.rounds or (run.eval_every and at % run.eval_every == 0)
        else:
            assert metric in (*SUMMARY, "most clusters"), column.name
            assert not metric.endswith("accuracy_tuned") or is_tuned


@every_run
def test_numbers_of_the_papers_are_possible(table: Table) -> None:
    for row, column in cells(table):
        if column.name in row.paper and re.match(
            "accuracy(_tuned|_at .*)?$", table.metric_of(column)
        ):
            assert 0 < row.paper[column.name] <= 100, (row.name, column.name)


@pytest.mark.parametrize("quick", [False, True], ids=["whole", "quick"])
@pytest.mark.parametrize(
    "table", [table for table in tables().values() if table.study], ids=lambda table: table.name
)
def test_every_cell_of_a_study_has_valid_settings(table: Table, quick: bool) -> None:
    for entry in planned(table, quick).entries.values():
        if entry.data not in STUDY_DATA:  # other studies have other settings
            experiment_file.experiment(experiment_file.apply(entry.base, entry.sets))
