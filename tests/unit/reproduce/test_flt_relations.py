"""The study of relations: Ã as the method has it, its order, and FedSEM's groups by round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedclade.core.method_state import State
from fedclade.methods.flt import FLTState
from fedclade.reproduce.studies.flt_relations import leaf_order, relation_matrix, relations
from fedclade.training import experiment_file

Tables = dict[str, dict[str, Any]]


def study_of(method: dict[str, Any], clients: int = 10, rounds: int = 1) -> Any:
    tables: Tables = {
        "data": {"name": "digits"},
        "partition": {
            "name": "label_clusters",
            "clients": clients,
            "clusters": 5,
            "classes": 2,
            "samples": 20 if clients <= 20 else 10,
            "probe": 0,
        },
        "model": {"name": "mlp", "hidden": 8},
        "local": {"lr": 0.1, "batch_size": 20},
        "method": method,
        "run": {"rounds": rounds, "seed": 0, "eval_every": 5, "clients_per_round": 0.5},
    }
    experiment = experiment_file.experiment(tables)
    return relations(tables, experiment.clients(), "cpu")


def test_the_relations_of_flt_are_its_matrix() -> None:
    mixing = torch.tensor([[True, True, False], [True, True, True], [False, True, True]])
    zeros = torch.zeros(3, dtype=torch.int64)
    state = FLTState(
        {"w": torch.zeros(3)}, zeros, torch.zeros(3, 1, 1), zeros, torch.arange(3), mixing, {}
    )
    assert relation_matrix(state).tolist() == mixing.tolist()
    groups = State({"w": torch.zeros(2)}, torch.tensor([0, 1, 0]))
    assert relation_matrix(groups).astype(int).tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 1]]


def test_the_order_puts_related_clients_side_by_side() -> None:
    groups = np.array([0, 1, 2, 0, 1, 2, 2, 0])
    _, order = leaf_order(groups[:, None] == groups)
    assert np.count_nonzero(np.diff(groups[order])) == 2


def test_few_clients_are_drawn_in_two_orders_and_as_graphs() -> None:
    study = study_of({"name": "flt", "k": 2, "manifold": "none", "clusters": 5})
    (row,) = study.history
    assert (row["round"], row["groups"], row["ari"]) == (0, 5, 1.0)
    assert row["related"] == pytest.approx(100 / 9)  # one of nine others
    assert [panel.kind for panel in study.panels] == ["matrix", "matrix", "graph", "graph"]
    blocks = np.array(study.panels[1].matrix)
    assert blocks.tolist() == np.kron(np.eye(5), np.ones((2, 2))).tolist()
    assert len(study.panels[3].edges) == 5
    assert study.panels[1].boundaries == (2, 4, 6, 8)


def test_the_groups_of_fedsem_are_followed_by_round() -> None:
    study = study_of({"name": "fedsem", "clusters": 5}, rounds=11)
    assert [row["round"] for row in study.history] == [0, 5, 10, 11]
    assert [panel.title for panel in study.panels] == ["round 0", "round 5", "round 10"]
    assert all(np.array(panel.matrix).shape == (10, 10) for panel in study.panels)
