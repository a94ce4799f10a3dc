"""What a run keeps of its clients for pictures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fedclade as fc
from fedclade.core.method_state import State
from fedclade.errors import InvalidInputError
from fedclade.methods._data_centroids_state import CentroidState
from fedclade.training import metrics, plot_data
from fedclade.training.plot_data import MOST_CLIENTS, ClientFeatures


def clients(number: int = 6) -> fc.data.Clients:
    return fc.data.partition(
        fc.data.load("digits"), fc.data.LabelClusters(clusters=2, classes=2), clients=number, seed=0
    )


@pytest.mark.parametrize(
    "method", [fc.Clade(), fc.CFL(), fc.PCAHC(clusters=2), fc.FedAvg(), fc.Local()]
)
def test_every_run_keeps_the_label_counts_and_what_its_method_grouped_by(
    method: fc.Method, tmp_path: Path
) -> None:
    them = clients()
    fc.run(method, them, fc.models.MLP(8), rounds=2, clients_per_round=1.0, out=tmp_path / "run")
    kept = plot_data.read(tmp_path / "run")
    assert kept is not None
    assert kept.labels is not None
    assert kept.ids.tolist() == list(range(6))
    assert torch.equal(kept.labels, them.describe().counts)
    if method.name in ("fedavg", "local"):
        assert kept.features is None
        assert kept.known is None
        assert kept.what == ""
    else:
        assert kept.features is not None
        assert kept.known is not None
        assert kept.features.isfinite().all()
        assert bool(kept.known.all())
        assert kept.what
        assert kept.measure == ("cosine" if method.name == "cfl" else "euclidean")


def test_clades_features_are_the_whitened_signatures_in_which_groups_lie_apart(
    tmp_path: Path,
) -> None:
    them = clients(10)
    fc.run(fc.Clade(), them, fc.models.MLP(8), rounds=1, out=tmp_path / "run")
    kept = plot_data.read(tmp_path / "run")
    assert kept is not None
    assert kept.features is not None
    assert them.groups is not None
    apart = torch.cdist(kept.features, kept.features)
    same = them.groups[:, None] == them.groups
    assert apart[same].max() < apart[~same].min()


def test_of_many_clients_an_even_sample_is_kept() -> None:
    number = 3 * MOST_CLIENTS
    kept = plot_data.collect(State({}, torch.zeros(number, dtype=torch.int64)), None)
    assert torch.equal(kept.ids, 3 * torch.arange(MOST_CLIENTS))
    assert kept.labels is None


def test_the_mean_of_centres_leaves_out_those_that_are_not_real() -> None:
    centres = torch.tensor(
        [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [99.0, 99.0]], [[7.0, 7.0], [7.0, 7.0]]]
    )
    told = CentroidState(
        {}, torch.zeros(3, dtype=torch.int64), centres, torch.tensor([2, 1, 0])
    ).features()
    assert told.rows.tolist() == [[2.0, 3.0], [5.0, 6.0], [0.0, 0.0]]
    assert told.known.tolist() == [True, True, False]


def test_who_has_no_update_yet_has_no_row_that_counts() -> None:
    state = fc.CFL.state.initial({"w": torch.zeros(1, 3)}, 4, 2).trained(
        torch.tensor([1]), torch.tensor([1.0]).double(), torch.ones(1, 2)
    )
    told = state.features()
    assert told.known.tolist() == [False, True, False, False]
    assert told.rows.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


def test_accuracy_by_cluster_is_the_mean_over_its_clients() -> None:
    values = {
        "accuracy": torch.tensor([100.0, 50.0, 30.0, float("nan")]),
        "loss": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    }
    cluster = torch.tensor([0, 0, 2, 2])
    assert metrics.by_cluster(values, cluster) == {
        "by_cluster_of": "accuracy",
        "by_cluster": [[0, 2, 75.0], [2, 2, 30.0]],
    }
    del values["accuracy"]
    assert metrics.by_cluster(values, torch.tensor([-1, 0, 0, 0])) == {
        "by_cluster_of": "loss",
        "by_cluster": [[0, 3, 3.0]],
    }
    assert metrics.by_cluster({"loss": torch.zeros(60)}, torch.arange(60)) == {}


def test_a_damaged_file_is_told_with_its_name(tmp_path: Path) -> None:
    assert plot_data.read(tmp_path) is None
    plot_data.write(tmp_path, ClientFeatures(torch.arange(2), None))
    again = plot_data.read(tmp_path)
    assert again is not None
    assert again.labels is None
    assert again.ids.tolist() == [0, 1]
    path = tmp_path / plot_data.FILE
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(InvalidInputError, match=r"client_features\.safetensors: damaged"):
        plot_data.read(tmp_path)
