"""Fed-Heart-Disease: the rows, the split, the scaling and the numbers of the study."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedclade as fc
from fedclade.reproduce.paper_metrics import measure
from fedclade.reproduce.spec import tables
from fedclade.reproduce.studies.hospitals import (
    HOSPITALS,
    accuracies,
    hospitals,
    initial_model,
    read_hospitals,
    scales,
    together,
)

FEATURES = 13


def settings(**study: str) -> dict[str, dict[str, Any]]:
    return {
        "study": study,
        "method": {"name": "fedavg"},
        "local": {"lr": 0.1, "batch_size": 4, "steps": 5, "loss": "bce"},
        "run": {"rounds": 1, "clients_per_round": 1.0, "eval_every": 0, "seed": 0},
    }


def test_the_split_has_the_published_sizes() -> None:
    sizes = {name: (len(part.y), len(part.y_test)) for name, part in read_hospitals().items()}
    assert sizes == {
        "cleveland": (199, 104),
        "hungarian": (172, 89),
        "switzerland": (30, 16),
        "va": (85, 45),
    }
    for part in read_hospitals().values():
        assert part.x.shape[1] == part.x_test.shape[1] == FEATURES
        assert np.isfinite(part.x).all()


def test_the_split_keeps_the_share_of_patients_with_the_disease_where_it_is_stratified() -> None:
    for name, part in read_hospitals().items():
        if name == "switzerland":  # all 30 training patients have the disease
            assert part.y.all()
        else:
            assert abs(part.y.mean() - part.y_test.mean()) < 0.02


def test_features_by_hand() -> None:
    """The first patient of Cleveland: 63 years, male, cp 1, restecg 2."""
    part = read_hospitals()["cleveland"]
    first = [63.0, 1.0, 145.0, 233.0, 1.0, 150.0, 0.0, 2.3, 0.0, 0.0, 0.0, 0.0, 1.0]
    rows = np.concatenate([part.x, part.x_test])
    assert np.isclose(rows, np.array(first, np.float32)).all(1).sum() == 1


def test_training_rows_have_mean_zero_and_deviation_one() -> None:
    own, common = scales()
    for name, part in read_hospitals().items():
        x = own[name].apply(part.x)
        np.testing.assert_allclose(x.mean(0), 0, atol=1e-4)
        varies = part.x.std(0) > 0  # in Switzerland every cholesterol is 0
        np.testing.assert_allclose(x.std(0, ddof=1)[varies], 1, rtol=1e-4)
    rows = np.concatenate([part.x for part in read_hospitals().values()])
    np.testing.assert_allclose(common.apply(rows).std(0, ddof=1), 1, rtol=1e-4)


def test_the_initial_weights_are_those_of_flambys_seed_and_leave_torchs_seed_alone() -> None:
    torch.manual_seed(42)
    expected = nn.Linear(FEATURES, 1)
    torch.manual_seed(7)
    after = torch.rand(1)
    torch.manual_seed(7)
    made = initial_model(0)
    assert torch.equal(torch.rand(1), after)
    for left, right in zip(made.parameters(), expected.parameters(), strict=True):
        assert torch.equal(left, right)


def test_accuracies_by_hand() -> None:
    """A model that says "disease" for everyone is right where there is one."""
    always = nn.Linear(FEATURES, 1)
    nn.init.zeros_(always.weight)
    nn.init.ones_(always.bias)
    values = accuracies(dict.fromkeys(HOSPITALS, always))
    sick = {name: part.y_test.mean() * 100 for name, part in read_hospitals().items()}
    assert values["accuracy Switzerland"] == pytest.approx(sick["switzerland"]) == 93.75
    assert values["accuracy Long Beach"] == pytest.approx(sick["va"], rel=1e-6)
    assert values["accuracy mean"] == pytest.approx(np.mean(list(sick.values())), rel=1e-6)
    everyone = np.concatenate([part.y_test for part in read_hospitals().values()])
    assert values["accuracy all"] == pytest.approx(100 * everyone.mean(), rel=1e-6)


def test_pairs_by_hand() -> None:
    x, y = np.ones((4, 2), np.float32), np.array([0, 1, 0, 1])
    clients = fc.data.from_arrays(dict.fromkeys(HOSPITALS.values(), (x, y, x, y)))
    one = fc.run(fc.FedAvg(), clients, fc.models.Logistic(), rounds=1, clients_per_round=1.0)
    alone = fc.run(fc.Local(), clients, fc.models.Logistic(), rounds=1, clients_per_round=1.0)
    pairs = ("Cleveland with Hungary", "Switzerland with Long Beach", "another pair")
    names = [f"{pair}, % of seeds" for pair in pairs]
    assert together(one) == {"groups": 1, **dict.fromkeys(names, 100.0)}
    assert together(alone) == {"groups": 4, **dict.fromkeys(names, 0.0)}


@pytest.mark.parametrize("train", ["pooled", "va"])
def test_one_model_serves_all_hospitals(train: str) -> None:
    row = hospitals(settings(train=train), None, "cpu").history[-1]
    assert "groups" not in row
    assert {f"accuracy {name}" for name in HOSPITALS.values()} < set(row)


def test_methods_train_on_the_four_hospitals() -> None:
    row = hospitals(settings(train="methods"), None, "cpu").history[-1]
    assert row["groups"] == 1
    assert row == hospitals(settings(train="methods"), None, "cpu").history[-1]


def test_clade_finds_one_group_if_patients_are_assigned_at_random() -> None:
    own, _ = scales()
    data = read_hospitals()
    x = np.concatenate([own[name].apply(part.x) for name, part in data.items()])
    y = np.concatenate([part.y for part in data.values()])
    ends = np.cumsum([len(part.y) for part in data.values()])[:-1]
    for seed in range(20):
        parts = np.split(np.random.default_rng(seed).permutation(len(x)), ends)
        clients = fc.data.from_arrays([(x[rows], y[rows]) for rows in parts])
        settings: dict[str, Any] = {"rounds": 1, "clients_per_round": 1.0, "steps": 1}
        model = initial_model(seed)
        result = fc.run(fc.Clade(), clients, model, loss="bce", seed=seed, **settings)
        assert result.summary["clusters"] == 1


def test_an_unknown_hospital_is_refused() -> None:
    with pytest.raises(fc.InvalidInputError) as caught:
        hospitals(settings(train="paris"), None, "cpu")
    assert caught.value.field == "study.train"


def test_the_table_has_the_study_and_five_seeds() -> None:
    table = tables()["flamby_heart"]
    assert (table.study, table.seeds, table.benchmark) == ("hospitals", 5, "FLamby")


def test_the_study_has_a_value_for_each_column_of_the_table() -> None:
    """A metric such as "accuracy Cleveland" is not the metric "accuracy"."""
    row = hospitals(settings(train="methods"), None, "cpu").history[-1]
    for column in tables()["flamby_heart"].columns:
        assert measure(column.metric, row, [row]) == row[column.metric]
