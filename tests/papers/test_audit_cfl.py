"""What an audit of the CFL paper (arXiv 1910.01991) against the code found: Definition 2, and the
settings that the paper's text states.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import nn

from fedclade.clustering.cfl import separation_gap
from fedclade.data.partitioning.grouped import LabelClusters, LabelPermutation, LabelSwap
from fedclade.models.recurrent import Lstm
from fedclade.reproduce import execute
from fedclade.reproduce.execute import Options, TableEntry, plan
from fedclade.reproduce.spec import tables
from fedclade.training import experiment_file
from fedclade.training.experiment_file import Experiment

FIGURES = [name for name in tables() if name.startswith("cfl_")]


# --- Definition 2


def drawn_similarity(rng: np.random.Generator, groups: NDArray[np.int64]) -> NDArray[np.float64]:
    """Random, and larger inside groups by a random amount, so that gaps have both signs."""
    noise = rng.uniform(-0.5, 0.5, (len(groups), len(groups)))
    similarity = np.triu(noise + rng.uniform(0, 1.2) * (groups[:, None] == groups) - 0.4, 1)
    similarity = np.clip(similarity + similarity.T, -1, 1)
    np.fill_diagonal(similarity, 1)
    return np.asarray(similarity)


@pytest.mark.parametrize("kinds", [1, 2, 3, 4])
def test_the_gap_is_that_of_all_bipartitions_of_eight_clients(kinds: int) -> None:
    rng = np.random.default_rng(kinds)
    gaps = []
    for _ in range(20):
        groups = rng.permutation(np.arange(8) % kinds)
        similarity = drawn_similarity(rng, groups)
        least = min(similarity[i, j] for i in range(8) for j in range(i) if groups[i] == groups[j])
        sides = [np.array([0, *rest], bool) for rest in product([0, 1], repeat=7) if any(rest)]
        assert len(sides) == 127
        cross = min(similarity[side][:, ~side].max() for side in sides)
        gaps.append(separation_gap(similarity, groups))
        assert gaps[-1] == pytest.approx(least - cross, abs=1e-15)
    if kinds == 1:  # a pure cluster: the clustering is final
        assert max(gaps) <= 0
    else:
        assert min(gaps) < 0 < max(gaps)


def test_the_gap_of_three_clients_of_one_group() -> None:
    similarity = np.array([[1, 0.9, 0.8], [0.9, 1, 0.7], [0.8, 0.7, 1]])
    assert separation_gap(similarity, np.zeros(3, int)) == pytest.approx(-0.1)


# --- settings


@pytest.fixture(autouse=True)
def _all_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "_is_available", lambda name, root: True)


def entries(name: str, column: str, row: str = "") -> list[TableEntry]:
    """The runs of a column, or of one of its rows."""
    found = plan(tables()[name], Options(seeds=1)).entries
    return [
        entry for key, entry in found.items() if key[1] == column and (not row or key[0] == row)
    ]


def experiments(name: str, column: str, row: str = "") -> list[Experiment]:
    return [experiment_file.experiment(entry.tables) for entry in entries(name, column, row)]


def layers(experiment: Experiment, shape: tuple[int, ...]) -> tuple[int, int]:
    """The number of convolutions, and of all layers with weights."""
    modules = list(experiment.model.build(shape, 10).modules())
    convolutions = sum(isinstance(module, nn.Conv2d) for module in modules)
    return convolutions, convolutions + sum(isinstance(module, nn.Linear) for module in modules)


SHAPES: dict[str, tuple[int, ...]] = {"MNIST": (1, 28, 28), "CIFAR-10": (3, 32, 32)}


def test_figure_3_has_three_clients_a_group_and_counts_gaps_above_zero() -> None:
    table = tables()["cfl_figure3"]
    assert {"members": 3, "dimensions": 100}.items() <= table.experiment["study"].items()
    metrics = {table.metric_of(column) for column in table.columns}
    assert "separated 1.1" in metrics
    groups = {
        entry.tables["study"]["groups"] for entry in entries(table.name, table.columns[0].name)
    }
    assert max(groups) > 10  # "even for large values of k > 10" and γ > 1
    assert [row.paper for row in table.rows if row.paper] == 2 * [{"P[g > 0], γ = 1.1": 100.0}]


@pytest.mark.parametrize("data", SHAPES)
@pytest.mark.parametrize("figure", [5, 6])
def test_figures_5_and_6_have_the_setup_of_section_vi_a(figure: int, data: str) -> None:
    found = experiments(f"cfl_figure{figure}", f"{data}, gap of updates")
    assert found
    for experiment in found:
        assert isinstance(experiment.scheme, LabelSwap)
        assert (experiment.partition.clients, experiment.scheme.clusters) == (20, 4)
        assert (experiment.local.epochs, experiment.run.rounds) == (3, 50)
        convolutions, all_layers = layers(experiment, SHAPES[data])
        assert convolutions >= 2
        assert all_layers > convolutions
    points = {experiment.scheme.samples for experiment in found}
    stated: dict[tuple[int, str], set[Any]] = {
        (5, "MNIST"): {10, 20, 200},
        (5, "CIFAR-10"): {100, 500, 2400},
        (6, "MNIST"): {100},
        (6, "CIFAR-10"): {1500},
    }
    assert points >= stated[figure, data]
    if figure == 6:
        assert points == stated[figure, data]
    else:
        assert (min(points), max(points)) == (min(stated[5, data]), max(stated[5, data]))


def test_figure_7_has_all_digits() -> None:
    rows = tables()["cfl_figure7"].rows
    for row in rows:
        [experiment] = experiments("cfl_figure7", "max ‖Δθ_i‖, %", row.name)
        assert experiment.partition.clients == 2
        assert (experiment.local.epochs, experiment.run.rounds) == (3, 1000)
        assert layers(experiment, SHAPES["MNIST"])[0] >= 2
        scheme = experiment.scheme
        if row.name.startswith("congruent"):
            assert scheme == LabelClusters(2, 5, shuffle=False)  # all images of 0–4 and of 5–9
        else:
            assert scheme == LabelSwap(2)
    assert {row.name.split(",")[0] for row in rows} == {
        "congruent: digits 0–4 and 5–9",
        "incongruent: two labels swapped",
    }


@pytest.mark.parametrize(("figure", "column"), [("8", "end"), ("8_gaps", "clusters")])
def test_figure_8_has_the_setup_of_section_vi_c(figure: str, column: str) -> None:
    found = experiments(f"cfl_figure{figure}", column)
    assert found
    for experiment in found:
        assert experiment.scheme == LabelPermutation(4)  # all 50,000 images: 2,500 a client
        assert experiment.partition.clients == 20
        assert experiment.partition.probe == 0
        assert (experiment.local.epochs, experiment.local.batch_size) == (3, 100)
        assert experiment.run.clients_per_round == 1.0
        assert layers(experiment, SHAPES["CIFAR-10"])[1] == 5
    if figure == "8":
        assert tables()["cfl_figure8"].seeds == 3


def test_figure_9_has_a_topic_for_each_client_and_a_two_layer_lstm() -> None:
    for experiment in experiments("cfl_figure9", "perplexity"):
        assert experiment.scheme == LabelClusters(4, 1, key="topic")
        assert (experiment.partition.clients, experiment.run.rounds) == (20, 100)
        assert (experiment.local.epochs, experiment.local.batch_size) == (3, 100)
        modules = experiment.model.build((20,), 50).modules()
        assert sum(isinstance(module, Lstm) for module in modules) == 2


@pytest.mark.parametrize("name", FIGURES)
def test_no_note_calls_a_stated_setting_unknown(name: str) -> None:
    text = " ".join(tables()[name].notes)
    for untrue in ("not known to us", "not been checked", "have not checked", "neither the model"):
        assert untrue not in text


def test_every_figure_of_the_paper_has_a_table_with_a_picture() -> None:
    numbers = {name.removeprefix("cfl_figure").split("_")[0] for name in FIGURES}
    assert numbers == set("123456789")  # 10 to 12 are drawings of the proof
    assert all(tables()[name].pictures for name in FIGURES)
