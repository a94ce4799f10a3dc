"""What the audit of FLT's papers asks of its tables: training columns, encoders, curves, and runs
that tables share.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedclade.methods import FLT
from fedclade.reproduce.encoder_data import COMBINED, encoder_data
from fedclade.reproduce.execute import Options, Plan, plan
from fedclade.reproduce.spec import tables

LONG = {"flt_1": "Table 7", "flt_2": "Table 8", "flt_3": "Table 9", "flt_4": "Table 10"}
CURVES = {
    "flt_1": ("Figure 6",),
    "flt_2": ("Figure 7",),
    "flt_3": ("Figures 4 and 8", "Figure 10"),
    "flt_4": ("Figures 5 and 9",),
    "flt_w1": ("Figure 3",),
    "flt_w2": ("Figure 4",),
}


@pytest.fixture(autouse=True)
def _all_data_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedclade.reproduce.execute._is_available", lambda name, root: True)


def planned(name: str) -> Plan:
    return plan(tables()[name], Options(seeds=1))


@pytest.mark.parametrize("name", LONG)
def test_rows_have_the_training_numbers_of_the_appendix(name: str) -> None:
    table = tables()[name]
    assert LONG[name] in table.paper
    metrics = {column.name: table.metric_of(column) for column in table.columns}
    for row in table.rows:
        given = sorted(metrics[column] for column in row.paper)
        if given:
            assert given == sorted(
                2
                * [
                    "accuracy",
                    "accuracy_variance",
                    "train_accuracy",
                    "train_accuracy_variance",
                ]
            ), row.name


@pytest.mark.parametrize("name", CURVES)
def test_curves_have_points_and_lines(name: str) -> None:
    table = tables()[name]
    titles = " ".join(picture.title for picture in table.pictures)
    for figure in CURVES[name]:
        assert figure in titles
    rows = {row.name for row in table.rows}
    assert table.pictures
    for picture in table.pictures:
        assert set(picture.rows) <= rows
        assert picture.metric in ("accuracy", "train_accuracy")
    for entry in planned(name).entries.values():
        run = entry.experiment(None).run
        assert run.rounds // run.eval_every >= 10, entry.row.name


@pytest.mark.parametrize("name", ["flt_1", "flt_2"])
def test_encoders_1_and_2(name: str) -> None:
    rows = {row.name: row for row in tables()[name].rows}
    assert rows["FLT Enc1"].encoder == {"MNIST": "emnist47", "CIFAR-10": "cifar20"}
    assert rows["FLT Enc2"].encoder == {"CIFAR-10": "cifar100"}  # for MNIST the one that is shipped
    entries = planned(name).entries
    for row, fine_tune in (("FLT Enc1", "none"), ("FLT Enc2", "client")):
        for column in ("MNIST", "CIFAR-10"):
            method = entries[row, column, 0].experiment(None).method
            assert isinstance(method, FLT)
            assert (method.fine_tune, method.fine_tune_epochs) == (fine_tune, 5)
            assert column not in rows[row].skip


def test_cifar_20_is_cifar_10_with_ten_other_classes(tmp_path: Path) -> None:
    for name, classes in (("cifar10", 10), ("cifar100", 100)):
        x = np.arange(2 * classes, dtype=np.uint8)[:, None, None, None].repeat(3, 3)
        y = np.arange(2 * classes) % classes
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x[:1], y_test=y[:1])
    data = encoder_data("cifar20", str(tmp_path))
    (_, every), (_, ten) = COMBINED["cifar20"]
    assert every is None
    assert ten is not None
    assert len(set(ten)) == 10
    assert len(data.y_train) == 20 + 20
    assert set(data.y_train[20:].tolist()) == set(ten)
    assert isinstance(data.x_train, torch.Tensor)
    assert data.x_train.dtype == torch.uint8


def test_rows_of_table_3_have_two_three_and_five_groups() -> None:
    for (row, *_), entry in planned("flt_3").entries.items():
        method = entry.experiment(None).method
        if isinstance(method, FLT):
            expected = int(row[-1]) if "C=" in row else None
            case = "graph" if expected is None else "clusters"
            assert (method.clusters, method.aggregation) == (expected, case), row
            assert method.fine_tune == "client"


@pytest.mark.parametrize(
    ("one", "other", "pairs"),
    [
        ("flt_2", "flt_5", [("FLT Enc1", "FLT"), ("FedSEM", "FedSEM"), ("Clade", "Clade")]),
        ("flt_3", "flt_w1", [("FedAvg", "FedAvg"), ("FedSEM, C=5", "FedSEM, C=5")]),
        ("flt_4", "flt_w2", [("FedAvg", "FedAvg"), ("FedSEM", "FedSEM"), ("Clade", "Clade")]),
        ("flt_figure11", "flt_figure12", [("FedSEM", "FedSEM, round 50")]),
    ],
)
def test_equal_runs_are_made_once(one: str, other: str, pairs: list[tuple[str, str]]) -> None:
    first = {
        "flt_2": "CIFAR-10",
        "flt_3": "MLP",
        "flt_4": "MLP",
        "flt_5": "M=100, ρ=0.2, T=100",
        "flt_w1": "MLP",
        "flt_w2": "MLP",
        "flt_figure11": "groups found",
        "flt_figure12": "ARI",
    }
    entries, others = planned(one).entries, planned(other).entries
    for row, same in pairs:
        assert entries[row, first[one], 0].label == others[same, first[other], 0].label, row
