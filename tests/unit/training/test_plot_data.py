"""Features of clients for figures."""

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
def test_every_run_writes_label_counts_and_the_features_of_its_method(
    method: fc.Method, tmp_path: Path
) -> None:
    data = clients()
    fc.run(method, data, fc.models.MLP(8), rounds=2, clients_per_round=1.0, out=tmp_path / "run")
    stored = plot_data.read(tmp_path / "run")
    assert stored is not None
    assert stored.labels is not None
    assert stored.ids.tolist() == list(range(6))
    assert torch.equal(stored.labels, data.describe().counts)
    if method.name in ("fedavg", "local"):
        assert stored.features is None
        assert stored.known is None
        assert stored.what == ""
    else:
        assert stored.features is not None
        assert stored.known is not None
        assert stored.features.isfinite().all()
        assert bool(stored.known.all())
        assert stored.what
        assert stored.measure == ("cosine" if method.name == "cfl" else "euclidean")


def test_the_features_of_clade_are_whitened_signatures_that_separate_the_groups(
    tmp_path: Path,
) -> None:
    data = clients(10)
    fc.run(fc.Clade(), data, fc.models.MLP(8), rounds=1, out=tmp_path / "run")
    stored = plot_data.read(tmp_path / "run")
    assert stored is not None
    assert stored.features is not None
    assert data.groups is not None
    apart = torch.cdist(stored.features, stored.features)
    same = data.groups[:, None] == data.groups
    assert apart[same].max() < apart[~same].min()


def test_many_clients_are_sampled_evenly() -> None:
    number = 3 * MOST_CLIENTS
    stored = plot_data.collect(State({}, torch.zeros(number, dtype=torch.int64)), None)
    assert torch.equal(stored.ids, 3 * torch.arange(MOST_CLIENTS))
    assert stored.labels is None


def test_the_mean_of_centers_leaves_out_invalid_ones() -> None:
    centers = torch.tensor(
        [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [99.0, 99.0]], [[7.0, 7.0], [7.0, 7.0]]]
    )
    features = CentroidState(
        {}, torch.zeros(3, dtype=torch.int64), centers, torch.tensor([2, 1, 0])
    ).features()
    assert features.rows.tolist() == [[2.0, 3.0], [5.0, 6.0], [0.0, 0.0]]
    assert features.known.tolist() == [True, True, False]


def test_a_client_without_an_update_has_no_valid_row() -> None:
    state = fc.CFL.state.initial({"w": torch.zeros(1, 3)}, 4, 2).trained(
        torch.tensor([1]), torch.tensor([1.0]).double(), torch.ones(1, 2)
    )
    features = state.features()
    assert features.known.tolist() == [False, True, False, False]
    assert features.rows.tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


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


def test_the_error_of_a_damaged_file_has_its_path(tmp_path: Path) -> None:
    assert plot_data.read(tmp_path) is None
    plot_data.write(tmp_path, ClientFeatures(torch.arange(2), None))
    again = plot_data.read(tmp_path)
    assert again is not None
    assert again.labels is None
    assert again.ids.tolist() == [0, 1]
    path = tmp_path / plot_data.FILE
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(InvalidInputError, check=lambda error: error.field == str(path)):
        plot_data.read(tmp_path)
